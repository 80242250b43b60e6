"""`bayes`: discriminant analysis combined with the text classifier, with weights chosen from left-out images.

`text_prior` derives the model. This module keeps the sums and chooses kappa, rho, omega and the features.

x is z alone, or [z, relu(z R) / sqrt(M)] with M random features, where R is the layer of `ranpac`. The text embeddings
are zero in the random features. With features u before a projection, x is [u, z, relu(u R) / sqrt(M)]: the images are
compared by u and the random features, and the names by z, the projected u.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.calibration import TaskTemperature, log_likelihoods, penalties, places_among, worth
from dulbe_peft.classifiers.class_sums import ClassSums
from dulbe_peft.classifiers.groups import few_items, groups_of_classes, ranking, rows_by_group, together
from dulbe_peft.classifiers.ranpac import MOST_FEATURES, random_layer
from dulbe_peft.classifiers.rule import LeftOut, TextDim, linear
from dulbe_peft.classifiers.state import Layout, State, per_class, shared
from dulbe_peft.classifiers.text_prior import OMEGAS, SCALES, WRONG, Fit, ProjectedFit
from dulbe_peft.utils.settings import Positive

# Left-out images choose among these values. No single kappa and rho suits both few and many images.
KAPPAS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
RHOS = (0.01, 0.03, 0.1, 0.3, 1.0)
TEMPERATURES = tuple(2.0 ** (half / 2) for half in range(12, -1, -1))  # of the scores of left-out images
MOST_LEFT_OUT = 256  # left-out images per task, spread evenly over its classes; all images would take much longer
NEVER = 1e300  # a loss so large that its row of the table is never chosen

# Chosen on held-out training images with published features; docs/results.md lists the streams.
USUAL_RHO = 0.3
# T of the images' scores before any image is left out. On eleven sets with one image of each class, 16 to 38 was best;
# 27 on the six that chose it.
IMAGE_TEMPERATURE = 27.0
# If no class has two images, T is so many times the spread of the scores of wrong classes, per direction. 20 to 22 was
# best on six sets, and 18 to 20 on six others, which confirm it.
LONE_SPREAD = 20.0
PAIRS = 30.0  # pairs of classes that count as much as `IMAGE_TEMPERATURE`; on subsets of 3 to 9 classes, 10 is as good
# The weight of texts that determine all labels, relative to that of one image per class, each at its own temperature.
# It is larger than 1 because the images' scores make correlated errors on classes that look alike. With one image and
# names, noisy or not, 1.4 to 2.8 have about the same log-loss on held-out images of four sets.
TEXT_WEIGHT = 2.0
LEAST_TOLD = 0.1  # share of the log-loss that names must explain, so that one that explains nothing is an exception
# Nats by which the images of a class must be less likely by its name than by chance: 1 of 5 names may be wrong. Of
# names that were exchanged, 70 to 100 % are found on six streams, and 0 to 2 % of the others. With 0 nats, right names
# of single images are left out as well (1 to 2 points lost), and with log 19 a third to all wrong names stay.
BEYOND = math.log(4.0)
ROBUST = 5  # place of a share of wrong labels, 0.225, with which a few wrong labels do not make a name look wrong
# The tensors from which `Fit` is computed.
FITTED = ("text_embeds", "sums", "counts", "scatter", "freedom")


@dataclass(frozen=True)
class BayesRule(ClassSums):
    """Add the scores of linear discriminant analysis and of the text classifier, with weights chosen from the images.

    The sums are exact and in float64. For a fixed kappa and rho, the solution is therefore the same as with all data
    at once, in any order of images, classes, tasks and merged parts. Some or all classes may have no text.

    Args:
        kappa: Number of images that a text counts as, positive. "auto": see `choice`.
        rho: Shrinkage of the covariance towards a multiple of the identity, positive, in images per dimension. "auto":
            see `choice`.
        omega: Weight of CLIP's own offset in the offset of a text, 0 to 1. "auto": see `choice`; 0 if kappa and rho
            are both fixed.
        features: Number M of random features in addition to z. They help if classes have many images and cannot be
            separated by planes; left-out images decide whether they are used. They are not used if M is 0, if kappa
            and rho are both fixed, or after `move`; the scores are then affine in z.
        exact_forgetting: Keep each class's part of W, so that `forget_class` removes all of the class except what it
            added to the tables. This takes 8 min(n_c, d) d bytes per class: 2 MiB for d = 512 and 512 images or more.
        text_dim: Width of the texts, if they are compared with z = W u / |W u| of features u; 0 if with the features.

    Attributes:
        projection: W, (text_dim, embed_dim), if `text_dim` is not 0. Set it before the first class is learned.
        text_embeds: e_c, (C, `text_dim` or `embed_dim`), unit vectors, or zeros without a text.
        sums, counts, scatter, freedom, factors, factor_rows: Of x, see `ClassSums`; d is `embed_dim` + `text_dim` + M.
        losses: (1 or 2, kappas, rhos, temperatures, wrong), float64: summed log-losses of left-out images, for shares
            of wrong labels. The second table is computed with the random features.
        judged: (2,), float64: the sum of the weights of the left-out images, and the sum of their squares.
        by_text: (C, omegas, scales, wrong), float64: summed log-losses of each class by the text classifier alone.
        shown: (C,), int64: how many images, or groups, of each class these are.

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
    text_dim: TextDim = 0

    name = "bayes"
    summary = "discriminant analysis and the text classifier, added up; names count less the more images there are"
    adds_up = ("losses", "judged", "by_text", "shown")

    @property
    def random(self) -> int:
        """Number of random features in x."""
        return self.features if "auto" in (self.kappa, self.rho) else 0

    @property
    def width(self) -> int:
        return self.embed_dim + self.text_dim + self.random

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of random features among which left-out images choose."""
        return (0, self.random) if self.random else (0,)

    @property
    def kappas(self) -> tuple[float, ...]:
        """The values of kappa among which left-out images choose."""
        return KAPPAS if self.kappa == "auto" else (float(self.kappa),)

    @property
    def rhos(self) -> tuple[float, ...]:
        """The values of rho among which left-out images choose."""
        return RHOS if self.rho == "auto" else (float(self.rho),)

    def tensors(self) -> dict[str, Layout]:
        shape = len(self.numbers), len(self.kappas), len(self.rhos), len(TEMPERATURES), len(WRONG)
        tables = {"losses": shape, "judged": (2,)}
        return (
            {"text_embeds": per_class(self.text_dim or self.embed_dim, unit=True, may_be_zero=True)}
            | super().tensors()
            | {name: shared(*sizes, dtype=torch.float64) for name, sizes in tables.items()}
            | {"by_text": per_class(len(OMEGAS), len(SCALES), len(WRONG), dtype=torch.float64)}
            | {"shown": per_class(dtype=torch.int64)}
        )

    def upgraded(self, tensors: dict[str, Tensor], classes: int) -> dict[str, Tensor]:
        """Give older tables, which knew neither wrong labels nor classes, the same loss for every share and class."""
        if "shown" in tensors or not {"losses", "by_text"} <= tensors.keys() or tensors["losses"].ndim != 4:
            return tensors
        losses, by_text, wrong = tensors["losses"], tensors["by_text"], len(WRONG)
        return tensors | {
            "losses": losses[..., None].repeat(1, 1, 1, 1, wrong),
            "by_text": (by_text / max(1, classes))[None, ..., None].repeat(classes, 1, 1, wrong),
            "shown": torch.zeros(classes, dtype=torch.int64, device=losses.device),
        }

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        return super().added(state, images, labels, new) | {
            name: rows for name, rows in state.with_new_rows(len(new)).items() if name in ("by_text", "shown")
        }

    def retold(self, state: State, places: Tensor) -> dict[str, Tensor]:
        """Forget how well the old texts of some classes described their images."""
        return {name: state[name].index_fill(0, places.to(state.device), 0) for name in ("by_text", "shown")}

    def moved(self, state: State, matrix: Tensor) -> dict[str, Tensor]:
        """Return the sums after a linear map of z; the text embeddings stay.

        Random features do not follow a map of z. Their sums become 0, and their loss so large that it is not chosen.
        """
        if self.text_dim:
            raise ValueError(
                "a linear map of unprojected features does not map the projected ones, which bayes compares with "
                "names: set drift to 'auto' or 'none'"
            )
        losses = state.losses.clone()
        losses[1:] = NEVER
        return super().moved(state, F.pad(matrix, (0, self.random, 0, self.random))) | {"losses": losses}

    def judged(
        self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None
    ) -> tuple[State, LeftOut | None]:
        """Add the losses of a task's images to the tables of `choice`; return scores as if each were not learned.

        An image is left out together with its group. The image of a class with a single image, or group, cannot be
        left out. Other classes stand for such classes: the same share of the task's other classes is reduced to one
        image, or group, each, and their remaining images are scored.
        """
        if (classes := state.classes) < 2:
            return state, None
        images, labels = images.to(state.sums), labels.to(state.sums.device)
        order = ranking(images).argsort()
        images, labels = images[order], labels[order]
        groups = None if groups is None else groups.to(labels)[order]
        places, inside = places_among(labels), labels.bincount(minlength=classes)
        order = places.argsort(stable=True)
        rows = order[:MOST_LEFT_OUT]
        whole = (classes / state.counts.to(images) * inside)[labels]
        weights = whole / labels[rows].bincount(minlength=classes).clamp_min(1)[labels]
        # Names are judged on two images of each class, see `misnamed`, which takes little time.
        named = order[: max(MOST_LEFT_OUT, 2 * int((inside > 0).sum()))]
        shown = labels[named].bincount(minlength=classes)
        share = (whole / shown.clamp_min(1)[labels])[named]
        x = self.lifted(state, images)
        losses = self._with_all_names(state, 0).text_losses(x[named], labels[named], share, USUAL_RHO)
        of = None if groups is None else groups[named]
        apart = groups_of_classes(labels[named], of, classes)  # photographs of one item are no independent evidence
        changes = {"by_text": state.by_text + losses, "shown": state.shown + apart.to(state.shown)}
        state = state.replaced(changes)
        lone = torch.isin(labels, self._lone(state, inside, groups_of_classes(labels, groups, classes)))
        first = places == 0
        if groups is not None:  # all images of the group of the first image of each class
            first = first | torch.isin(groups * classes + labels, (groups * classes + labels)[first])
        left = rows[(state.counts.to(labels)[labels] > together(labels, groups))[rows] & ~lone[rows]]
        further = rows[lone[rows] & ~first[rows]]
        judged = torch.cat([left, further])
        if not len(judged):
            return state, None
        truth, own, fits = labels[judged], weights[judged], dict[int, Fit]()
        for features in self.numbers if lone.any() else ():
            fits[features] = self._reduced(state, features, x[lone], labels[lone], first[lone])

        def scored(features: int, kappas: Tensor, rho: float, omega: float) -> Tensor:
            found = []
            if len(left):
                fit = self._fit(state, features)
                if groups is None:
                    found.append(fit.left_out(x[left], labels[left], kappas, rho, omega))
                else:
                    found.append(some_without_groups(fit, x, labels, groups, left, kappas, rho, omega))
            if features in fits:
                found.append(fits[features].scores(x[further], kappas, rho, omega).float())
            return torch.cat(found, dim=1)

        table, kappas, omega = state.losses.clone(), torch.tensor(self.kappas), self._omega(state)
        each, parts = torch.arange(len(truth)).to(truth), None if groups is None else groups[judged]
        wrong = len(WRONG) * (0.0,) if few_items(truth, parts) else WRONG  # few items say nothing about wrong labels
        for number, features in enumerate(self.numbers):
            for place, rho in enumerate(self.rhos):
                scores = scored(features, kappas, rho, omega)
                right = scores[:, each, truth]
                for column, temperature in enumerate(TEMPERATURES):
                    told = right / temperature - (scores / temperature).logsumexp(dim=2)
                    table[number, :, place, column] -= own @ log_likelihoods(told, classes, wrong).to(own)
        squares = own @ own if parts is None else own.sum() ** 2 / max(1, worth(own, parts))
        further_losses = torch.stack([own.sum(), squares])
        state = state.replaced({"losses": table, "judged": state.judged + further_losses})
        kappa, rho, features, omega = self.choice(state)
        scores = scored(features, torch.tensor([kappa]), rho, omega)[0] / self.unit_score(state)
        return state, LeftOut(scores, truth, parts)

    def _lone(self, state: State, inside: Tensor, groups: Tensor) -> Tensor:
        """Choose the classes that stand for classes with a single image, or group; return their numbers.

        `inside` and `groups`, (C,), count each class's images and groups in the task. Only classes with all their
        images in the task are chosen. They are spread evenly, and their share equals the share of the classes with a
        single image or group among all classes.
        """
        counts = state.counts.to(inside.device)
        single = (counts == 1) | ((inside == counts) & (groups == 1))
        whole = ((inside == counts) & ~single).nonzero()[:, 0]
        number = len(whole) * int(single.sum()) // len(counts)
        return whole[torch.arange(number).to(whole) * len(whole) // max(1, number)]

    def _reduced(self, state: State, features: int, images: Tensor, labels: Tensor, kept: Tensor) -> Fit:
        """Return the fit with some classes reduced to one image, or group, each.

        `images` are all x, (n, d), of these classes, and `kept`, (n,), selects the images that remain.
        """
        width, chosen = self.embed_dim + self.text_dim + features, labels.unique()
        images, counts = images[:, :width], state.counts.to(labels.device).clone()
        means = state.sums[:, :width] / counts.to(images)[:, None]
        away = images - means[labels]
        images, labels, total = images[kept], labels[kept], len(labels)
        counts[chosen] = labels.bincount(minlength=len(counts))[chosen].to(counts)
        sums = torch.zeros_like(means).index_add(0, labels, images)
        means[chosen] = sums[chosen] / counts[chosen, None]
        rest = images - means[labels]
        freedom = int(state.freedom) - total + len(labels)
        scatter = state.scatter[:width, :width] - away.T @ away + rest.T @ rest
        return self._fitted(state, means, counts, scatter, freedom).without_texts(self.misnamed(state))

    def left_out(self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor:
        """Return the scores of `Fit.left_out`, in float32."""
        kappa, rho, features, omega = self.choice(state)
        rows, labels = self.lifted(state, images.to(state.sums)), labels.to(state.sums.device)
        of = None if groups is None else rows_by_group(groups.to(labels))
        scores = self._fit(state, features).left_out(rows, labels, torch.tensor([kappa]), rho, omega, of)[0]
        return scores / self.unit_score(state)

    def choice(self, state: State) -> tuple[float, float, int, float]:
        """Choose kappa, rho, the number of random features (0 or M) and omega that make the labels most likely.

        omega minimises the log-loss of the text classifier alone, at the best of `SCALES`. Only its a, b and S
        depend on the images, so none is left out. The others minimise

            n L(kappa, rho, T, w) + log(kappa / usual)^2 / 2 + log(rho / 0.3)^2 / 2 + log(T / usual)^2 / 2 + v(w)

        where L is the mean log-loss of left-out images at the temperature T if a share w of the labels is wrong, and n
        is their effective number: a pseudo-likelihood with log-normal priors, whose standard deviation is a factor of
        e, and with the penalty v of `calibration.penalties`. T is also the temperature
        of `probabilities`. Up to 256 images of each task or update are scored against all classes seen so far. A loss
        has the weight C / n_c, so all classes have the same weight, and later tasks weigh more than earlier ones. The
        usual kappa follows from how well the texts alone predict the labels, and the usual T from the temperatures of
        images, `_image_temperature`, and of texts.

        With few images, the choice stays near the usual kappa and rho. If no image was left out, no random features
        are used. If no class has two images, the covariance is the same for every rho. The result of
        "auto" depends on the order of the classes: each image is scored against the classes that were seen by then,
        and the order decides which classes stand for those with a single image.

        Reference:
            Besag, "Statistical Analysis of Non-Lattice Data", 1975: the pseudo-likelihood; Geisser and Eddy, 1979.
        """
        choice: tuple[float, float, int, float] = state.derived("choice", lambda: self._choose(state))
        return choice

    def settled(self, state: State) -> dict[str, object]:
        return {"choice": self.choice(state), "temperature": self._temperature(state)}

    def _choose(self, state: State) -> tuple[float, float, int, float]:
        usual, omega = self._usual_kappa(state), self._omega(state)
        if not float(state.judged[0]):
            kappa, rho = (
                (usual if self.kappa == "auto" else self.kappa),
                (USUAL_RHO if self.rho == "auto" else self.rho),
            )
            return float(kappa), float(rho), 0, omega
        losses = state.derived("by temperature", lambda: self._by_temperature(state)).amin(dim=(3, 4))
        kappas, rhos = (torch.tensor(grid).to(losses) for grid in (self.kappas, self.rhos))
        away = (kappas / usual).log()[:, None] ** 2 + (rhos / USUAL_RHO).log() ** 2
        table, number, place = torch.unravel_index((losses + away / 2).argmin(), losses.shape)
        return self.kappas[number], self.rhos[place], self.numbers[table], omega

    def _by_temperature(self, state: State) -> Tensor:
        """Return n L + log(T / usual)^2 / 2, plus the penalty of w, for each entry of `losses`."""
        total, squares = state.judged.tolist()
        each = [[self._usual_temperatures(state, number, rho) for rho in self.rhos] for number in self.numbers]
        usual = torch.tensor(each).to(state.losses).transpose(1, 2)[..., None]
        away = (torch.tensor(TEMPERATURES).to(usual) / usual).log()[..., None]
        return total / squares * state.losses + away**2 / 2 + penalties(WRONG, total**2 / squares).to(usual)

    def _omega(self, state: State) -> float:
        if self.omega != "auto":
            return float(self.omega)
        if "auto" not in (self.kappa, self.rho):
            return 0.0
        return OMEGAS[int(self._text_losses(state).amin(dim=(1, 2)).argmin())]

    def _usual_kappa(self, state: State) -> float:
        """Return the number of images, at least 1, that a text counts as before any image is left out.

        With it, the texts have `TEXT_WEIGHT` times the explained share of the log-loss, `_told`, as their weight
        relative to one image per class, if the scores of images and of texts are divided by their temperatures.
        """
        slope = self._fit(state, 0).slope(USUAL_RHO)
        weight = TEXT_WEIGHT * self._told(state) * IMAGE_TEMPERATURE
        return max(1.0, weight * self._text_scale(state) / slope) if slope and weight else 1.0

    def _text_scale(self, state: State) -> float:
        """Return the scale of `SCALES` that makes the labels most likely by text, with a log-normal prior around 1."""
        scales = torch.tensor(SCALES[1:]).to(state.by_text)
        losses = self._text_losses(state).amin(dim=(0, 2))[1:] + scales.log() ** 2 / 2
        return SCALES[1 + int(losses.argmin())]

    def _text_losses(self, state: State) -> Tensor:
        """Return `by_text` in nats for the effective number of images, plus the penalties of wrong labels."""
        nats, table = self._nats(state), state.by_text[~self.misnamed(state)].sum(dim=0)
        worst = float(table[0, 0, 0]) or 1.0
        number = nats / math.log(max(2, state.classes))
        return table / worst * nats + penalties(WRONG, number).to(state.by_text)

    def misnamed(self, state: State) -> Tensor:
        """Return which names do not describe their images and are left out, (C,) in bool.

        By the texts alone, the images of such a class are less likely, by a factor of 4 or more, than if all classes
        were equally likely, although a fifth of the labels may be wrong. omega and the scale are those that suit the
        other classes best. If all names together say nearly nothing, no name is an exception. With fixed kappa and
        rho, no name is left out, so that the solution does not depend on the order of the classes.
        """

        def find() -> Tensor:
            table, given = state.by_text[..., ROBUST], state.text_embeds.to(state.by_text).any(dim=1)
            uniform, found = table[:, 0, 0], torch.zeros(len(table), dtype=torch.bool, device=table.device)
            for _ in range(2):  # the second time without the names that were found
                losses = table[~found].sum(dim=0)
                if not len(table) or float(losses.min()) > (1 - LEAST_TOLD) * float(losses[0, 0]):
                    return torch.zeros_like(found)
                omega, scale = torch.unravel_index(losses.argmin(), losses.shape)
                beyond = (table[:, omega, scale] / uniform.clamp_min(1e-300) - 1) * state.shown.to(table)
                found = (beyond * math.log(max(2, state.classes)) > BEYOND) & given & (uniform > 0)
            return found

        if "auto" not in (self.kappa, self.rho):
            return torch.zeros(state.classes, dtype=torch.bool, device=state.by_text.device)
        found: Tensor = state.derived("misnamed", find, of=("by_text", "shown", "text_embeds"))
        return found

    def _told(self, state: State) -> float:
        """Return the share of the labels' log-loss that texts alone explain, corrected for two fitted numbers.

        The scale and omega are fitted to the same labels, so two nats are subtracted, by Akaike's criterion. Nothing
        explains which labels are wrong, nor what they are instead. The entropy of this is left out of the whole.
        """
        if not float(state.by_text[:, 0, 0, 0].sum()):
            return 0.0
        nats, losses, classes = self._nats(state), self._text_losses(state), max(2, state.classes)
        wrong = WRONG[int(losses.amin(dim=(0, 1)).argmin())]
        noise = -(1 - wrong) * math.log1p(-wrong) - (wrong * math.log(wrong / (classes - 1)) if wrong else 0.0)
        return max(0.0, (nats - float(losses.min()) - 2) / (nats * max(0.1, 1 - noise / math.log(classes))))

    def _nats(self, state: State) -> float:
        """Return the log-loss of the labels under a uniform prediction, for the effective number of images."""
        classes = state.classes
        return classes**2 / float((1 / state.counts).sum()) * math.log(max(2, classes))

    def calibrated(self, state: State) -> bool:
        """Return whether the texts explain some of the labels, which also determines the temperature."""
        return self._told(state) > 0

    def temperature(self, state: State, tasks: Sequence[TaskTemperature]) -> float:
        """Return T of the probabilities, whatever the records say: the tables contain the images of all tasks."""
        return float(self.solved(state)["temperature"]) if state.classes else 1.0

    def unit_score(self, state: State) -> float:
        """Return the divisor of the scores: their temperature, or 1 for fixed settings.

        Scores with fixed settings do not depend on the order of tasks, and their temperature does.
        """
        return self._temperature(state) if "auto" in (self.kappa, self.rho) else 1.0

    def _temperature(self, state: State) -> float:
        return float(state.derived("temperature", lambda: self._measure(state)))

    def _measure(self, state: State) -> float:
        """Return the T of `choice`, between the values of `TEMPERATURES` by a parabola through the nearest three."""
        kappa, rho, features, _ = self.choice(state)
        if not float(state.judged[0]):
            return self._usual_temperatures(state, features, rho, [kappa])[0]
        place = self.numbers.index(features), self.kappas.index(kappa), self.rhos.index(rho)
        found = state.derived("by temperature", lambda: self._by_temperature(state))[place]
        losses = found[:, int(found.amin(dim=0).argmin())].tolist()  # with the best share of wrong labels
        best, steps = min(range(len(losses)), key=losses.__getitem__), 0.0
        if 0 < best < len(losses) - 1:
            before, here, after = losses[best - 1 : best + 2]
            steps = (before - after) / (before - 2 * here + after) / 2
        return float(TEMPERATURES[best] * (TEMPERATURES[1] / TEMPERATURES[0]) ** steps)

    def _image_temperature(self, state: State, features: int) -> float:
        """Return the usual T of the scores by the images alone.

        If no class has two images, it follows `Fit.spread`: T^2 is the mean of `LONE_SPREAD`^2 spread^2 / d over the
        C (C - 3) / 2 pairs of classes that can differ, and of `PAIRS` pairs with `IMAGE_TEMPERATURE`^2.
        """
        fit, pairs = self._fit(state, features), max(0, state.classes * (state.classes - 3) // 2)
        if not fit.lone:
            return IMAGE_TEMPERATURE
        squares = LONE_SPREAD**2 * fit.spread(USUAL_RHO) / len(fit.values)
        return math.sqrt((squares + PAIRS * IMAGE_TEMPERATURE**2) / (pairs + PAIRS))

    def _usual_temperatures(
        self, state: State, features: int, rho: float, kappas: Sequence[float] = ()
    ) -> list[float]:
        """Return T for each kappa, by default each of the table, if no image can be left out.

        The errors of the images' and of the texts' scores add up like random errors with `Fit.correlation`.
        """
        fit, by_texts, common, found = self._fit(state, features), 0.0, 0.0, []
        own = self._image_temperature(state, features)
        if float(state.by_text[:, 0, 0, 0].sum()):
            by_texts = fit.slope(rho) / state.derived("text scale", lambda: self._text_scale(state))
            common = state.derived(
                "correlation", lambda: self._fit(state, 0).correlation(USUAL_RHO, self._omega(state))
            )
        for share in map(fit.share, kappas or self.kappas):
            images, texts = share * own, (1 - share) * by_texts
            found.append(math.sqrt(images**2 + texts**2 + 2 * common * images * texts))
        return found

    def _fit(self, state: State, features: int) -> Fit:
        """Return the fit to the unit features and the first `features` random features, without misnamed texts."""
        return self._with_all_names(state, features).without_texts(self.misnamed(state))

    def _with_all_names(self, state: State, features: int) -> Fit:
        """Return the same fit with all names."""
        width = self.embed_dim + self.text_dim + features

        def make() -> Fit:
            means = state.sums[:, :width] / state.counts.to(state.sums)[:, None]
            return self._fitted(state, means, state.counts, state.scatter[:width, :width], int(state.freedom))

        fit: Fit = state.derived(f"fit {features}", make, of=FITTED)
        return fit

    def _fitted(self, state: State, means: Tensor, counts: Tensor, scatter: Tensor, freedom: int) -> Fit:
        """Return the fit to sums of the first features of x."""
        texts = self.logit_scale * state.text_embeds.to(state.sums)
        if self.text_dim:
            return ProjectedFit.of_both(means, counts, scatter, freedom, texts, self.embed_dim)
        return Fit.of(means, counts, scatter, freedom, F.pad(texts, (0, means.shape[1] - self.embed_dim)))

    def solution(self, state: State) -> tuple[Tensor, Tensor]:
        """Return the weights, (C, d), and the offsets, (C,), of the scores of x; float64."""
        kappa, rho, features, omega = self.choice(state)

        def solve() -> tuple[Tensor, Tensor]:
            weights, offsets = self._fit(state, features).solution(kappa, rho, omega)
            return weights / self.unit_score(state), offsets / self.unit_score(state)

        return state.derived("solution", solve)

    def solved(self, state: State) -> dict[str, Tensor]:
        """Return the solution in float32, and the temperature for the case that no image can be left out."""
        return state.derived("solved", lambda: self._solved(state)) if state.classes else {}

    def _solved(self, state: State) -> dict[str, Tensor]:
        weights, offsets = (part.float().to(state.device) for part in self.solution(state))
        usual = torch.tensor(self._temperature(state) / self.unit_score(state), device=state.device)
        return {"weight": weights, "bias": offsets, "temperature": usual}

    def solved_shapes(self, classes: int) -> list[dict[str, tuple[int, ...]]]:
        widths = {self.embed_dim + self.text_dim + features for features in self.numbers}
        return [{"weight": (classes, width), "bias": (classes,), "temperature": ()} for width in widths]

    def scores(self, state: State, images: Tensor) -> Tensor:
        solved = self.solved(state)
        width = solved["weight"].shape[1]
        x = self.lifted(state, images)[:, :width] if width > self.embed_dim else images
        return x @ solved["weight"].T + solved["bias"]

    def lifted(self, state: State, images: Tensor) -> Tensor:
        """Return x, (n, d), for unit features: they, the projected ones if there are any, and the random features."""
        parts = [images]
        if self.text_dim:
            parts.append(self.projected(state, images))
        if self.random:
            layer = state.derived(f"layer {images.dtype} {images.device}", lambda: self._layer().to(images), of=())
            parts.append((images @ layer).relu())
        return torch.cat(parts, dim=1) if len(parts) > 1 else images

    def _layer(self) -> Tensor:
        """Return R / sqrt(M)."""
        return random_layer(0, self.embed_dim, self.random) / math.sqrt(self.random)

    def formula(self, state: State) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        tensors = {name: self.solved(state)[name] for name in ("weight", "bias")}
        if self.text_dim:
            random = tensors["weight"].shape[1] - self.embed_dim - self.text_dim
            layers = {"names": state.projection, "projection": self._layer()[:, :random].to(tensors["weight"])}
            return projected_random_and_linear, tensors | layers
        if tensors["weight"].shape[1] > self.embed_dim:
            return random_and_linear, tensors | {"projection": self._layer().to(tensors["weight"])}
        return linear, tensors


def random_and_linear(
    z: torch.Tensor, projection: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Return scores, (n, C), of unit features z, (n, d), from z and its random features by a matrix and a bias."""
    return torch.cat([z, (z @ projection).relu()], dim=1) @ weight.T + bias


