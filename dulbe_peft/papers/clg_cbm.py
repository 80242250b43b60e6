"""CLG-CBM: a concept bottleneck, whose concepts are the texts of the classes, followed by a sparse linear layer.

a = E x,  score = W a                               E: one row per concept, W: one column per concept, x: unit feature

An old class c is replayed as x_i + mu_c - mu_r, where x_i are the images of the new class r whose mean is nearest to
the text of c. Each step also samples from N(mu_c, Sigma_c) for two old classes. A task adds rows to E, and rows and
columns to W, and trains all of E and W on

cross-entropy - mean over concepts k of cos_k + 0.001 (0.99 |W|_1 + 0.01 |W|^2 / 2)
cos_k = cosine over the batch of (e_k . x)^3 and (E x)_k^3     e_k: embedding of text k
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.keeping import takes
from dulbe_peft.classifiers.state import Fitted, Layout, State, once, per_class
from dulbe_peft.papers.fitting import KeptGaussians, fit, minibatches, task_generator, uniform
from dulbe_peft.strategies.frozen import Frozen
from dulbe_peft.utils.settings import AtLeastOne, Positive, Seed, Weight, check_int

MILESTONES = (30, 40, 50)  # epochs after which the learning rate is divided by ten
SPARSITY, LASSO = 0.001, 0.99
REPLAYED = 2  # number of old classes that a step samples features of
RIDGE = 1e-4  # added to the diagonal of each covariance


@dataclass(frozen=True)
class ClgCbmRule(KeptGaussians):
    """CLG-CBM's classifier. It stores both layers, 4 (2 d + C) bytes per text, and a Gaussian per class, but no image.

    The concepts are the texts of the classes: pass descriptions as `class_texts`; without them, the concepts are the
    class names in the prompt templates. The authors select ten concepts per class from those that a language model
    wrote. This selection is left out, because its distance needs the inverse covariance of the task's texts and so
    more than d texts. The authors keep the epoch with the best accuracy on test images; here the last one is kept.
    A text stays as it was when its class was learned, and is dropped with the class.

    Args:
        epochs, batch_size: Number of passes over a task's features and the replayed ones, and features per step.
        learning_rate: Learning rate of Adam at the start of each task; divided by ten after epochs 30, 40 and 50.
        alignment: Weight of the cosines, which keep E x close to the products of features and texts.
        draws: Number of features sampled in a step for each of two old classes.
        seed: Seed of the layers' initial values, of the order of the features and of the samples.

    Reference:
        Yu et al., "Language Guided Concept Bottleneck Models for Interpretable Continual Learning", CVPR 2025, arXiv
        2503.23283; formulas and settings from the authors' public code and its configuration for CIFAR-100.
    """

    epochs: AtLeastOne = 60
    batch_size: AtLeastOne = 64
    learning_rate: Positive = 1e-3
    alignment: Weight = 1.0
    draws: Annotated[int, Ge(0)] = 1
    seed: Seed = 0

    name = "clg_cbm"
    summary = "CLG-CBM's rule: sparse weighted sums of how well an image matches each text of each class"
    belongs_to = "clg_cbm"
    needs_text = True
    needs_each_text = True

    def tensors(self) -> dict[str, Layout]:
        layers = {"bottleneck": per_class(self.embed_dim, of="num_texts"), "weight": per_class("num_texts")}
        return super().tensors() | layers

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        old, concepts = state.classes, state.each_text.float()
        kept, generator = self.with_gaussians(state, images, labels, RIDGE), task_generator(self.seed, old)
        images, labels = add_replayed(images, labels - old, kept["means"], state.text_embeds.float())
        bottleneck = uniform(generator, self.embed_dim, *concepts.shape)
        weight = uniform(generator, len(concepts), old + len(new), len(concepts))
        bottleneck[: len(state.bottleneck)] = state.bottleneck
        weight[:old, : state.weight.shape[1]] = state.weight
        bottleneck, weight = (layer.to(images).requires_grad_() for layer in (bottleneck, weight))
        order = torch.randperm(old, generator=generator)
        optimizer = torch.optim.Adam([bottleneck, weight], self.learning_rate)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(MILESTONES), gamma=0.1)

        def loss(step: int, rows: Tensor) -> Tensor:
            features, classes = images[rows], labels[rows]
            if old:
                drawn, replayed = self.replay(state, order, step, REPLAYED, self.draws, generator)
                features, classes = torch.cat([features, drawn]), torch.cat([classes, replayed])
            return bottleneck_loss(features, classes, concepts, bottleneck, weight, self.alignment)

        fit(loss, optimizer, (minibatches(images, self.batch_size, generator) for _ in range(self.epochs)), schedule)
        return kept | {"bottleneck": bottleneck.detach(), "weight": weight.detach()}

    def scores(self, state: State, images: Tensor) -> Tensor:
        return images @ self.fitted(state).weight

    def fitted(self, state: State) -> Product:
        return Product.of(self, state)


class Product(Fitted):
    """The product of the two layers."""

    @once
    def weight(self) -> Tensor:
        """(W E)', (d, C), float32."""
        return (self.state.weight.float() @ self.state.bottleneck.float()).T


