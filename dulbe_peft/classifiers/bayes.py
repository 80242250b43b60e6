"""`bayes`: discriminant analysis beside the texts. `text_prior` has the model; this is what it keeps and chooses.

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
RHOS = (0.01, 0.03, 0.1, 0.3, 1.0)
TEMPERATURES = (32.0, 16.0, 8.0, 4.0, 2.0, 1.0)  # of left-out images
MOST_JUDGED = 256  # images of a task that are judged, of each class as many; all of them would take much longer
NEVER = 1e300  # a loss that no number of images makes the least

# Chosen on held-back training images of published features; docs/results.md has the streams.
USUAL_RHO = 0.3
# T of the images' scores where none can be left out: on nine streams, 32 to 90 was best. S is a multiple of the
# identity there, so that the scores take for independent what images say in each direction.
IMAGE_TEMPERATURE = 40.0
# How much more than images texts weigh that tell all of the labels, each at its own temperature, with one image a
# class: the images' scores err together on classes that look alike.
TEXT_WEIGHT = 2.5


class BayesClassifier(ClassSums):
    """Gaussians of the classes' images and the text classifier side by side, with weights that follow from the images.

    The sums are exact and in float64, so for a fixed kappa and rho the solution is the one on all data at once,
    whatever the order of images, classes, tasks and merged parts. Texts may be absent, of all classes or of some.

    Args:
        kappa: how many images a text counts for, positive. "auto": see `choice`.
        rho: how far the covariance goes to a multiple of the identity, positive: so many images for each dimension.
            "auto": likewise.
        omega: how far the offset of a text is CLIP's own, 0 to 1. "auto": see `choice`; 0 with a fixed kappa and rho.
        features: M random features beside z, which help where classes have many images and no planes between them;
            left-out images say whether. 0, a fixed kappa and rho, and after `move`: none, and scores are affine.
        exact_forgetting: keep each class's share of W, so that `forget_class` leaves nothing of it but in the tables.
            It takes 8 min(n_c, d) d bytes a class: 2 MiB with d = 512 from 512 images on.

    Attributes:
        text_embeds: e_c, (C, embed_dim), unit vectors, or zeros without a text.
        sums, counts, scatter, freedom, factors, factor_rows: of x, see `ClassSums`; d is `embed_dim` + M.
        losses: (1 or 2, kappas, rhos, temperatures), float64: log-losses of images that were left out; the second
            table is with the random features.
        judged: sum of the weights of these images and of the weights' squares, (2,), float64.
        by_text: (omegas, scales), float64: log-losses of the texts alone.

    Reference:
        Wang et al., "A Hard-to-Beat Baseline for Training-free CLIP-based Adaptation", 2024, adds the two scores with
        a weight that validation images choose; arXiv 2404.00312 has a text classifier as the prior mean of a Gaussian
        process.
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
        """Add to the tables what the images say, see `choice`; scores as if each had not been learned.

        Of a class with one image none can be left out. So that such classes have a say, as large a share of the task's
        other classes is reduced to one image, and their further images are scored so.
        """
        if (classes := len(self._class_names)) < 2:
            return None
        images, labels = images.to(self.sums), labels.to(self.sums.device)
        order = ranking(images).argsort()
        images, labels = images[order], labels[order]
        places, inside = places_among(labels), labels.bincount(minlength=classes)
        rows = places.argsort(stable=True)[:MOST_JUDGED]
        weights = classes / self.counts.to(images) * inside
        weights = (weights / labels[rows].bincount(minlength=classes).clamp_min(1))[labels]
        losses = self._fit(0).text_losses(images[rows], labels[rows], weights[rows], USUAL_RHO)
        self._buffers |= {"by_text": self.by_text + losses}
        lone = torch.isin(labels, self._lone(inside))
        left = rows[(self.counts.to(labels.device)[labels[rows]] > 1) & ~lone[rows]]
        further = rows[lone[rows] & (places[rows] > 0)]
        judged, x = torch.cat([left, further]), self.lifted(images)
        if not len(judged):
            return None
        truth, own, fits = labels[judged], weights[judged], dict[int, Fit | None]()
        for features in self._features:
            fits[features] = self._reduced(features, x[lone], labels[lone], places[lone] == 0) if lone.any() else None

        def scored(features: int, kappas: Tensor, rho: float, omega: float) -> Tensor:
            found = [self._fit(features).left_out(x[left], labels[left], kappas, rho, omega)] if len(left) else []
            if (fit := fits[features]) is not None:
                found.append(fit.scores(x[further], kappas, rho, omega).float())
            return torch.cat(found, dim=1)

        table, kappas, omega = self.losses.clone(), torch.tensor(self._kappas), self._omega()
        each = torch.arange(len(truth)).to(truth)
        for number, features in enumerate(self._features):
            for place, rho in enumerate(self._rhos):
                scores = scored(features, kappas, rho, omega)
                for column, temperature in enumerate(TEMPERATURES):
                    right = (scores / temperature).log_softmax(dim=2)[:, each, truth]
                    table[number, :, place, column] -= right @ own.float()
        self._buffers |= {"losses": table, "judged": self.judged + torch.stack([own.sum(), own @ own])}
        # The fits do not depend on what has been judged.
        kept = {name: made.value for name, made in self._derived.items() if name.startswith(("fit ", "layer "))}
        for name, value in kept.items():
            self.keep_derived(name, value)
        kappa, rho, features, omega = self.choice
        return scored(features, torch.tensor([kappa]), rho, omega)[0] / self.unit_score, truth

    def _lone(self, inside: Tensor) -> Tensor:
        """Which of the classes that have all their images in a task, of which there are `inside`, stand for lone ones.

        As large a share of them as lone classes are of all, spread evenly.
        """
        counts = self.counts.to(inside.device)
        whole = ((inside == counts) & (counts > 1)).nonzero()[:, 0]
        number = len(whole) * int((counts == 1).sum()) // len(counts)
        return whole[torch.arange(number).to(whole) * len(whole) // max(1, number)]

    def _reduced(self, features: int, images: Tensor, labels: Tensor, kept: Tensor) -> Fit:
        """The fit where of classes, all of whose x (n, d) are given, only one image each is known."""
        width, chosen = self.embed_dim + features, labels.unique()
        images, counts = images[:, :width], self.counts.to(labels.device).clone()
        means = self.sums[:, :width] / counts.to(images)[:, None]
        away = images - means[labels]
        means[labels[kept]], counts[chosen] = images[kept], 1
        freedom = int(self.freedom) - len(labels) + len(chosen)
        texts = F.pad(self.logit_scale * self.text_embeds.to(self.sums), (0, features))
        return Fit.of(means, counts, self.scatter[:width, :width] - away.T @ away, freedom, texts)

    def left_out(self, images: Tensor, labels: Tensor) -> Tensor:
        """See `Fit.left_out`; in float32."""
        kappa, rho, features, omega = self.choice
        rows, labels = self.lifted(images.to(self.sums)), labels.to(self.sums.device)
        return self._fit(features).left_out(rows, labels, torch.tensor([kappa]), rho, omega)[0] / self.unit_score

    @property
    def choice(self) -> tuple[float, float, int, float]:
        """kappa, rho, 0 or M, and omega: those that make the labels of the seen classes' images likeliest.

        omega is the one with which texts alone do so, at the best of `SCALES`. Texts have not seen the images, so that
        none has to be left out. The others have the least of

            n L(kappa, rho) + log(kappa / usual)^2 / 2 + log(rho / 0.3)^2 / 2

        with the mean log-loss L of images that are left out, at the best of `TEMPERATURES`, and their effective number
        n: a pseudo-likelihood and log-normal priors. A task's images, or 256 of them, and further ones are scored
        against all classes of then. A loss weighs C / n_c, so that classes weigh alike, and late tasks more than early
        ones. The usual kappa follows from how much the texts alone tell of the labels. Few images leave the choice to
        the usual pair; where none can be left out there are no random features, and the covariance is a multiple of
        the identity whatever rho is. `auto` thus depends on how the images came, by the classes that they were scored
        against.

        Reference:
            Besag, "Statistical Analysis of Non-Lattice Data", 1975: the pseudo-likelihood; Geisser and Eddy, 1979.
        """
        return self.derived("choice", self._choose)

    def _choose(self) -> tuple[float, float, int, float]:
        (total, squares), usual, omega = self.judged.tolist(), self._usual_kappa(), self._omega()
        if not total:
            kappa, rho = (
                (usual if self.kappa == "auto" else self.kappa),
                (USUAL_RHO if self.rho == "auto" else self.rho),
            )
            return float(kappa), float(rho), 0, omega
        losses = total**2 / squares * (self.losses / total).amin(dim=3)
        kappas, rhos = (torch.tensor(grid).to(losses) for grid in (self._kappas, self._rhos))
        away = (kappas / usual).log()[:, None] ** 2 + (rhos / USUAL_RHO).log() ** 2
        table, number, place = torch.unravel_index((losses + away / 2).argmin(), losses.shape)
        return self._kappas[number], self._rhos[place], self._features[table], omega

    def _omega(self) -> float:
        if self.omega != "auto":
            return float(self.omega)
        return OMEGAS[int(self.by_text.amin(dim=1).argmin())] if "auto" in (self.kappa, self.rho) else 0.0

    def _usual_kappa(self) -> float:
        """How many images a text counts for, before any image is left out; 1 at least.

        It is that with which texts weigh `TEXT_WEIGHT` times what they tell, where the scores of one image a class
        and those of texts are divided by their temperatures.
        """
        slope = self._fit(0).slope(USUAL_RHO)
        weight = TEXT_WEIGHT * self._told() * IMAGE_TEMPERATURE
        return max(1.0, weight * self._text_scale() / slope) if slope and weight else 1.0

    def _text_scale(self) -> float:
        """That of `SCALES` at which texts make the labels likeliest, with a log-normal prior about CLIP's own."""
        scales = torch.tensor(SCALES[1:]).to(self.by_text)
        losses = self.by_text.amin(dim=0)[1:] / float(self.by_text[0, 0]) * self._nats() + scales.log() ** 2 / 2
        return SCALES[1 + int(losses.argmin())]

    def _told(self) -> float:
        """The share of the labels' log-loss that texts alone take away, less what two fitted numbers do by chance.

        The scale and omega are fitted to them, and add two nats by Akaike's criterion.
        """
        worst = float(self.by_text[0, 0])
        return max(0.0, 1 - float(self.by_text.min()) / worst - 2 / self._nats()) if worst else 0.0

    def _nats(self) -> float:
        """The log-loss of the labels where nothing is known, of as many images as unequal classes are worth."""
        classes = len(self._class_names)
        return classes**2 / float((1 / self.counts).sum()) * math.log(max(2, classes))

    @property
    def temperature(self) -> float:
        """T of `probabilities`; where no image can be left out, see `_usual_temperature`."""
        if self.calibration or not self._class_names:
            return super().temperature
        return float(self.solved()["temperature"])

    def _usual_temperature(self) -> float:
        """T where no image can be left out: that of either part alone, as independent errors of the score add up."""
        kappa, rho, features, _ = self.choice
        fit, share = self._fit(features), self._fit(features).share(kappa)
        by_texts = fit.slope(rho) / self._text_scale() if float(self.by_text[0, 0]) else 0.0
        return math.hypot(share * IMAGE_TEMPERATURE, (1 - share) * by_texts)

    @property
    def unit_score(self) -> float:
        """What scores are divided by, so that tasks with different choices can have the same temperature of about 1.

        It is the best of `TEMPERATURES`. With fixed settings scores stay as they are, whatever the order of tasks.
        """
        return float(self.derived("unit", self._measure)) if "auto" in (self.kappa, self.rho) else 1.0

    def _measure(self) -> float:
        if not float(self.judged[0]):
            return self._usual_temperature()
        kappa, rho, features, _ = self.choice
        place = self._features.index(features), self._kappas.index(kappa), self._rhos.index(rho)
        return TEMPERATURES[int(self.losses[place].argmin())]

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

        def solve() -> tuple[Tensor, Tensor]:
            weights, offsets = self._fit(features).solution(kappa, rho, omega)
            return weights / self.unit_score, offsets / self.unit_score

        return self.derived("solution", solve)

    def solved(self) -> dict[str, Tensor]:
        """The solution in float32, and the temperature that needs no image to be left out."""
        return self.derived("solved", self._solved) if self._class_names else {}

    def _solved(self) -> dict[str, Tensor]:
        weights, offsets = (part.float().to(self.device) for part in self.solution())
        usual = torch.tensor(self._usual_temperature() / self.unit_score, device=self.device)
        return {"weight": weights, "bias": offsets, "temperature": usual}

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
