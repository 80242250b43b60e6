"""ENGINE: each task adds a linear unit for images and one for texts, used with a Gaussian discriminant of features.

u(z) = v / |v|,  v = sum over tasks of s W_t z + b_t   images and texts have separate sums; finished units are frozen
cos  = u(z) . u(e_c)                                   s = 10
g    = mu_c' P z - mu_c' P mu_c / 2 - log C            P = d (S + tr S / (N - 1) I)^-1,  S: within-class scatter
score = tau (a g / |g| + (1 - a) cos)                  |g|: the norm over the classes

The units of a task are trained on batches of image features z_i with labels y_i. Each old class c adds a sample
s mu_c + 0.25 n to the batch, where n is standard normal. With K(p, q) = mean over i of -log softmax_j(p_i . q_j) at
j = i, where i and j run over the batch, the loss is

(K(l u(z), u(e_y)) + K(l u(e_y), u(z))) / 2 + 2 K(u(e_y), e_y) + 0.5 K(u(z), z)        l = log 100

The last term uses only the features of new images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Le
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.rule import Rule
from dulbe_peft.classifiers.state import Fitted, Layout, State, once, per_class, shared
from dulbe_peft.papers.fitting import class_means, fit, minibatches, task_generator, uniform
from dulbe_peft.strategies.frozen import Frozen
from dulbe_peft.utils.settings import AtLeastOne, Positive, Seed, Weight

LENGTH = 10.0  # s: roughly the norm of CLIP's features before normalisation
SHARPNESS = math.log(100)  # l: the authors' code multiplies by the logarithm of CLIP's scale
MOMENTUM, DECAY = 0.9, 0.05
MOST_DRAWN = 1024  # old classes sampled in a step; limited because the loss compares every pair of rows in the batch


def injected(
    z: torch.Tensor,
    unit: torch.Tensor,
    shift: torch.Tensor,
    texts: torch.Tensor,
    directions: torch.Tensor,
    offsets: torch.Tensor,
    share: torch.Tensor,
) -> torch.Tensor:
    """Return the scores, (n, C), of unit features z, (n, d): cosines of mapped z with texts, plus a discriminant."""
    cosines = torch.nn.functional.normalize(z @ unit.T + shift, dim=1) @ texts.T
    return cosines + share * torch.nn.functional.normalize(z @ directions.T + offsets, dim=1)


@dataclass(frozen=True)
class EngineRule(Rule):
    """ENGINE's classifier. It stores the summed units, one mean per class and one scatter matrix, but no images.

    Differences from the paper:

    - The paper's GPT-4 descriptions are not included; pass descriptions as `class_texts`. The authors sample one
      description per step and pull u(e_y) towards it; here u(e_y) is pulled towards the mean of the class's texts.
    - The re-ranking of an image's five best classes is left out: it needs texts for C^2 pairs of classes, and the text
      tower at test time.
    - u(z) is pulled towards the feature of the same image, not of a noisy copy of the image.
    - The discriminant sees projected features. Its P comes from the scatter of all tasks; the authors average the P of
      the tasks.
    - With more than 1024 old classes, each step samples 1024 of them.

    Args:
        epochs, batch_size: Number of passes over a task's features, and number of image features per step.
        learning_rate: Learning rate of SGD at the start of each task; it decays to 0 over the epochs on a cosine.
        text_loss, image_loss: Weights of the last two terms of the loss.
        noise: Standard deviation of a sampled feature, whose mean has a length of about 10.
        discriminant: The share a, from 0 to 1.
        seed: Seed of the units' initial values, of the order of the features and of the samples.

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
    summary = (
        "ENGINE's rule: compares names with linearly mapped images, and adds a Gaussian discriminant of the images"
    )
    belongs_to = "engine"
    needs_text = True
    can = frozenset({"move", "follow"})

    def tensors(self) -> dict[str, Layout]:
        return {
            "image_unit": shared(self.embed_dim, self.embed_dim + 1),  # [W b]; the scale s is applied outside
            "text_unit": shared(self.embed_dim, self.embed_dim + 1),
            # The units do not follow drift; the next task trains its unit on samples around the moved means.
            "means": per_class(self.embed_dim, dtype=torch.float64, moves=True),
            "scatter": shared(self.embed_dim, self.embed_dim, dtype=torch.float64, moves=True),
            "images": shared(dtype=torch.int64),
        }

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        old, texts = state.classes, state.text_embeds.float()
        generator, width = task_generator(self.seed, old), (self.embed_dim, self.embed_dim + 1)
        before = state.image_unit.float(), state.text_unit.float()
        units = [uniform(generator, self.embed_dim, *width).to(images).requires_grad_() for _ in before]
        optimizer = torch.optim.SGD(units, self.learning_rate, momentum=MOMENTUM, weight_decay=DECAY)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)

        def loss(_: int, rows: Tensor) -> Tensor:
            drawn, classes = self._sample_old(state, generator)
            image_unit, text_unit = (value + unit for value, unit in zip(before, units, strict=True))
            features = torch.cat([LENGTH * images[rows], drawn.to(images)])
            classes = torch.cat([labels[rows], classes.to(labels)])
            mapped, named = _mapped(features, image_unit), _mapped(LENGTH * texts, text_unit)[classes]
            both = (contrast(SHARPNESS * mapped, named) + contrast(SHARPNESS * named, mapped)) / 2
            both = both + self.text_loss * contrast(named, texts[classes])
            return both + self.image_loss * contrast(mapped[: len(rows)], images[rows])

        fit(loss, optimizer, (minibatches(images, self.batch_size, generator) for _ in range(self.epochs)), schedule)
        image_unit, text_unit = (value + unit.detach() for value, unit in zip(before, units, strict=True))
        task_labels, rows = (labels - old).to(state.means.device), images.to(state.means)
        means = class_means(images, task_labels).to(rows)
        spread = rows - means[task_labels]
        return {
            "image_unit": image_unit,
            "text_unit": text_unit,
            "means": torch.cat([state.means, means]),
            "scatter": state.scatter + spread.T @ spread,
            "images": state.images + len(images),
        }

    def _sample_old(self, state: State, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sample one feature for each of at most 1024 old classes.

        Returns the features, (n, d), float64 on the CPU, and their classes, (n,).
        """
        classes = torch.randperm(state.classes, generator=generator)[:MOST_DRAWN]
        noise = torch.randn(len(classes), self.embed_dim, generator=generator)
        return LENGTH * state.means.cpu()[classes] + self.noise * noise, classes

    def formula(self, state: State) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        return injected, self.fitted(state).tensors

    def fitted(self, state: State) -> Injection:
        return Injection.of(self, state)


class Injection(Fitted):
    """The mapped texts and the discriminant."""

    rule: EngineRule

    @once
    def precision(self) -> Tensor:
        """P, (d, d), float64. It is 0 while no class has two different images."""
        state, width = self.state, self.rule.embed_dim
        more = state.scatter.trace() / max(1, int(state.images) - 1) * torch.eye(width).to(state.scatter)
        return width * torch.linalg.pinv(state.scatter + more, hermitian=True)

    @once
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of `injected`."""
        rule, state, classes = self.rule, self.state, len(self.state.means)
        directions = state.means @ self.precision
        offsets = -(directions * state.means).sum(dim=1) / 2 - math.log(classes)
        # P may exceed the range of half precision. Dividing by a constant does not change g / |g|.
        largest = directions.abs().max().clamp(min=1)
        unit, texts = state.image_unit.float(), _mapped(LENGTH * state.text_embeds.float(), state.text_unit.float())
        return {
            "unit": LENGTH * unit[:, :-1],
            "shift": unit[:, -1],
            "texts": rule.logit_scale * (1 - rule.discriminant) * texts,
            "directions": (directions / largest).float().to(state.device),
            "offsets": (offsets / largest).float().to(state.device),
            "share": torch.tensor(rule.logit_scale * rule.discriminant, device=state.device),
        }


def contrast(p: Tensor, q: Tensor) -> Tensor:
    """Return K(p, q): the mean cross-entropy of the products p_i . q_j, both (n, d), with j = i as the target."""
    return F.cross_entropy(p @ q.T, torch.arange(len(p), device=p.device))


def _mapped(features: Tensor, unit: Tensor) -> Tensor:
    return F.normalize(features @ unit[:, :-1].T + unit[:, -1], dim=1)


@dataclass(frozen=True)
class Engine(Frozen):
    """Train nothing: the method is implemented by the classifier `engine`."""

    name = "engine"
    classifiers = ("engine",)
