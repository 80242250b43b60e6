"""CLG-CBM: a concept bottleneck, whose concepts are the texts of the classes, and a sparse linear layer behind it.

a = E x,  score = W a                                 E: one row a concept, W: one column a concept, x: unit feature
old class c:  x_i + mu_c - mu_r for the images of the new class r whose mean is nearest to the text of c; and in each
              step a draw from N(mu_c, Sigma_c) for two old classes

A task adds rows to E and rows and columns to W, and trains all of both on

cross-entropy - mean over concepts k of cos_k + 0.001 (0.99 |W|_1 + 0.01 |W|^2 / 2)
cos_k = cosine over the batch of (e_k . x)^3 and (E x)_k^3     e_k: embedding of text k
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.papers.fitting import KeptGaussians, fit, minibatches, task_generator, uniform
from dulbe_peft.strategies.frozen import Frozen
from dulbe_peft.utils.settings import AtLeastOne, Positive, Seed, Weight, check_int

MILESTONES = (30, 40, 50)  # after these epochs the learning rate falls to a tenth
SPARSITY, LASSO = 0.001, 0.99
REPLAYED = 2  # old classes of which a step draws features
RIDGE = 1e-4  # on the diagonal of a covariance


class ClgCbmClassifier(KeptGaussians):
    """Both layers, 4 (2 d + C) bytes a text, and one Gaussian a class; it draws features, and keeps no image.

    The concepts are the texts of the classes: give descriptions as `class_texts`, or else they are the names in the
    prompt templates. Left out is the authors' choice of ten concepts a class among those that a language model wrote:
    its distance takes the inverse covariance of the task's texts, which needs more of them than d, so here you choose.
    The authors keep the epoch that is best on test images; here it is the last one. A text stays as it was when its
    class came, and leaves with the class.

    Args:
        epochs, batch_size: passes over a task's features, moved ones among them, and of these per step.
        learning_rate: of Adam at the start of each task, a tenth of it after epochs 30, 40 and 50.
        alignment: weight of the cosines, which keep E x near the products with the texts.
        draws: drawn features of each of two old classes in a step.
        seed: of the layers' start, of the order of the features and of the draws.

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
    summary = "CLG-CBM's rule: how much an image looks like each text of each class, and a sparse sum of that"
    belongs_to = "clg_cbm"
    needs_text = True
    needs_each_text = True

    def register(self) -> None:
        super().register()
        self.register_rows("bottleneck", self.embed_dim, of="num_texts")
        self.register_rows("weight", "num_texts")

    def added(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        old, concepts = len(self._class_names), self.each_text.float()
        kept, generator = self.with_gaussians(images, labels, RIDGE), task_generator(self.seed, old)
        images, labels = with_moved(images, labels - old, kept["means"], self.text_embeds.float())
        bottleneck = uniform(generator, self.embed_dim, *concepts.shape)
        weight = uniform(generator, len(concepts), old + len(new), len(concepts))
        bottleneck[: len(self.bottleneck)] = self.bottleneck
        weight[:old, : self.weight.shape[1]] = self.weight
        bottleneck, weight = (layer.to(images).requires_grad_() for layer in (bottleneck, weight))
        order = torch.randperm(old, generator=generator)
        optimizer = torch.optim.Adam([bottleneck, weight], self.learning_rate)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(MILESTONES), gamma=0.1)

        def loss(step: int, rows: Tensor) -> Tensor:
            features, classes = images[rows], labels[rows]
            if old:
                drawn, replayed = self.replay(order, step, REPLAYED, self.draws, generator)
                features, classes = torch.cat([features, drawn]), torch.cat([classes, replayed])
            return bottleneck_loss(features, classes, concepts, bottleneck, weight, self.alignment)

        fit(loss, optimizer, (minibatches(images, self.batch_size, generator) for _ in range(self.epochs)), schedule)
        return kept | {"bottleneck": bottleneck.detach(), "weight": weight.detach()}

    def logits(self, images: Tensor) -> Tensor:
        return images @ self.derived("product", lambda: (self.weight.float() @ self.bottleneck.float()).T)

    def concepts(self, class_name: str, k: int = 5) -> list[tuple[str, int, float]]:
        """The k concepts that speak most for a class, the most telling first.

        Each is the class that brought the text, which of its texts it is, from 0, and what it adds to the score of
        the class's mean feature.
        """
        if class_name not in self._class_names:
            raise ValueError(f"class {class_name!r:.100} is not known: known are {self._class_names!r:.200}")
        own, owners = self._class_names.index(class_name), zip(self._class_names, self.num_texts.tolist(), strict=True)
        texts = [(name, index) for name, count in owners for index in range(count)]
        parts = self.weight[own].float() * (self.bottleneck.float() @ self.means[own].float())
        best = parts.topk(min(check_int("k", k, 1), len(texts)))
        return [(*texts[i], value) for i, value in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def with_moved(images: Tensor, labels: Tensor, means: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Features of new classes, (n, d), then those that stand for old ones, see above, and the classes of both."""
    old = len(means) - int(labels.max()) - 1
    nearest = (texts[:old] @ F.normalize(means[old:], dim=1).T).argmax(dim=1)
    moved = [images[labels == new] - means[old + new] + means[c] for c, new in enumerate(nearest.tolist())]
    classes = torch.arange(old, device=labels.device).repeat_interleave(labels.bincount()[nearest])
    return torch.cat([images, *moved]), torch.cat([labels + old, classes])


def bottleneck_loss(
    features: Tensor, labels: Tensor, concepts: Tensor, bottleneck: Tensor, weight: Tensor, alignment: float
) -> Tensor:
    """The loss of features of any length, (n, d), with embeddings of concepts, (K, d), E, (K, d), and W, (C, K)."""
    active = F.normalize(features, dim=1) @ bottleneck.T
    cosines = (F.normalize(active**3, dim=0) * F.normalize((features @ concepts.T) ** 3, dim=0)).sum(dim=0)
    sparse = SPARSITY * (LASSO * weight.abs().sum() + (1 - LASSO) / 2 * weight.square().sum())
    return F.cross_entropy(active @ weight.T, labels) - alignment * cosines.mean() + sparse


@dataclass(frozen=True)
class ClgCbm(Frozen):
    """Trains nothing; the classifier `clg_cbm` has the paper's rule."""

    name = "clg_cbm"
    classifiers = ("clg_cbm",)
