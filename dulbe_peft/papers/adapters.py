"""Small networks beside the MLP of every block: y = MLP(x) + update(x), for x, (n, tokens, width), after the norm."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dulbe_peft.encoders.encoding import hooked
from dulbe_peft.encoders.loading import encoder_of
from dulbe_peft.papers.fitting import uniform

_MLP = re.compile(r"layers?\.\d+\.mlp$")


def mlps_of(clip: nn.Module, text: bool = False) -> list[nn.Module]:
    """Return the MLP of every block of the vision tower, or of the text tower with `text`, in order."""
    tower = encoder_of(clip).text_tower
    found = [
        module
        for name, module in clip.named_modules()
        if _MLP.search(name) and text == (tower is not None and name.startswith(f"{tower}."))
    ]
    if not found:
        which = "text" if text else "vision"
        raise ValueError(f"the {which} tower of a {type(clip).__name__} has no MLP of its own in each block")
    return found


def width_of_mlps(clip: nn.Module, text: bool = False) -> int:
    """Return the width of the tokens that the MLPs read and write."""
    config: Any = clip.config
    part = getattr(config, "text_config" if text else "vision_config", config)
    return int(part.hidden_size)


@contextmanager
def beside_mlps(modules: Sequence[nn.Module], update: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    """Add `update(block, x)` to the output of each MLP while the block runs."""

    def hook_of(block: int) -> Callable[..., Tensor]:
        return lambda _, given, result: result + update(block, given[0]).to(result.dtype)

    with hooked(*((module.register_forward_hook, hook_of(block)) for block, module in enumerate(modules))):
        yield


def bottleneck(x: Tensor, down: Tensor, up: Tensor, *biases: Tensor) -> Tensor:
    """Return relu(x down' [+ bias]) up' [+ bias], for down, (r, width), and up, (width, r)."""
    first, second = biases or (None, None)
    hidden = torch.nn.functional.linear(x, down, first).relu()
    return torch.nn.functional.linear(hidden, up, second)


def started(generator: torch.Generator, *shape: int) -> Tensor:
    """Return down-projections, (..., r, width), uniform between -1 / sqrt(width) and 1 / sqrt(width)."""
    return uniform(generator, shape[-1], *shape)
