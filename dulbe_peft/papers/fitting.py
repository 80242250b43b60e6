"""What classifiers share that train by gradient descent when they learn, with old classes drawn or as their means."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.calibration import ranking
from dulbe_peft.classifiers.checks import check_directions


@torch.enable_grad()
def fit(
    loss: Callable[[int, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    epochs: Iterable[Iterable[Tensor]],
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None,
) -> None:
    """Descend on the `loss` of every step's number in its epoch and batch; the learning rate falls after an epoch."""
    for batches in epochs:
        for step, rows in enumerate(batches):
            optimizer.zero_grad()
            loss(step, rows).backward()
            optimizer.step()
        if schedule is not None:
            schedule.step()


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


class KeptGaussians(Classifier):
    """Keeps mu_c, (C, d), and the Cholesky factor of Sigma_c, (C, d, d), of each class's features."""

    def register(self) -> None:
        self.register_rows("means", self.embed_dim)
        self.register_rows("factors", self.embed_dim, self.embed_dim)

    def with_gaussians(self, images: Tensor, labels: Tensor, ridge: float) -> dict[str, Tensor]:
        """The rows of all classes with those of a new task's; `ridge` is added to the diagonal of each covariance."""
        labels = labels.cpu() - len(self._class_names)
        rows, counts = images.cpu().double()[labels.argsort(stable=True)], labels.bincount()
        least = ridge * torch.eye(rows.shape[1], dtype=torch.float64)
        means, factors = [], images.new_empty(len(counts), *least.shape)
        for index, own in enumerate(rows.split(counts.tolist())):
            means.append(own.mean(dim=0))
            centred = own - means[-1]
            covariance = torch.addmm(least, centred.T, centred, alpha=1 / max(1, len(own) - 1))
            factors[index] = torch.linalg.cholesky(covariance)
        return self.with_rows(means=torch.stack(means).to(images), factors=factors)

    def drawn(self, classes: Tensor, generator: torch.Generator) -> Tensor:
        """One feature mu_c + L_c n, n standard normal, for each entry of `classes`, (n, d)."""
        noise = torch.randn(len(classes), self.embed_dim, generator=generator).to(self.means.device)
        drawn = torch.empty_like(noise)
        for index in classes.unique():
            rows = classes == index
            drawn[rows] = self.means[index].float() + noise[rows] @ self.factors[index].float().T
        return drawn

    def replay(
        self, order: Tensor, step: int, classes: int, draws: int, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """So many drawn features of each of the `classes` that are next in the `order`, and their labels."""
        labels = order[(classes * step + torch.arange(classes)) % len(order)].repeat_interleave(draws)
        labels = labels.to(self.means.device)
        return self.drawn(labels, generator), labels

    def moved(self, matrix: Tensor) -> dict[str, Tensor]:
        """mu_c to mu_c M and Sigma_c to M' Sigma_c M; what is trained stays: the next task trains on moved draws."""
        return {"means": self.means.double().cpu() @ matrix, "factors": matrix.T @ self.factors.double().cpu()}


class ReplayedMeans(Classifier):
    """Keeps each class's mean feature, number of images and task, and the buffer `by_task` with one row a task."""

    needs_text = True
    moves = ("means",)  # what is trained stays: the task that follows trains it on moved means
    by_task: ClassVar[str]

    def keep_means(self, numbers: int) -> None:
        """Register the buffers; `numbers` are those of a task."""
        self.register_rows("means", self.embed_dim)
        self.register_rows(self.by_task, numbers, of=".tasks")
        self.register_rows("counts", dtype=torch.int64)
        self.register_rows("task", dtype=torch.int64)

    def with_means(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        """The rows of all classes with those of a new task's."""
        labels = labels - len(self._class_names)
        means = class_means(images, labels)
        check_directions(means, new)
        task = next_task(self.task, len(new))
        return self.with_rows(means=means.to(images), counts=labels.bincount(), task=task)

    def forgotten(self, kept: Tensor) -> dict[str, Tensor]:
        """The numbers of a task leave with its last class."""
        changes = super().forgotten(kept)
        left, changes["task"] = changes["task"].unique(return_inverse=True)
        return changes | {self.by_task: getattr(self, self.by_task)[left]}

    def _check(self, state: Mapping[str, Tensor], class_names: list[str]) -> None:
        super()._check(state, class_names)
        task, rows = state["task"], len(state[self.by_task])
        if task.unique_consecutive().tolist() != list(range(rows)):
            raise ValueError(f"task must count up from 0 to {rows - 1}, got {task.tolist()!r:.100}")


def next_task(task: Tensor, classes: int) -> Tensor:
    """The number of the task that follows those of the known classes, from 0, for each of its classes."""
    return task.new_full((classes,), int(task.max()) + 1 if len(task) else 0)


def stand_ins(means: Tensor, counts: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Class means, (C, d), in place of images, and their labels: as many of a class as it had images, or `most`."""
    times = counts.clamp(max=most)
    labels = torch.arange(len(means), device=means.device)
    return means.float().repeat_interleave(times, dim=0), labels.repeat_interleave(times)
