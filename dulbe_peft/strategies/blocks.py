"""In which block of a tower a layer is, and a tower that ends early."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn


def block_of(name: str) -> int:
    """The number of the block in a layer's dotted name, -1 where there is none.

    >>> block_of("vision_model.encoder.layers.3.mlp.fc1")
    3
    """
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def lower_and_upper(names: Iterable[str], share: float) -> tuple[list[str], list[str], int]:
    """The layers of the lower blocks, all other layers, and how many blocks are lower ones: `share`, rounded down.

    The last block among `names` is taken for the tower's last one.
    """
    blocks = {name: block_of(name) for name in names}
    count = int(share * (1 + max(blocks.values(), default=-1)))
    lower = [name for name, block in blocks.items() if 0 <= block < count]
    return lower, [name for name in blocks if name not in lower], count


@contextmanager
def early_exit(model: nn.Module, name: str, count: int) -> Iterator[None]:
    """Let the tower that has the layer `name` end after `count` blocks, with its own last norm and projection."""
    path, _, attribute = name[: name.index(f".{block_of(name)}.")].rpartition(".")
    parent = model.get_submodule(path)
    blocks: nn.ModuleList = getattr(parent, attribute)
    setattr(parent, attribute, blocks[:count])
    try:
        yield
    finally:
        setattr(parent, attribute, blocks)
