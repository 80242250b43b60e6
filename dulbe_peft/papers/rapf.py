"""RAPF: a linear map of frozen image features, trained with sampled features of old classes and fused over tasks.

z(x) = A x / |A x|,  score = tau z(x) . e_c           A: (d, d), one for all tasks
old classes:  x ~ N(mu_c, Sigma_c)                    a Gaussian per class, of features before A
hard pairs:   old i, new j with |e_i - e_j| < theta   + mean of max(0, z.e_j - z.e_i + 0.1), x sampled from class i
fusion:       A = A_old + U (M o C)                   A_old = U S V',  C = U'(A_new - A_old),
                                                      M = min(1, |C| / max |C| + b)
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.ridge import class_weights
from dulbe_peft.classifiers.state import Layout, State, shared
from dulbe_peft.papers.fitting import KeptGaussians, fit, minibatches, task_generator, uniform
from dulbe_peft.strategies.frozen import Frozen
from dulbe_peft.utils.settings import AtLeastOne, Positive, Seed

MARGIN = 0.1
MILESTONES = (4, 10)  # epochs after which the learning rate is divided by ten
BATCH, LEAST_STEPS = 100, 90  # in a step, and in a task; the authors' CUB-200 has 6 steps in each of 15 epochs
MOST_PAIRS = 32  # hard pairs in a step; limited because each adds int(20 beta) features to its time and memory


def mapped_cosine(z: torch.Tensor, map_: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the scores, (n, C), of unit features z, (n, d): cosines with the texts after a linear map."""
    return torch.nn.functional.normalize(z @ map_.T, dim=1) @ weight.T


