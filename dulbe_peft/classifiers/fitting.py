"""What classifiers share that train by gradient descent when they learn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from dulbe_peft.classifiers.calibration import ranking


@contextmanager
def gradients(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Gradients on, whatever surrounds it, and copies of the tensors: one made in inference mode cannot be used."""
    with torch.inference_mode(False), torch.enable_grad():
        yield [tensor.clone() for tensor in tensors]


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


def gaussians(images: Tensor, labels: Tensor, classes: int, ridge: float) -> tuple[Tensor, Tensor]:
    """Mean, (classes, d), and Cholesky factor of the covariance, (classes, d, d), of each class's (n, d) features."""
    rows, counts = images.cpu().double()[labels.cpu().argsort(stable=True)], labels.bincount(minlength=classes)
    least = ridge * torch.eye(rows.shape[1], dtype=torch.float64)
    means, factors = [], images.new_empty(classes, *least.shape)
    for index, own in enumerate(rows.split(counts.tolist())):
        means.append(own.mean(dim=0))
        centred = own - means[-1]
        covariance = torch.addmm(least, centred.T, centred, alpha=1 / max(1, len(own) - 1))
        factors[index] = torch.linalg.cholesky(covariance)
    return torch.stack(means).to(images), factors


def drawn_features(means: Tensor, factors: Tensor, classes: Tensor, generator: torch.Generator) -> Tensor:
    """One feature mu_c + L_c n, n standard normal, for each entry of `classes`, (n, d)."""
    noise = torch.randn(len(classes), means.shape[1], generator=generator).to(means.device)
    drawn = torch.empty_like(noise)
    for index in classes.unique():
        rows = classes == index
        drawn[rows] = means[index].float() + noise[rows] @ factors[index].float().T
    return drawn


def class_means(images: Tensor, labels: Tensor) -> Tensor:
    """The mean of each class's (n, d) features, (classes, d), float64 on the CPU."""
    counts = labels.cpu().bincount()
    sums = torch.zeros(len(counts), images.shape[1], dtype=torch.float64)
    return sums.index_add(0, labels.cpu(), images.cpu().double()) / counts[:, None]
