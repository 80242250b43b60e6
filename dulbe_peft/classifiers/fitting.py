"""What classifiers share that train by gradient descent when they learn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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


def task_generator(seed: int, old: int) -> torch.Generator:
    """The random numbers of the task that comes when `old` classes are known."""
    return torch.Generator().manual_seed((seed * 1_000_003 + old) % 2**63)


def gaussians(images: Tensor, labels: Tensor, classes: int, ridge: float) -> tuple[Tensor, Tensor]:
    """Mean, (classes, d), and Cholesky factor of the covariance, (classes, d, d), of each class's (n, d) features."""
    rows, counts = images.cpu().double()[labels.cpu().argsort(stable=True)], labels.bincount(minlength=classes)
    identity = torch.eye(rows.shape[1], dtype=torch.float64)
    means, factors = [], images.new_empty(classes, *identity.shape)
    for index, own in enumerate(rows.split(counts.tolist())):
        centred = own - own.mean(dim=0)
        covariance = centred.T @ centred / max(1, len(own) - 1) + ridge * identity
        means.append(own.mean(dim=0))
        factors[index] = torch.linalg.cholesky(covariance)
    return torch.stack(means).to(images), factors


def moved_gaussians(classifier: Any, matrix: Tensor) -> dict[str, Tensor]:
    """mu_c M and the factors of M' Sigma_c M, from a classifier's `means` and `factors`; M is (d, d), float64."""
    matrix = matrix.cpu()
    return {"means": classifier.means.double().cpu() @ matrix, "factors": matrix.T @ classifier.factors.double().cpu()}
