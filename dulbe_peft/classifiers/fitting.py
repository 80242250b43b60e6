"""What classifiers share that train by gradient descent when they learn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dulbe_peft.classifiers.calibration import ranking
from dulbe_peft.classifiers.checks import check_directions


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


def with_means(classifier: Any, names: Sequence[str], images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """The rows `means`, `counts` and `task` of a classifier with those of a new task's classes."""
    counts = labels.bincount()
    sums = torch.zeros(len(names), images.shape[1], dtype=torch.float64)
    means = sums.index_add(0, labels.cpu(), images.cpu().double()) / counts.cpu()[:, None]
    check_directions(means, names)
    number = int(classifier.task.max()) + 1 if len(classifier.task) else 0
    return {
        "means": torch.cat([classifier.means.float(), means.to(images)]),
        "counts": torch.cat([classifier.counts, counts]),
        "task": torch.cat([classifier.task, torch.full_like(counts, number)]),
    }


def stand_ins(means: Tensor, counts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Class means, (C, d), in place of images, and their labels: as many of a class as it had images, or `most`."""
    times = counts.clamp(max=most)
    labels = torch.arange(len(means), device=means.device)
    return means.float().repeat_interleave(times, dim=0), labels.repeat_interleave(times)


def tasks_left(changes: dict[str, Tensor], name: str, rows: Tensor) -> dict[str, Tensor]:
    """Changes of the rows of classes, where `rows`, one a task, lose those of tasks without a class."""
    left, task = changes["task"].unique(return_inverse=True)
    return changes | {"task": task, name: rows[left]}


def check_tasks(task: Tensor, rows: int) -> None:
    """Raise a ValueError unless the classes' tasks, (classes,), are 0, 1 .. in order, each with its row of `rows`."""
    if task.unique_consecutive().tolist() != list(range(rows)):
        raise ValueError(f"task must count up from 0 to {rows - 1}, got {task.tolist()!r:.100}")