class ClgCbmClassifier(Classifier, rule=ClgCbmRule):
    """A trained layer on the similarities of images and texts; its settings are those of `ClgCbmRule`."""

    if TYPE_CHECKING:

        @takes(ClgCbmRule)
        def __init__(self) -> None: ...

    def concepts(self, class_name: str, k: int = 5) -> list[tuple[str, int, float]]:
        """Return the k concepts that contribute most to a class, largest contribution first.

        Each is a tuple: the class that the text belongs to, the index of the text among that class's texts, from 0,
        and the contribution to the score of the mean feature of `class_name`.
        """
        if class_name not in (names := self.class_names):
            raise ValueError(f"class {class_name!r:.100} is not known: known are {names!r:.200}")
        row, counts = names.index(class_name), zip(names, self.num_texts.tolist(), strict=True)
        texts = [(name, index) for name, count in counts for index in range(count)]
        parts = self.weight[row].float() * (self.bottleneck.float() @ self.means[row].float())
        best = parts.topk(min(check_int("k", k, 1), len(texts)))
        return [(*texts[i], value) for i, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def add_replayed(images: Tensor, labels: Tensor, means: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Append x_i + mu_c - mu_r for each old class to features of new classes, (n, d); returns features and labels."""
    old = len(means) - int(labels.max()) - 1
    nearest = (texts[:old] @ F.normalize(means[old:], dim=1).T).argmax(dim=1)
    moved = [images[labels == new] - means[old + new] + means[c] for c, new in enumerate(nearest.tolist())]
    classes = torch.arange(old, device=labels.device).repeat_interleave(labels.bincount()[nearest])
    return torch.cat([images, *moved]), torch.cat([labels + old, classes])


def bottleneck_loss(
    features: Tensor, labels: Tensor, concepts: Tensor, bottleneck: Tensor, weight: Tensor, alignment: float
) -> Tensor:
    """Return the loss of features of any norm, (n, d), given concept embeddings, (K, d), E, (K, d), and W, (C, K)."""
    active = F.normalize(features, dim=1) @ bottleneck.T
    cosines = (F.normalize(active**3, dim=0) * F.normalize((features @ concepts.T) ** 3, dim=0)).sum(dim=0)
    sparse = SPARSITY * (LASSO * weight.abs().sum() + (1 - LASSO) / 2 * weight.square().sum())
    return F.cross_entropy(active @ weight.T, labels) - alignment * cosines.mean() + sparse


@dataclass(frozen=True)
class ClgCbm(Frozen):
    """Train nothing: the method is implemented by the classifier `clg_cbm`."""

    name = "clg_cbm"
    classifiers = ("clg_cbm",)
