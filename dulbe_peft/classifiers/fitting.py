"""What classifiers share that train by gradient descent when they learn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def gradients() -> Iterator[None]:
    """Gradients on, whatever surrounds it; a tensor made in inference mode must be cloned inside the block."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def minibatches(count: int, size: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    """The numbers 0 to count - 1 in random order, `size` at a time; the last batch may be short."""
    return torch.randperm(count, generator=generator).split(size)
