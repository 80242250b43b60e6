"""What classifiers share that train by gradient descent when they learn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dulbe_peft.classifiers.calibration import ranking


@contextmanager
def gradients() -> Iterator[None]:
    """Gradients on, whatever surrounds it; a tensor made in inference mode must be cloned inside the block."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


def minibatches(images: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Row numbers of `images` in random order, `size` at a time; the same in whatever order the images come."""
    ranked = ranking(images).argsort()
    return ranked[torch.randperm(len(images), generator=generator).to(ranked.device)].split(size)
