"""`bayes`: discriminant analysis combined with the text classifier, with weights chosen from left-out images.

`text_prior` derives the model. This module keeps the sums and chooses kappa, rho, omega and the features.

x is z alone, or [z, relu(z R) / sqrt(M)] with M random features, where R is the layer of `ranpac`. The text embeddings
are zero in the random features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor

from dulbe_peft.classifiers.base import linear
from dulbe_peft.classifiers.calibration import TaskTemperature, places_among, ranking
from dulbe_peft.classifiers.class_sums import ClassSums
from dulbe_peft.classifiers.ranpac import MOST_FEATURES, random_layer
from dulbe_peft.classifiers.text_prior import OMEGAS, SCALES, Fit
from dulbe_peft.utils.settings import Positive

# Left-out images choose among these values. No single kappa and rho suits both few and many images.
KAPPAS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
RHOS = (0.01, 0.03, 0.1, 0.3, 1.0)
TEMPERATURES = tuple(2.0 ** (half / 2) for half in range(12, -1, -1))  # of the scores of left-out images
MOST_JUDGED = 256  # left-out images per task, spread evenly over its classes; all images would take much longer
NEVER = 1e300  # a loss so large that its row of the table is never chosen

# Chosen on held-out training images with published features; docs/results.md lists the streams.
USUAL_RHO = 0.3
# T of the images' scores if no image can be left out: on nine sets, 27 to 80 was best. S is then a multiple of the
# identity, so the scores treat all directions as independent, which makes them too confident.
IMAGE_TEMPERATURE = 40.0
# The weight of texts that determine all labels, relative to that of one image per class, each at its own temperature.
# It is larger than 1 because the images' scores make correlated errors on classes that look alike.
TEXT_WEIGHT = 2.5


class BayesClassifier(ClassSums):
    """Add the scores of linear discriminant analysis and of the text classifier, with weights chosen from the images.

    The sums are exact and in float64. For a fixed kappa and rho, the solution is therefore the same as with all data
    at once, in any order of images, classes, tasks and merged parts. Some or all classes may have no text.

    Args:
        kappa: number of images that a text counts as, positive. "auto": see `choice`.
        rho: shrinkage of the covariance towards a multiple of the identity, positive, in images per dimension. "auto":
            see `choice`.
        omega: weight of CLIP's own offset in the offset of a text, 0 to 1. "auto": see `choice`; 0 if kappa and rho
            are both fixed.
        features: number M of random features in addition to z. They help if classes have many images and cannot be
            separated by planes; left-out images decide whether they are used. They are not used if M is 0, if kappa
            and rho are both fixed, or after `move`; the scores are then affine in z.
        exact_forgetting: keep each class's part of W, so that `forget_class` removes all of the class except what it
            added to the tables. This takes 8 min(n_c, d) d bytes per class: 2 MiB for d = 512 and 512 images or more.

    Attributes:
        text_embeds: e_c, (C, embed_dim), unit vectors, or zeros without a text.
        sums, counts, scatter, freedom, factors, factor_rows: of x, see `ClassSums`; d is `embed_dim` + M.
        losses: (1 or 2, kappas, rhos, temperatures), float64: summed log-losses of left-out images. The second table
            is computed with the random features.
        judged: (2,), float64: the sum of the weights of the left-out images, and the sum of their squares.
        by_text: (omegas, scales), float64: summed log-losses of the text classifier alone.

    Reference:
        Wang et al., "A Hard-to-Beat Baseline for Training-free CLIP-based Adaptation", 2024, adds the two scores with
        a weight chosen on validation images. arXiv 2404.00312 uses a text classifier as the prior mean of a Gaussian
        process.
    """

    exact_forgetting: bool = True
    kappa: Positive | Literal["auto"] = "auto"
    rho: Positive | Literal["auto"] = "auto"
    features: Annotated[int, Ge(0), Le(MOST_FEATURES)] = 500
    omega: Annotated[float, Ge(0), Le(1)] | Literal["auto"] = "auto"

    name = "bayes"
    summary = "discriminant analysis and the text classifier, added up; names count less the more images there are"
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
        """Return the sums after a linear map of z; the text embeddings stay.

        Random features do not follow a map of z. Their sums become 0, and their loss so large that it is not chosen.
        """
        losses = self.losses.clone()
        losses[1:] = NEVER
        return super().moved(F.pad(matrix, (0, self._random, 0, self._random))) | {"losses": losses}

    def judge(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Add the losses of a task's images to the tables of `choice`; return scores as if each were not learned.

        The image of a class with a single image cannot be left out. Other classes stand for such classes: the same
        share of the task's other classes is reduced to one image each, and their remaining images are scored.
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
                right = scores[:, each, truth]
                for column, temperature in enumerate(TEMPERATURES):
                    missed = (scores / temperature).logsumexp(dim=2) - right / temperature
                    table[number, :, place, column] += missed @ own.float()
        self._buffers |= {"losses": table, "judged": self.judged + torch.stack([own.sum(), own @ own])}
        # The fits do not depend on the tables.
        kept = {name: made.value for name, made in self._derived.items() if name.startswith(("fit ", "layer "))}
        for name, value in kept.items():
            self.keep_derived(name, value)
        kappa, rho, features, omega = self.choice
        return scored(features, torch.tensor([kappa]), rho, omega)[0] / self.unit_score, truth

    def _lone(self, inside: Tensor) -> Tensor:
        """Choose the classes that stand for classes with a single image; return their numbers.

        `inside`, (C,), counts each class's images in the task. Only classes with all their images in the task are
        chosen. They are spread evenly, and their share equals the share of single-image classes among all classes.
        """
        counts = self.counts.to(inside.device)
        whole = ((inside == counts) & (counts > 1)).nonzero()[:, 0]
        number = len(whole) * int((counts == 1).sum()) // len(counts)
        return whole[torch.arange(number).to(whole) * len(whole) // max(1, number)]

    def _reduced(self, features: int, images: Tensor, labels: Tensor, kept: Tensor) -> Fit:
        """Return the fit with some classes reduced to one image each.

        `images` are all x, (n, d), of these classes, and `kept`, (n,), selects the one image of each that remains.
        """
        width, chosen = self.embed_dim + features, labels.unique()
        images, counts = images[:, :width], self.counts.to(labels.device).clone()
        means = self.sums[:, :width] / counts.to(images)[:, None]
        away = images - means[labels]
        means[labels[kept]], counts[chosen] = images[kept], 1
        freedom = int(self.freedom) - len(labels) + len(chosen)
        texts = F.pad(self.logit_scale * self.text_embeds.to(self.sums), (0, features))
        return Fit.of(means, counts, self.scatter[:width, :width] - away.T @ away, freedom, texts)

    def left_out(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the scores of `Fit.left_out`, in float32."""
        kappa, rho, features, omega = self.choice
        rows, labels = self.lifted(images.to(self.sums)), labels.to(self.sums.device)
        return self._fit(features).left_out(rows, labels, torch.tensor([kappa]), rho, omega)[0] / self.unit_score

    @property
    def choice(self) -> tuple[float, float, int, float]:
        """Choose kappa, rho, the number of random features (0 or M) and omega that make the labels most likely.

        omega minimises the log-loss of the text classifier alone, at the best of `SCALES`. Only its a, b and S
        depend on the images, so none is left out. The others minimise

            n L(kappa, rho, T) + log(kappa / usual)^2 / 2 + log(rho / 0.3)^2 / 2 + log(T / usual)^2 / 2

        where L is the mean log-loss of left-out images at the temperature T, and n is their effective number: a
        pseudo-likelihood with log-normal priors, whose standard deviation is a factor of e. T is also the temperature
        of `probabilities`. Up to 256 images of each task or update are scored against all classes seen so far. A loss
        has the weight C / n_c, so all classes have the same weight, and later tasks weigh more than earlier ones. The
        usual kappa follows from how well the texts alone predict the labels, and the usual T from `IMAGE_TEMPERATURE`
        and the temperature of the texts.

        With few images, the choice stays near the usual kappa and rho. If no image was left out, no random features
        are used. If no class has two images, the covariance is a multiple of the identity for every rho. The result of
        "auto" depends on the order of the classes: each image is scored against the classes that were seen by then,
        and the order decides which classes stand for those with a single image.

        Reference:
            Besag, "Statistical Analysis of Non-Lattice Data", 1975: the pseudo-likelihood; Geisser and Eddy, 1979.
        """
        return self.derived("choice", self._choose)

    def _choose(self) -> tuple[float, float, int, float]:
        usual, omega = self._usual_kappa(), self._omega()
        if not float(self.judged[0]):
            kappa, rho = (
                (usual if self.kappa == "auto" else self.kappa),
                (USUAL_RHO if self.rho == "auto" else self.rho),
            )
            return float(kappa), float(rho), 0, omega
        losses = self.derived("by temperature", self._by_temperature).amin(dim=3)
        kappas, rhos = (torch.tensor(grid).to(losses) for grid in (self._kappas, self._rhos))
        away = (kappas / usual).log()[:, None] ** 2 + (rhos / USUAL_RHO).log() ** 2
        table, number, place = torch.unravel_index((losses + away / 2).argmin(), losses.shape)
        return self._kappas[number], self._rhos[place], self._features[table], omega

    def _by_temperature(self) -> Tensor:
        """Return n L + log(T / usual)^2 / 2 for each entry of `losses`."""
        total, squares = self.judged.tolist()
        each = [[self._usual_temperatures(number, rho) for rho in self._rhos] for number in self._features]
        usual = torch.tensor(each).to(self.losses).transpose(1, 2)[..., None]
        away = (torch.tensor(TEMPERATURES).to(usual) / usual).log()
        return total / squares * self.losses + away**2 / 2

    def _omega(self) -> float:
        if self.omega != "auto":
            return float(self.omega)
        return OMEGAS[int(self.by_text.amin(dim=1).argmin())] if "auto" in (self.kappa, self.rho) else 0.0

    def _usual_kappa(self) -> float:
        """Return the number of images, at least 1, that a text counts as before any image is left out.

        With it, the texts have `TEXT_WEIGHT` times the explained share of the log-loss, `_told`, as their weight
        relative to one image per class, if the scores of images and of texts are divided by their temperatures.
        """
        slope = self._fit(0).slope(USUAL_RHO)
        weight = TEXT_WEIGHT * self._told() * IMAGE_TEMPERATURE
        return max(1.0, weight * self._text_scale() / slope) if slope and weight else 1.0

    def _text_scale(self) -> float:
        """Return the scale of `SCALES` that makes the labels most likely by text, with a log-normal prior around 1."""
        scales = torch.tensor(SCALES[1:]).to(self.by_text)
        losses = self.by_text.amin(dim=0)[1:] / float(self.by_text[0, 0]) * self._nats() + scales.log() ** 2 / 2
        return SCALES[1 + int(losses.argmin())]

    def _told(self) -> float:
        """Return the share of the labels' log-loss that texts alone explain, corrected for two fitted numbers.

        The scale and omega are fitted to the same labels, so two nats are subtracted, by Akaike's criterion.
        """
        worst = float(self.by_text[0, 0])
        return max(0.0, 1 - float(self.by_text.min()) / worst - 2 / self._nats()) if worst else 0.0

    def _nats(self) -> float:
        """Return the log-loss of the labels under a uniform prediction, for the effective number of images."""
        classes = len(self._class_names)
        return classes**2 / float((1 / self.counts).sum()) * math.log(max(2, classes))

    @property
    def calibrated(self) -> bool:
        """Whether left-out images, or texts that explain some of the labels, determined `temperature`."""
        return super().calibrated or self._told() > 0

    def temperature_of(self, tasks: Sequence[TaskTemperature]) -> float:
        """Return T of `probabilities`, whatever the records say: the tables contain the images of all tasks."""
        return float(self.solved()["temperature"]) if self._class_names else 1.0

    @property
    def unit_score(self) -> float:
        """Return the divisor of the scores: their temperature, or 1 for fixed settings.

        Scores with fixed settings do not depend on the order of tasks, and their temperature does.
        """
        return self._temperature if "auto" in (self.kappa, self.rho) else 1.0

    @property
    def _temperature(self) -> float:
        return float(self.derived("temperature", self._measure))

    def _measure(self) -> float:
        """Return the T of `choice`, between the values of `TEMPERATURES` by a parabola through the nearest three."""
        kappa, rho, features, _ = self.choice
        if not float(self.judged[0]):
            return self._usual_temperatures(features, rho, [kappa])[0]
        place = self._features.index(features), self._kappas.index(kappa), self._rhos.index(rho)
        losses = self.derived("by temperature", self._by_temperature)[place].tolist()
        best, steps = min(range(len(losses)), key=losses.__getitem__), 0.0
        if 0 < best < len(losses) - 1:
            before, here, after = losses[best - 1 : best + 2]
            steps = (before - after) / (before - 2 * here + after) / 2
        return float(TEMPERATURES[best] * (TEMPERATURES[1] / TEMPERATURES[0]) ** steps)

    def _usual_temperatures(self, features: int, rho: float, kappas: Sequence[float] = ()) -> list[float]:
        """Return T for each kappa, by default each of the table, if no image can be left out.

        The errors of the images' and of the texts' scores add up like random errors with `Fit.correlation`.
        """
        fit, by_texts, common, found = self._fit(features), 0.0, 0.0, []
        if float(self.by_text[0, 0]):
            by_texts = fit.slope(rho) / self.derived("text scale", self._text_scale)
            common = self.derived("correlation", lambda: self._fit(0).correlation(USUAL_RHO, self._omega()))
        for share in map(fit.share, kappas or self._kappas):
            images, texts = share * IMAGE_TEMPERATURE, (1 - share) * by_texts
            found.append(math.sqrt(images**2 + texts**2 + 2 * common * images * texts))
        return found

    def _fit(self, features: int) -> Fit:
        """Return the fit to the unit features and the first `features` random features."""
        width = self.embed_dim + features

        def make() -> Fit:
            texts = F.pad(self.logit_scale * self.text_embeds.to(self.sums), (0, features))
            means = self.sums[:, :width] / self.counts.to(self.sums)[:, None]
            return Fit.of(means, self.counts, self.scatter[:width, :width], int(self.freedom), texts)

        return self.derived(f"fit {features}", make)

    def solution(self) -> tuple[Tensor, Tensor]:
        """Return the weights, (C, d), and the offsets, (C,), of the scores of x; float64."""
        kappa, rho, features, omega = self.choice

        def solve() -> tuple[Tensor, Tensor]:
            weights, offsets = self._fit(features).solution(kappa, rho, omega)
            return weights / self.unit_score, offsets / self.unit_score

        return self.derived("solution", solve)

    def solved(self) -> dict[str, Tensor]:
        """Return the solution in float32, and the temperature for the case that no image can be left out."""
        return self.derived("solved", self._solved) if self._class_names else {}

    def _solved(self) -> dict[str, Tensor]:
        weights, offsets = (part.float().to(self.device) for part in self.solution())
        usual = torch.tensor(self._temperature / self.unit_score, device=self.device)
        return {"weight": weights, "bias": offsets, "temperature": usual}

    def solved_shapes(self, classes: int) -> list[dict[str, tuple[int, ...]]]:
        widths = {self.embed_dim + features for features in self._features}
        return [{"weight": (classes, width), "bias": (classes,), "temperature": ()} for width in widths]

    def logits(self, images: Tensor) -> Tensor:
        solved = self.solved()
        random = solved["weight"].shape[1] > self.embed_dim
        return (self.lifted(images) if random else images) @ solved["weight"].T + solved["bias"]

    def lifted(self, images: Tensor) -> Tensor:
        """Return x, (n, d), for z: the unit features followed by the random features."""
        if not self._random:
            return images
        layer = self.derived(f"layer {images.dtype} {images.device}", lambda: self._layer().to(images))
        return torch.cat([images, (images @ layer).relu()], dim=1)

    def _layer(self) -> Tensor:
        """Return R / sqrt(M)."""
        return random_layer(0, self.embed_dim, self._random) / math.sqrt(self._random)

    def formula(self) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        tensors = {name: self.solved()[name] for name in ("weight", "bias")}
        if tensors["weight"].shape[1] > self.embed_dim:
            return random_and_linear, tensors | {"projection": self._layer().to(tensors["weight"])}
        return linear, tensors


def random_and_linear(
    z: torch.Tensor, projection: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Return scores, (n, C), of unit features z, (n, d), from z and its random features by a matrix and a bias."""
    return torch.cat([z, (z @ projection).relu()], dim=1) @ weight.T + bias
