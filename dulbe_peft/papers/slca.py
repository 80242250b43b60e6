"""SLCA: LoRA at a small rate, and a linear head that each task aligns anew on features from all classes' Gaussians.

x = sqrt(d) z,  score = W x + b
head:       rows of a task's classes, trained on the task's features by the cross-entropy over these classes
alignment:  from task 2 on, all rows, from what their task has trained, on x ~ N(a_c mu_c, Sigma_c), as many of each
            a_c = 0.9 + 0.1 (t_c + 1) / T             t_c: the class's task of T, from 0
            cross-entropy of scores / (h n),  n = mean over tasks of |scores of the task's classes|,  h = 0.1
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.papers.fitting import KeptGaussians, fit, minibatches, next_task, task_generator
from dulbe_peft.strategies.lora import Lora
from dulbe_peft.utils.settings import AtLeastOne, Positive, Seed

MOMENTUM, DECAY = 0.9, 5e-4  # of both trainings, as in the authors' configuration


class SlcaClassifier(KeptGaussians):
    """A linear head and one Gaussian a class, 4 d (d + 3) bytes; it draws features, and keeps no image.

    The head is kept twice, aligned for the scores, and as trained for the next alignment.
    The authors' features have passed a LayerNorm, which gives them a norm near sqrt(d); unit features get it here.
    Learning runs twice for each task, because the temperature of the probabilities needs held-back images. Every task
    aligns all classes, so its time grows with their square.

    Args:
        epochs: passes over a task's features. With few steps the head's scores stay small, and the alignment, whose
            gradient grows as they shrink, overshoots: digits were told at 37 % after 5 steps a task, at 92 % after 20.
        batch_size: features of images per step.
        learning_rate: of SGD for head and alignment.
        rounds: how often the alignment draws anew; its rate falls to 0 over them on a cosine.
        draws: drawn features of each class in a round, and features in a step of the alignment.
        norm: h.
        ridge: what is added to the diagonal of a covariance of x.
        seed: of the order of the features and of the draws.

    Reference:
        Zhang et al., "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a Pre-trained Model",
        arXiv 2303.05118, and the authors' public code, of which the settings are.
    """

    epochs: AtLeastOne = 20
    batch_size: AtLeastOne = 128
    learning_rate: Positive = 0.01
    rounds: Annotated[int, Ge(0)] = 5
    draws: AtLeastOne = 256
    norm: Positive = 0.1
    ridge: Positive = 1e-4
    seed: Seed = 0

    name = "slca"
    summary = "SLCA's rule: a linear layer, trained after every task on features drawn like those of all classes"
    belongs_to = "slca"

    def register(self) -> None:
        super().register()
        for name in ("weight", "trained_weight"):
            self.register_rows(name, self.embed_dim)
        for name in ("bias", "trained_bias"):
            self.register_rows(name)
        self.register_rows("task", dtype=torch.int64)

    def added(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        old, x = len(self._class_names), math.sqrt(self.embed_dim) * images
        generator = task_generator(self.seed, old)
        kept = self.with_gaussians(x, labels, self.ridge) | self.with_rows(task=next_task(self.task, len(new)))
        weight, bias = self._head(x, labels - old, len(new), generator)
        trained = self.with_rows(trained_weight=weight, trained_bias=bias)
        weight, bias = (rows.clone() for rows in trained.values())
        if old:
            weight, bias = self._aligned(weight, bias, **kept, generator=generator)
        return kept | trained | {"weight": weight, "bias": bias}

    def _head(self, x: Tensor, labels: Tensor, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """W, (classes, d), and b, (classes,), from 0, after training on a task's features alone."""
        weight, bias = (x.new_zeros(classes, *rest).requires_grad_() for rest in (x.shape[1:], ()))

        def loss(_: int, rows: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(x[rows], weight, bias), labels[rows])

        epochs = (minibatches(x, self.batch_size, generator) for _ in range(self.epochs))
        fit(loss, self._optimizer([weight, bias]), epochs)
        return weight.detach(), bias.detach()

    def _aligned(
        self, weight: Tensor, bias: Tensor, means: Tensor, factors: Tensor, task: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """W and b of all classes after training on drawn features."""
        labels = torch.arange(len(means), device=means.device).repeat_interleave(self.draws)
        means, drawn = shrunk(means, task), means.new_empty(len(labels), self.embed_dim)
        optimizer = self._optimizer([weight.requires_grad_(), bias.requires_grad_()])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, self.rounds))

        def epochs() -> Iterator[tuple[Tensor, ...]]:
            for _ in range(self.rounds):
                for own, mean, factor in zip(drawn.split(self.draws), means, factors, strict=True):
                    noise = torch.randn(self.draws, self.embed_dim, generator=generator).to(means)
                    torch.addmm(mean, noise, factor.T, out=own)
                yield torch.randperm(len(labels), generator=generator).to(drawn.device).split(self.draws)

        def loss(_: int, rows: Tensor) -> Tensor:
            return F.cross_entropy(normed(F.linear(drawn[rows], weight, bias), task) / self.norm, labels[rows])

        fit(loss, optimizer, epochs(), schedule)
        return weight.detach(), bias.detach()

    def _optimizer(self, tensors: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(tensors, self.learning_rate, momentum=MOMENTUM, weight_decay=DECAY)

    def logits(self, images: Tensor) -> Tensor:
        return F.linear(math.sqrt(self.embed_dim) * images, self.weight.float(), self.bias.float())


def shrunk(means: Tensor, task: Tensor) -> Tensor:
    """a_c mu_c, (C, d): means of older tasks, (C,) from 0, are pulled towards 0."""
    return means * (0.9 + 0.1 * (task + 1) / (task.max() + 1))[:, None]


def normed(scores: Tensor, task: Tensor) -> Tensor:
    """Scores, (n, C), over the mean over tasks, (C,), of the norm that an image's scores of a task's classes have."""
    parts = scores.split(task.unique_consecutive(return_counts=True)[1].tolist(), dim=1)  # a task's stand together
    return scores / (torch.stack([part.norm(dim=1) for part in parts]).mean(dim=0)[:, None] + 1e-7)


@dataclass(frozen=True)
class Slca(Lora):
    """LoRA for all tasks, as in SLCA++, arXiv 2408.08295, read through SLCA's classifier."""

    name = "slca"
    classifiers = ("slca",)
