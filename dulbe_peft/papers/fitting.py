"""Shared parts of classifiers trained by gradient descent, which replay old classes as samples or as class means."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dulbe_peft.classifiers.checks import check_directions
from dulbe_peft.classifiers.groups import ranking
from dulbe_peft.classifiers.rule import Rule
from dulbe_peft.classifiers.state import Layout, State, per_class


@torch.enable_grad()
def fit(
    loss: Callable[[int, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    epochs: Iterable[Iterable[Tensor]],
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> None:
    """Minimise `loss(step, rows)` over the batches of all epochs; `schedule` advances after each epoch.

    `step` is the number of the batch within its epoch, and `rows` are the row numbers of the batch.
    """
    for batches in epochs:
        for step, rows in enumerate(batches):
            optimizer.zero_grad()
            loss(step, rows).backward()
            optimizer.step()
        if schedule is not None:
            schedule.step()


def minibatches(images: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    """Return the row numbers of `images` in random order, split into batches; the input order makes no difference."""
    ranked = ranking(images).argsort()
    return ranked[torch.randperm(len(images), generator=generator).to(ranked.device)].split(size)


def task_generator(seed: int, old: int) -> torch.Generator:
    """Return the random generator of the task that is learned after `old` classes."""
    return torch.Generator().manual_seed((seed * 1_000_003 + old) % 2**63)


def uniform(generator: torch.Generator, width: int, *shape: int) -> Tensor:
    """Sample uniformly between -1 / sqrt(width) and 1 / sqrt(width), as PyTorch initialises a linear layer."""
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(width)


def class_means(images: Tensor, labels: Tensor) -> Tensor:
    """Return the mean feature of each class, (classes, d), float64 on the CPU, from features, (n, d)."""
    counts = labels.cpu().bincount()
    sums = torch.zeros(len(counts), images.shape[1], dtype=torch.float64)
    return sums.index_add(0, labels.cpu(), images.cpu().double()) / counts[:, None]


@dataclass(frozen=True)
class KeptGaussians(Rule):
    """Base of rules with a Gaussian per class.

    They keep mu_c, (C, d), and the Cholesky factors of Sigma_c, (C, d, d).
    """

    can = frozenset({"move", "follow"})

    def tensors(self) -> dict[str, Layout]:
        return {"means": per_class(self.embed_dim), "factors": per_class(self.embed_dim, self.embed_dim)}

    def with_gaussians(self, state: State, images: Tensor, labels: Tensor, ridge: float) -> dict[str, Tensor]:
        """Return the means and factors of all classes, including a new task's; `ridge` is added to each diagonal."""
        labels = labels.cpu() - state.classes
        rows, counts = images.cpu().double()[labels.argsort(stable=True)], labels.bincount()
        least = ridge * torch.eye(rows.shape[1], dtype=torch.float64)
        means, factors = [], images.new_empty(len(counts), *least.shape)
        for index, features in enumerate(rows.split(counts.tolist())):
            means.append(features.mean(dim=0))
            centred = features - means[-1]
            covariance = torch.addmm(least, centred.T, centred, alpha=1 / max(1, len(features) - 1))
            factors[index] = torch.linalg.cholesky(covariance)
        return state.with_rows(means=torch.stack(means).to(images), factors=factors)

    def sample(self, state: State, classes: Tensor, generator: torch.Generator) -> Tensor:
        """Sample one feature mu_c + L_c n, n standard normal, for each entry of `classes`; returns (n, d)."""
        noise = torch.randn(len(classes), self.embed_dim, generator=generator).to(state.means.device)
        samples = torch.empty_like(noise)
        for index in classes.unique():
            rows = classes == index
            samples[rows] = state.means[index].float() + noise[rows] @ state.factors[index].float().T
        return samples

    def replay(
        self, state: State, order: Tensor, step: int, classes: int, draws: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Sample `draws` features for each of the next `classes` classes in `order`; returns features and labels."""
        labels = order[(classes * step + torch.arange(classes)) % len(order)].repeat_interleave(draws)
        labels = labels.to(state.means.device)
        return self.sample(state, labels, generator), labels

    def moved(self, state: State, matrix: Tensor, lifted: bool = False) -> dict[str, Tensor]:
        """Map mu_c to mu_c M and Sigma_c to M' Sigma_c M. Trained weights stay; later tasks train on moved samples."""
        return {"means": state.means.double().cpu() @ matrix, "factors": matrix.T @ state.factors.double().cpu()}


@dataclass(frozen=True)
class ReplayedMeans(Rule):
    """Base of rules that replay class means.

    They keep each class's mean feature, number of images and task, and the tensor named `by_task`, one row per task,
    which has `numbers` entries.
    """

    needs_text = True
    can = frozenset({"move", "follow"})
    by_task: ClassVar[str]

    @property
    def numbers(self) -> int:
        raise NotImplementedError

    def tensors(self) -> dict[str, Layout]:
        return {
            "means": per_class(self.embed_dim, moves=True),  # trained weights stay: they are trained on moved means
            self.by_task: per_class(self.numbers, of=".tasks"),
            "counts": per_class(dtype=torch.int64),
            "task": per_class(dtype=torch.int64),
        }

    def with_means(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        """Return the means, counts and tasks of all classes, including those of a new task."""
        labels = labels - state.classes
        means = class_means(images, labels)
        check_directions(means, new)
        task = next_task(state.task, len(new))
        return state.with_rows(means=means.to(images), counts=labels.bincount(), task=task)

    def forgotten(self, state: State, kept: Tensor) -> dict[str, Tensor]:
        """Drop classes; when the last class of a task is dropped, its row of the tensor `by_task` goes too."""
        changes = super().forgotten(state, kept)
        left, changes["task"] = changes["task"].unique(return_inverse=True)
        return changes | {self.by_task: state[self.by_task][left]}

    def check(self, state: State) -> None:
        task, rows = state["task"], len(state[self.by_task])
        if task.unique_consecutive().tolist() != list(range(rows)):
            raise ValueError(f"task must count up from 0 to {rows - 1}, got {task.tolist()!r:.100}")


def next_task(task: Tensor, classes: int) -> Tensor:
    """Return the next task's number, counted from 0, repeated for each of its `classes` classes."""
    return task.new_full((classes,), int(task.max()) + 1 if len(task) else 0)


def stand_ins(means: Tensor, counts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Repeat each class mean, (C, d), once per image of the class, at most `most` times; returns means and labels."""
    times = counts.clamp(max=most)
    labels = torch.arange(len(means), device=means.device)
    return means.float().repeat_interleave(times, dim=0), labels.repeat_interleave(times)
