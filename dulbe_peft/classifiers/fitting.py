"""What classifiers share that train by gradient descent when they learn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def gradients() -> Iterator[None]:
    """Gradients on, whatever surrounds it; a tensor made in inference mode must be cloned inside the block."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def minibatches(count: int, size: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """The numbers 0 to count - 1 in random order, `size` at a time; the last batch may be short."""
    return torch.randperm(count, generator=generator).split(size)


def whole(name: str, value: Any, least: int) -> int:
    """`value` as an int.

    Raises:
        TypeError: it is no int.
        ValueError: it is below `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    return value