def projected_random_and_linear(
    z: torch.Tensor, names: torch.Tensor, projection: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Return scores, (n, C), from unit features, (n, d), their projection by `names` and their random features."""
    named = torch.nn.functional.normalize(z @ names.T, dim=1)
    return torch.cat([z, named, (z @ projection).relu()], dim=1) @ weight.T + bias


def some_without_groups(
    fit: Fit,
    x: Tensor,
    labels: Tensor,
    groups: Tensor,
    rows: Tensor,
    kappas: Tensor,
    rho: float,
    omega: float,
) -> Tensor:
    """Return the scores of `Fit.left_out` of some rows of learned x, (n, d), without their groups.

    A class that lies in one group alone keeps its images.
    """
    of = torch.isin(groups, groups[rows]) & (fit.counts[labels] > together(labels, groups))
    found = fit.left_out(x[of], labels[of], kappas, rho, omega, rows_by_group(groups[of]))
    return found[:, of.cumsum(dim=0)[rows] - 1]


class BayesClassifier(Classifier, rule=BayesRule):
    rule: BayesRule

    @property
    def choice(self) -> tuple[float, float, int, float]:
        """kappa, rho, the number of random features and omega; see `BayesRule.choice`."""
        return self.rule.choice(self.state)

    @property
    def misnamed(self) -> list[str]:
        """The classes whose name does not describe their images, so that it is not used; see `BayesRule.misnamed`."""
        places = self.rule.misnamed(self.state).nonzero()[:, 0].tolist()
        return [self._class_names[place] for place in places]

    def solution(self) -> tuple[Tensor, Tensor]:
        """Return the weights, (C, d), and the offsets, (C,), of the scores of x; float64."""
        return self.rule.solution(self.state)
