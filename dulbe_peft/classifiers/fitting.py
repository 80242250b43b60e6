"""What classifiers share that train by gradient descent when they learn."""

import math

import torch
from torch import Tensor

from dulbe_peft.classifiers.calibration import ranking


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step of gradient descent."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def minibatches(images: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Row numbers of `images` in random order, `size` at a time; the same in whatever order the images come."""
    ranked = ranking(images).argsort()
    return ranked[torch.randperm(len(images), generator=generator).to(ranked.device)].split(size)


def task_generator(seed: int, old: int) -> torch.Generator:
    """The random numbers of the task that comes when `old` classes are known."""
    return torch.Generator().manual_seed((seed * 1_000_003 + old) % 2**63)


def uniform(generator: torch.Generator, width: int, *shape: int) -> Tensor:
    """Numbers as PyTorch's linear layers of an input of this width start: evenly within 1 / sqrt(width) of 0."""
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(width)


def class_means(images: Tensor, labels: Tensor) -> Tensor:
    """The mean of each class's (n, d) features, (classes, d), float64 on the CPU."""
    counts = labels.cpu().bincount()
    sums = torch.zeros(len(counts), images.shape[1], dtype=torch.float64)
    return sums.index_add(0, labels.cpu(), images.cpu().double()) / counts[:, None]
