"""SLCA: LoRA with a small learning rate, and a linear head that each task realigns on features sampled from Gaussians.

x = sqrt(d) z,  score = W x + b
head:       the rows of a task's classes are trained on the task's features with the cross-entropy over these classes
alignment:  from task 2 on, all rows are trained further, starting from the trained heads, on x ~ N(a_c mu_c, Sigma_c)
            with equally many x per class
            a_c = 0.9 + 0.1 (t_c + 1) / T             t_c: index of the class's task, from 0; T: number of tasks
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

from dulbe_peft.classifiers.state import Layout, State, per_class
from dulbe_peft.papers.fitting import KeptGaussians, fit, minibatches, next_task, task_generator
from dulbe_peft.strategies.lora import Lora
from dulbe_peft.utils.settings import AtLeastOne, Positive, Seed

MOMENTUM, DECAY = 0.9, 5e-4  # for both head and alignment, as in the authors' configuration


@dataclass(frozen=True)
class SlcaRule(KeptGaussians):
    """SLCA's classifier. It stores a linear head and a Gaussian per class, 4 d (d + 3) bytes, but no images.

    The head is stored twice: the aligned one gives the scores, and the trained one is the start of the next alignment.
    The authors' features have passed a LayerNorm and so have a norm near sqrt(d); unit features are scaled to it here.
    Each task is learned twice, because the temperature of the probabilities needs held-out images. Every task aligns
    all classes, so the total time grows with the square of their number.

    Args:
        epochs: Number of passes over a task's features. With few steps the head's scores stay small, and the
            alignment, whose gradient grows as they shrink, overshoots: on digits the accuracy was 37 % after 5 steps
            per task and 92 % after 20.
        batch_size: Number of image features per step.
        learning_rate: Learning rate of SGD for the head and the alignment.
        rounds: How often the alignment samples new features. Its learning rate decays to 0 on a cosine meanwhile.
        draws: Number of features sampled per class in a round, and number of features per step of the alignment.
        norm: The norm h.
        ridge: Value added to the diagonal of each covariance of x.
        seed: Seed of the order of the features and of the samples.

    Reference:
        Zhang et al., "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a Pre-trained Model",
        arXiv 2303.05118, and the authors' public code, which is the source of the settings.
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
    summary = "SLCA's rule: a linear layer, retrained after every task on features sampled from a Gaussian per class"
    belongs_to = "slca"

    def tensors(self) -> dict[str, Layout]:
        weights = {name: per_class(self.embed_dim) for name in ("weight", "trained_weight")}
        biases = {name: per_class() for name in ("bias", "trained_bias")}
        return super().tensors() | weights | biases | {"task": per_class(dtype=torch.int64)}

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        old, x = state.classes, math.sqrt(self.embed_dim) * images
        generator = task_generator(self.seed, old)
        task = next_task(state.task, len(new))
        kept = self.with_gaussians(state, x, labels, self.ridge) | state.with_rows(task=task)
        weight, bias = self._head(x, labels - old, len(new), generator)
        trained = state.with_rows(trained_weight=weight, trained_bias=bias)
        weight, bias = (rows.clone() for rows in trained.values())
        if old:
            weight, bias = self._aligned(weight, bias, **kept, generator=generator)
        return kept | trained | {"weight": weight, "bias": bias}

    def _head(self, x: Tensor, labels: Tensor, classes: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return W, (classes, d), and b, (classes,), trained from 0 on the features of one task."""
        weight, bias = (x.new_zeros(classes, *rest).requires_grad_() for rest in (x.shape[1:], ()))

        def loss(_: int, rows: Tensor) -> Tensor:
            return F.cross_entropy(F.linear(x[rows], weight, bias), labels[rows])

        epochs = (minibatches(x, self.batch_size, generator) for _ in range(self.epochs))
        fit(loss, self._optimizer([weight, bias]), epochs)
        return weight.detach(), bias.detach()

    def _aligned(
        self, weight: Tensor, bias: Tensor, means: Tensor, factors: Tensor, task: Tensor, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return W and b of all classes, trained further on sampled features."""
        labels = torch.arange(len(means), device=means.device).repeat_interleave(self.draws)
        means, samples = shrunk(means, task), means.new_empty(len(labels), self.embed_dim)
        optimizer = self._optimizer([weight.requires_grad_(), bias.requires_grad_()])
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, self.rounds))

        def epochs() -> Iterator[tuple[Tensor, ...]]:
            for _ in range(self.rounds):
                for features, mean, factor in zip(samples.split(self.draws), means, factors, strict=True):
                    noise = torch.randn(self.draws, self.embed_dim, generator=generator).to(means)
                    torch.addmm(mean, noise, factor.T, out=features)
                yield torch.randperm(len(labels), generator=generator).to(samples.device).split(self.draws)

        def loss(_: int, rows: Tensor) -> Tensor:
            return F.cross_entropy(normed(F.linear(samples[rows], weight, bias), task) / self.norm, labels[rows])

        fit(loss, optimizer, epochs(), schedule)
        return weight.detach(), bias.detach()

    def _optimizer(self, tensors: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(tensors, self.learning_rate, momentum=MOMENTUM, weight_decay=DECAY)

    def scores(self, state: State, images: Tensor) -> Tensor:
        return F.linear(math.sqrt(self.embed_dim) * images, state.weight.float(), state.bias.float())


def shrunk(means: Tensor, task: Tensor) -> Tensor:
    """Return a_c mu_c, (C, d): the means of earlier tasks are shrunk towards 0. `task` is (C,), counted from 0."""
    return means * (0.9 + 0.1 * (task + 1) / (task.max() + 1))[:, None]


def normed(scores: Tensor, task: Tensor) -> Tensor:
    """Divide each image's scores, (n, C), by n, the mean over tasks of |scores of the task's classes|."""
    parts = scores.split(task.unique_consecutive(return_counts=True)[1].tolist(), dim=1)  # one part per task
    return scores / (torch.stack([part.norm(dim=1) for part in parts]).mean(dim=0)[:, None] + 1e-7)


@dataclass(frozen=True)
class Slca(Lora):
    """Train LoRA in all tasks, as in SLCA++, arXiv 2408.08295, and classify with SLCA's classifier."""

    name = "slca"
    classifiers = ("slca",)