@dataclass(frozen=True)
class RapfRule(KeptGaussians):
    """RAPF's classifier. It stores the map, the texts and a Gaussian per class, but no images.

    A class's Gaussian takes 4 d (d + 1) bytes: with d = 512, 100 MiB for 100 classes and 2.9 GiB for 3,000. Learning
    takes twice that. A starts as a random matrix, without the identity, as in the authors' code, so task 1 gives up
    the zero-shot scores.

    Differences from the authors' code:

    - The authors set the number of replayed classes by hand for each data set, so that an epoch replays every old
      class about once. "auto" computes it. Their tasks have 600 images or more, so their batches always have 100.
    - With more than 32 hard pairs, each step samples 32 of them; the authors use all.
    - The authors add 1e-4 I to the covariance of features whose norm is about 10. Features here have norm 1, so 1e-6 I
      is added.
    - If the classes of a task differ in their number of images, the images are weighted as in `ridge`.

    Args:
        epochs: Number of passes over a task's features.
        batch_size: Number of image features per step. "auto": the authors' 100, or fewer in a small task, so that it
            has at least 90 steps, as the authors' shortest tasks have.
        learning_rate: Learning rate of Adam at the start of each task; divided by ten after epochs 4 and 10.
        draws: The factor beta; a replayed class adds int(10 beta) features to a step, and a hard pair int(20 beta).
        replayed: The number k of old classes that a step replays. "auto": so many that each epoch replays all.
        pair_distance: The distance theta.
        fusion_bias: The bias b; values of 1 or more switch the fusion off, so that A is what the task has trained.
        ridge: Value added to the diagonal of each covariance.
        seed: Seed of the initial A, of the order of the features and of the samples.

    Reference:
        "Class-Incremental Learning with CLIP: Adaptive Representation Adjustment and Parameter Fusion", arXiv
        2407.14143, and the authors' public code; settings from its configuration for CIFAR-100.
    """

    epochs: AtLeastOne = 15
    batch_size: AtLeastOne | Literal["auto"] = "auto"
    learning_rate: Positive = 1e-3
    draws: Positive = 2.0
    replayed: AtLeastOne | Literal["auto"] = "auto"
    pair_distance: Positive = 0.55
    fusion_bias: Positive = 0.6
    ridge: Positive = 1e-6
    seed: Seed = 0

    name = "rapf"
    summary = "RAPF's rule: compares names with image features after a linear map, which every task trains further"
    belongs_to = "rapf"
    needs_text = True

    def tensors(self) -> dict[str, Layout]:
        return super().tensors() | {"map": shared(self.embed_dim, self.embed_dim)}

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        old, texts = state.classes, state.text_embeds.float()
        generator = task_generator(self.seed, old)
        start = (state.map if old else uniform(generator, self.embed_dim, *state.map.shape)).to(images)
        map_, order = start.clone().requires_grad_(), torch.arange(old)
        pairs = hard_pairs(texts, old, self.pair_distance)
        weights = class_weights(torch.bincount(labels, minlength=len(texts))[old:])
        weights = torch.cat([weights.new_ones(old), weights]).to(texts)
        optimizer = torch.optim.Adam([map_], lr=self.learning_rate)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(MILESTONES), gamma=0.1)

        size, k = self._schedule(len(images), old)

        def epochs() -> Iterator[tuple[Tensor, ...]]:
            for _ in range(self.epochs):
                order.copy_(torch.randperm(old, generator=generator))
                yield minibatches(images, size, generator)

        def loss(step: int, rows: Tensor) -> Tensor:
            features, classes = images[rows], labels[rows]
            if old:
                drawn, replayed = self.replay(state, order, step, k, int(10 * self.draws), generator)
                features, classes = torch.cat([features, drawn]), torch.cat([classes, replayed])
            right = F.cross_entropy(self.logit_scale * _mapped(features, map_) @ texts.T, classes, weights)
            if not len(pairs):
                return right
            hard = pairs
            if len(pairs) > MOST_PAIRS:
                hard = pairs[torch.randint(len(pairs), (MOST_PAIRS,), generator=generator)]
            hard = hard.repeat_interleave(int(20 * self.draws), dim=0)
            return right + push_apart(_mapped(self.sample(state, hard[:, 0], generator), map_), texts, hard)

        fit(loss, optimizer, epochs(), schedule)
        after = fused(start, map_.detach(), self.fusion_bias) if old else map_.detach()
        return {"map": after} | self.with_gaussians(state, images, labels, self.ridge)

    def _schedule(self, images: int, old: int) -> tuple[int, int]:
        """Return the batch size, and k, for a task of `images` images after `old` classes."""
        least = math.ceil(LEAST_STEPS / self.epochs)  # in an epoch
        size = max(1, min(BATCH, images // least)) if self.batch_size == "auto" else self.batch_size
        steps = math.ceil(images / size)
        if steps < least:
            warnings.warn(
                f"rapf: {images} images in batches of {size} for {self.epochs} epochs give {steps * self.epochs} "
                f"steps of training, and fewer than {LEAST_STEPS} may leave the map untrained: set a smaller "
                "batch_size or more epochs",
                stacklevel=3,
            )
        return size, math.ceil(old / steps) if self.replayed == "auto" else self.replayed

    def formula(self, state: State) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        return mapped_cosine, {"map_": state.map.float(), "weight": self.logit_scale * state.text_embeds.float()}


def hard_pairs(texts: Tensor, old: int, distance: float) -> Tensor:
    """Return the pairs of an old class i and a new class j whose texts, (C, d), are closer than theta; (pairs, 2)."""
    # For unit vectors, |e_i - e_j| < theta is e_i . e_j > 1 - theta^2 / 2.
    near = (texts[:old] @ texts[old:].T > 1 - distance**2 / 2).nonzero()
    return near + torch.tensor([0, old], device=near.device)


def push_apart(mapped: Tensor, texts: Tensor, pairs: Tensor) -> Tensor:
    """Return the mean of max(0, z.e_j - z.e_i + 0.1) over features z of old classes, (n, d), and pairs, (n, 2)."""
    apart = texts[pairs[:, 1]] - texts[pairs[:, 0]]
    return ((mapped * apart).sum(dim=1) + MARGIN).relu().mean()


def fused(old: Tensor, new: Tensor, bias: float) -> Tensor:
    """Return A_old + U (M o C), (d, d), with A_old = U S V'; M keeps the largest changes C and damps the others."""
    before = old.cpu().double()
    left = torch.linalg.svd(before).U
    change = left.T @ (new.cpu().double() - before)
    largest = change.abs().max()
    if largest == 0:
        return old
    mask = (change.abs() / largest + bias).clamp(max=1)
    return (before + left @ (mask * change)).to(old)


def _mapped(features: Tensor, map_: Tensor) -> Tensor:
    return F.normalize(features @ map_.T, dim=1)


@dataclass(frozen=True)
class Rapf(Frozen):
    """Train nothing: the method is implemented by the classifier `rapf`."""

    name = "rapf"
    classifiers = ("rapf",)
