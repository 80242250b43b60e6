"""`bayes`: discriminant analysis that starts from the texts. `text_prior` has the model; this is what it keeps.

x is z, or with M random features [z, relu(z R) / sqrt(M)] with the layer R of `ranpac`; texts have zeros there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor

from dulbe_peft.classifiers.base import linear
from dulbe_peft.classifiers.calibration import places_among, ranking
from dulbe_peft.classifiers.class_sums import ClassSums
from dulbe_peft.classifiers.ranpac import MOST_FEATURES, random_layer
from dulbe_peft.classifiers.text_prior import OMEGAS, SCALES, Fit
from dulbe_peft.utils.settings import Positive

# Among these, left-out images choose: with one kappa and one rho, few images and many could not both be right.
KAPPAS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
RHOS = (0.3, 1.0, 3.0, 10.0, 30.0)
TEMPERATURES = (1.0, 0.5, 0.25, 0.125)  # of left-out images; with one alone, errors of large scores say nothing
MOST_JUDGED = 256  # images of a task that are judged, of each class as many; all of them would take much longer
NEVER = 1e300  # an error that no number of images makes the least

# Chosen on held-back training images; docs/results.md has the streams.
USUAL_RHO = 3.0  # 10 costs up to four points with two images a class, or on a long tail
FEW_RHO = 100.0  # with one image a class, where S also holds how the classes lie apart, and for texts alone
# kappa before any image is left out. Without TOLD one image a class costs up to nine points; with less than the least
# names are hardly used, with more than the most weak names beside easy images cost twenty. Names that tell next to
# nothing have KAPPAS[0]: else classes with few images are drawn to the middle.
TOLD, LEAST_TOLD, USUAL_KAPPAS = 1.5, 0.02, (4.0, 16.0)
# Nats that names without meaning gain by chance in 1 of 20 cases: by_text is fitted with an omega and a scale, so that
# twice the gain is chi-squared with two degrees of freedom. Without it ten such classes with one image each lose up to
# 22 points in a draw.
CHANCE = 3.0


class BayesClassifier(ClassSums):
    """Classes as Gaussians with one covariance, whose means lie where the texts say until their images say otherwise.

    The sums are exact and in float64, so for a fixed kappa and rho the solution is the one on all data at once,
    whatever the order of images, classes, tasks and merged parts. Texts may be absent, of all classes or of some.

    Args:
        kappa: how many images a text counts for, positive. "auto": see `choice`.
        rho: how far the covariance goes to a multiple of the identity, positive; 1 is as far as OAS. "auto": likewise.
        omega: how far the offset is that of LDA and CLIP side by side, 0 to 1. "auto": see `choice`; 0 with a fixed
            kappa and rho.
        features: M random features beside z, which help where classes have many images and no planes between them;
            left-out images say whether. 0, a fixed kappa and rho, and after `move`: none, and scores are affine.
        exact_forgetting: keep each class's share of W, so that `forget_class` leaves nothing of it but in the tables.
            It takes 8 min(n_c, d) d bytes a class: 2 MiB with d = 512 from 512 images on.

    Attributes:
        text_embeds: e_c, (C, embed_dim), unit vectors, or zeros without a text.
        sums, counts, scatter, freedom, factors, factor_rows: of x, see `ClassSums`; d is `embed_dim` + M.
        losses: (1 or 2, kappas, rhos, temperatures), float64: errors of images that were left out; the second table is
            with the random features.
        judged: sum of the weights of these images and of the weights' squares, (2,), float64.
        by_text: (omegas, scales), float64: log-losses of the texts alone.

    Reference:
        Wang et al., "A Hard-to-Beat Baseline for Training-free CLIP-based Adaptation", 2024, adds the two scores with
        one weight for all classes; arXiv 2404.00312 has a text classifier as the prior mean of a Gaussian process.
    """

    exact_forgetting: bool = True
    kappa: Positive | Literal["auto"] = "auto"
    rho: Positive | Literal["auto"] = "auto"
    features: Annotated[int, Ge(0), Le(MOST_FEATURES)] = 500
    omega: Annotated[float, Ge(0), Le(1)] | Literal["auto"] = "auto"

    name = "bayes"
    summary = "discriminant analysis with the text as its prior: a class is its name until its images say otherwise"
    may_be_absent = ("text_embeds",)
    adds_up = ("losses", "judged", "by_text")

    def register(self) -> None:
        self._random = self.features if "auto" in (self.kappa, self.rho) else 0
        self.register_rows("text_embeds", self.embed_dim)
        self.keep_sums(self.embed_dim + self._random)
        self._kappas = KAPPAS if self.kappa == "auto" else (float(self.kappa),)
        self._rhos = RHOS if self.rho == "auto" else (float(self.rho),)
        self._features = (0, self._random) if self._random else (0,)
        shape = len(self._features), len(self._kappas), len(self._rhos), len(TEMPERATURES)
        for name, sizes in (("losses", shape), ("judged", (2,)), ("by_text", (len(OMEGAS), len(SCALES)))):
            self.register_buffer(name, torch.zeros(sizes, dtype=torch.float64))

    def moved(self, matrix: Tensor) -> dict[str, Tensor]:
        """Texts stay. No map of z is one of random features: sums become 0, with an error that no choice takes."""
        losses = self.losses.clone()
        losses[1:] = NEVER
        return super().moved(F.pad(matrix, (0, self._random, 0, self._random))) | {"losses": losses}

    def judge(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Add to the tables what the images say, see `choice`; scores as if each had not been learned."""
        if (classes := len(self._class_names)) < 2:
            return None
        images, labels = images.to(self.sums), labels.to(self.sums.device)
        order = ranking(images).argsort()
        rows = order[places_among(labels[order]).argsort(stable=True)[:MOST_JUDGED]]
        weights = classes / self.counts.to(images) * labels.bincount(minlength=classes)
        images, labels = images[rows], labels[rows]
        weights = (weights / labels.bincount(minlength=classes).clamp_min(1))[labels]
        self._buffers |= {"by_text": self.by_text + self._fit(0).by_text(images, labels, weights, FEW_RHO)}
        several = self.counts.to(labels.device)[labels] > 1
        if not several.any():
            return None
        images, labels, weights = images[several], labels[several], weights[several]
        losses, kappas, omega = self.losses.clone(), torch.tensor(self._kappas), self._omega()
        lifted, own, each = self.lifted(images), weights.float(), torch.arange(len(labels)).to(labels)
        for table, features in zip(losses, self._features, strict=True):
            for place, rho in enumerate(self._rhos):
                scores = self._fit(features).left_out(lifted, labels, kappas, rho, omega)
                for column, temperature in enumerate(TEMPERATURES):
                    right = (scores / temperature).softmax(dim=2)[:, each, labels]
                    table[:, place, column] += (1 - right) @ own
        self._buffers |= {"losses": losses, "judged": self.judged + torch.stack([weights.sum(), weights @ weights])}
        self._derived.pop("choice", None)
        return self.left_out(images, labels), labels

    def left_out(self, images: Tensor, labels: Tensor) -> Tensor:
        """See `Fit.left_out`; in float32."""
        kappa, rho, features, omega = self.choice
        rows, labels = self.lifted(images.to(self.sums)), labels.to(self.sums.device)
        return self._fit(features).left_out(rows, labels, torch.tensor([kappa]), rho, omega)[0]

    @property
    def choice(self) -> tuple[float, float, int, float]:
        """kappa, rho, 0 or M, and omega: those by which images of the seen classes are right.

        omega is the one with which texts alone make the labels likeliest, at the best of `SCALES`. Texts have not seen
        the images, so that none has to be left out. The others have the least of

            n L(kappa, rho) + log(kappa / usual)^2 + log(rho / 3)^2

        with the mean error L of images that are left out, and their effective number n. A task's images, or 256 of
        them, and further ones are scored against all classes of then. An error is 1 less the probability of the own
        class, at the best of `TEMPERATURES`. It weighs C / n_c, so that classes weigh alike, and late tasks more than
        early ones. Few images leave the choice to the usual pair; without any, rho is 100 and there are no random
        features. `auto` thus depends on how the images came, by the classes that they were scored against.
        """
        return self.derived("choice", self._choose)

    def _choose(self) -> tuple[float, float, int, float]:
        (total, squares), usual, omega = self.judged.tolist(), self._usual_kappa(), self._omega()
        if not total:
            kappa, rho = usual if self.kappa == "auto" else self.kappa, FEW_RHO if self.rho == "auto" else self.rho
            return float(kappa), float(rho), 0, omega
        errors = total**2 / squares * (self.losses / total).amin(dim=3)
        kappas, rhos = (torch.tensor(grid).to(errors) for grid in (self._kappas, self._rhos))
        away = (kappas / usual).log()[:, None] ** 2 + (rhos / USUAL_RHO).log() ** 2
        table, number, place = torch.unravel_index((errors + away).argmin(), errors.shape)
        return self._kappas[number], self._rhos[place], self._features[table], omega

    def _omega(self) -> float:
        if self.omega != "auto":
            return float(self.omega)
        return OMEGAS[int(self.by_text.amin(dim=1).argmin())] if "auto" in (self.kappa, self.rho) else 0.0

    def _usual_kappa(self) -> float:
        """How many images a text counts for, before any image is left out.

        Texts that tell the classes apart, but are little of how the means lie, say that the rest of it is noise. Those
        that tell half are believed however few the images.
        """
        told, (least, most) = self._told(), USUAL_KAPPAS
        chance = CHANCE / float(self.counts.sum()) / math.log(max(2, len(self._class_names)))
        if told < max(LEAST_TOLD, min(0.5, chance)):
            return KAPPAS[0]
        return min(most, max(least, TOLD * told / max(1e-9, self._fit(0).explained(FEW_RHO))))

    def _told(self) -> float:
        """The share of the labels' log-loss that the texts alone take away; 1/2 before any image was judged."""
        worst = float(self.by_text[0, 0])
        return 1 - float(self.by_text.min()) / worst if worst else 0.5

    @property
    def temperature(self) -> float:
        """T of `probabilities`. Where no class has two images, that of texts alone, more where they tell little."""
        if self.calibration or not self._class_names:
            return super().temperature
        return float(self.solved()["temperature"])

    def _fit(self, features: int) -> Fit:
        """The fit of the unit features and of so many random ones."""
        width = self.embed_dim + features

        def make() -> Fit:
            texts = F.pad(self.logit_scale * self.text_embeds.to(self.sums), (0, features))
            means = self.sums[:, :width] / self.counts.to(self.sums)[:, None]
            return Fit.of(means, self.counts, self.scatter[:width, :width], int(self.freedom), texts)

        return self.derived(f"fit {features}", make)

    def solution(self) -> tuple[Tensor, Tensor]:
        """The scores of x are x times the first, (C, d), and the second, (C,); float64."""
        kappa, rho, features, omega = self.choice
        return self.derived("solution", lambda: self._fit(features).solution(kappa, rho, omega))

    def solved(self) -> dict[str, Tensor]:
        """The solution in float32, and the temperature that needs no image to be left out."""
        return self.derived("solved", self._solved) if self._class_names else {}

    def _solved(self) -> dict[str, Tensor]:
        weights, offsets = (part.float().to(self.device) for part in self.solution())
        kappa, rho, features, _ = self.choice
        best = SCALES[int(self.by_text.amin(dim=0).argmin())] or 1
        usual = (1 - self._told()) / (1 + kappa) + self._fit(features).slope(rho) / best
        return {"weight": weights, "bias": offsets, "temperature": torch.tensor(usual, device=self.device)}

    def solved_shapes(self, classes: int) -> list[dict[str, tuple[int, ...]]]:
        widths = {self.embed_dim + features for features in self._features}
        return [{"weight": (classes, width), "bias": (classes,), "temperature": ()} for width in widths]

    def logits(self, images: Tensor) -> Tensor:
        solved = self.solved()
        random = solved["weight"].shape[1] > self.embed_dim
        return (self.lifted(images) if random else images) @ solved["weight"].T + solved["bias"]

    def lifted(self, images: Tensor) -> Tensor:
        """x of z, (n, d), with the random features."""
        if not self._random:
            return images
        layer = self.derived(f"layer {images.dtype} {images.device}", lambda: self._layer().to(images))
        return torch.cat([images, (images @ layer).relu()], dim=1)

    def _layer(self) -> Tensor:
        """R / sqrt(M)."""
        return random_layer(0, self.embed_dim, self._random) / math.sqrt(self._random)

    def formula(self) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        tensors = {name: self.solved()[name] for name in ("weight", "bias")}
        if tensors["weight"].shape[1] > self.embed_dim:
            return random_and_linear, tensors | {"projection": self._layer().to(tensors["weight"])}
        return linear, tensors


def random_and_linear(
    z: torch.Tensor, projection: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Scores, (n, C), of unit features z, (n, d): a random layer beside them, a matrix and a bias."""
    return torch.cat([z, (z @ projection).relu()], dim=1) @ weight.T + bias
