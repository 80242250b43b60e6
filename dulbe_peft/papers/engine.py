"""ENGINE: a linear unit for images and one for texts a task, beside a Gaussian discriminant of the features.

u(z) = v / |v|,  v = sum over tasks of s W_t z + b_t   one sum for images, one for texts; finished units are frozen
cos  = u(z) . u(e_c)                                   s = 10
g    = mu_c' P z - mu_c' P mu_c / 2 - log C            P = d (S + tr S / (N - 1) I)^-1,  S: scatter within the classes
score = tau (a g / |g| + (1 - a) cos)                  |g| over the classes

A batch of images z_i of classes y_i, and a drawn s mu_c + 0.25 n for each old class c, n standard normal, train the
task's units. With pairs (i, j) of the batch and K(p, q) = mean over i of -log softmax_j(p_i . q_j) at j = i:

(K(l u(z), u(e_y)) + K(l u(e_y), u(z))) / 2 + 2 K(u(e_y), e_y) + 0.5 K(u(z), z)        l = log 100, new z alone last
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.papers.fitting import class_means, fit, minibatches, task_generator, uniform
from dulbe_peft.strategies.frozen import Frozen
from dulbe_peft.utils.settings import AtLeastOne, Positive, Seed, Weight

LENGTH = 10.0  # about the norm of CLIP's features before they are normalised
SHARPNESS = math.log(100)  # the authors' code multiplies by the logarithm of CLIP's scale
MOMENTUM, DECAY = 0.9, 0.05
MOST_DRAWN = 1024  # old classes in a step: the loss compares every pair of a batch


def injected(
    z: torch.Tensor,
    unit: torch.Tensor,
    shift: torch.Tensor,
    texts: torch.Tensor,
    directions: torch.Tensor,
    offsets: torch.Tensor,
    share: torch.Tensor,
) -> torch.Tensor:
    """Scores, (n, C), of unit features z, (n, d): cosines with texts behind a linear map, and a discriminant."""
    cosines = torch.nn.functional.normalize(z @ unit.T + shift, dim=1) @ texts.T
    return cosines + share * torch.nn.functional.normalize(z @ directions.T + offsets, dim=1)


class EngineClassifier(Classifier):
    """The sums of the tasks' units, one mean a class, and one scatter; it draws features, and keeps no image.

    What is left out: the paper's GPT-4 descriptions. `text_embeds` are the means of each class's texts, so u(e_y) is
    drawn to this mean where the authors draw one description a step; give descriptions as `class_texts`. The second
    ranking, which compares an image with descriptions of each pair of its best five classes, needs the texts of C^2
    pairs and the text tower at test. Also, u(z) is drawn to the image's own feature, not to that of the image with
    noise, and the discriminant sees projected features. P is that of the scatter of all tasks; the authors average
    the tasks' P. Of more than 1024 old classes, a step draws 1024.

    Args:
        epochs, batch_size: passes over a task's features, and features of images per step.
        learning_rate: of SGD at the start of each task; it falls to 0 on a cosine over the epochs.
        text_loss, image_loss: weights of the last two losses.
        noise: standard deviation of a drawn feature, whose mean has about the length 10.
        discriminant: a, from 0 to 1.
        seed: of the units' start, of the order of the features and of the draws.

    Reference:
        Zhou et al., "External Knowledge Injection for CLIP-Based Class-Incremental Learning", ICCV 2025, arXiv
        2503.08510; formulas and settings from the authors' public code and its configuration for CIFAR-100.
    """

    epochs: AtLeastOne = 10
    batch_size: AtLeastOne = 64
    learning_rate: Positive = 0.05
    text_loss: Weight = 2.0
    image_loss: Weight = 0.5
    noise: Weight = 0.25
    discriminant: Annotated[float, Ge(0), Le(1)] = 0.8
    seed: Seed = 0

    name = "engine"
    summary = "ENGINE's rule: names against images behind linear maps, one a task, and a discriminant of the images"
    belongs_to = "engine"
    needs_text = True
    moves = ("means", "scatter")  # units stay, and the task that follows trains one on moved draws

    def register(self) -> None:
        for name in ("image_unit", "text_unit"):  # [W b], s included
            self.register_buffer(name, torch.zeros(self.embed_dim, self.embed_dim + 1))
        self.register_rows("means", self.embed_dim, dtype=torch.float64)
        self.register_buffer("scatter", torch.zeros(self.embed_dim, self.embed_dim, dtype=torch.float64))
        self.register_buffer("images", torch.zeros((), dtype=torch.int64))

    def added(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        old, texts = len(self._class_names), self.text_embeds.float()
        generator, width = task_generator(self.seed, old), (self.embed_dim, self.embed_dim + 1)
        before = self.image_unit.float(), self.text_unit.float()
        units = [uniform(generator, self.embed_dim, *width).to(images).requires_grad_() for _ in before]
        optimizer = torch.optim.SGD(units, self.learning_rate, momentum=MOMENTUM, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)

        def loss(_: int, rows: Tensor) -> Tensor:
            drawn, classes = self._drawn(old, generator)
            image_unit, text_unit = (value + unit for value, unit in zip(before, units, strict=True))
            features = torch.cat([LENGTH * images[rows], drawn.to(images)])
            classes = torch.cat([labels[rows], classes.to(labels)])
            mapped, named = _mapped(features, image_unit), _mapped(LENGTH * texts, text_unit)[classes]
            both = (contrast(SHARPNESS * mapped, named) + contrast(SHARPNESS * named, mapped)) / 2
            both = both + self.text_loss * contrast(named, texts[classes])
            return both + self.image_loss * contrast(mapped[: len(rows)], images[rows])

        fit(loss, optimizer, (minibatches(images, self.batch_size, generator) for _ in range(self.epochs)), schedule)
        image_unit, text_unit = (value + unit.detach() for value, unit in zip(before, units, strict=True))
        own, rows = (labels - old).to(self.means.device), images.to(self.means)
        means = class_means(images, own).to(rows)
        spread = rows - means[own]
        return {
            "image_unit": image_unit,
            "text_unit": text_unit,
            "means": torch.cat([self.means, means]),
            "scatter": self.scatter + spread.T @ spread,
            "images": self.images + len(images),
        }

    def _drawn(self, old: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """One feature of each old class, at most 1024, (n, d), float64 on the CPU, and the classes, (n,)."""
        classes = torch.randperm(old, generator=generator)[:MOST_DRAWN]
        noise = torch.randn(len(classes), self.embed_dim, generator=generator)
        return LENGTH * self.means.cpu()[classes] + self.noise * noise, classes

    def formula(self) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        return injected, self.derived("formula", self._tensors)

    def _tensors(self) -> dict[str, Tensor]:
        precision, classes = self._precision(), len(self.means)
        directions = self.means @ precision
        offsets = -(directions * self.means).sum(dim=1) / 2 - math.log(classes)
        largest = directions.abs().max().clamp(min=1)  # P may leave the range of half precision; g / |g| has no scale
        unit, texts = self.image_unit.float(), _mapped(LENGTH * self.text_embeds.float(), self.text_unit.float())
        return {
            "unit": LENGTH * unit[:, :-1],
            "shift": unit[:, -1],
            "texts": self.logit_scale * (1 - self.discriminant) * texts,
            "directions": (directions / largest).float().to(self.device),
            "offsets": (offsets / largest).float().to(self.device),
            "share": torch.tensor(self.logit_scale * self.discriminant, device=self.device),
        }

    def _precision(self) -> Tensor:
        """P, (d, d), float64; 0 while no class has two different images."""
        more = self.scatter.trace() / max(1, int(self.images) - 1) * torch.eye(self.embed_dim).to(self.scatter)
        return self.embed_dim * torch.linalg.pinv(self.scatter + more, hermitian=True)


def contrast(one: Tensor, other: Tensor) -> Tensor:
    """K: mean cross-entropy of one_i . other_j, both (n, d), with j = i as the right answer."""
    return F.cross_entropy(one @ other.T, torch.arange(len(one), device=one.device))


def _mapped(features: Tensor, unit: Tensor) -> Tensor:
    return F.normalize(features @ unit[:, :-1].T + unit[:, -1], dim=1)


@dataclass(frozen=True)
class Engine(Frozen):
    """Trains nothing; the classifier `engine` has the paper's rule."""

    name = "engine"
    classifiers = ("engine",)
