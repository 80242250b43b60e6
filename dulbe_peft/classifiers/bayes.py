"""`bayes`: discriminant analysis combined with the text classifier, with weights chosen from left-out images.

`text_prior` derives the model. This module keeps the sums and chooses kappa, rho, omega and the features.

x is z alone, or [z, relu(z R) / sqrt(M)] with M random features, where R is the layer of `ranpac`. The text embeddings
are zero in the random features. With features u before a projection, x is [u, z, relu(u R) / sqrt(M)]: the images are
compared by u and the random features, and the names by z, the projected u.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.calibration import log_likelihoods, penalties, worth
from dulbe_peft.classifiers.checks import SAME_TEXT
from dulbe_peft.classifiers.class_sums import ClassSums
from dulbe_peft.classifiers.groups import few_items, groups_of_classes, places_among, ranking, rows_by_group, together
from dulbe_peft.classifiers.keeping import takes
from dulbe_peft.classifiers.leaving import MOST_JUDGED, Left, in_turn
from dulbe_peft.classifiers.ranpac import MOST_FEATURES, RandomLayer, random_layer
from dulbe_peft.classifiers.rule import TextDim, linear, projected
from dulbe_peft.classifiers.state import Fitted, Layout, State, computing, once, per_class, shared
from dulbe_peft.classifiers.text_prior import Fit, ProjectedFit
from dulbe_peft.utils.settings import Positive

# Left-out images choose among these values. No single kappa and rho suits both few and many images.
KAPPAS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
RHOS = (0.01, 0.03, 0.1, 0.3, 1.0)
TEMPERATURES = tuple(2.0 ** (half / 2) for half in range(12, -1, -1))  # of the scores of left-out images
OMEGAS = (0.0, 0.25, 0.5, 0.75, 1.0)
SCALES = (0.0, *(2.0 ** (half / 2) for half in range(-8, 8)))  # of the scores by texts alone; 0: no class is likelier
WRONG = tuple(0.9 * (step / 10) ** 2 for step in range(11))  # shares of wrong labels
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


@dataclass(frozen=True)
class BayesRule(ClassSums):
    """Add the scores of linear discriminant analysis and of the text classifier, with weights chosen from the images.

    The sums are exact and in float64. For a fixed kappa and rho, the solution is therefore the same as with all data
    at once, in any order of images, classes, tasks and merged parts. Some or all classes may have no text.

    Args:
        kappa: Number of images that a text counts as, positive. "auto": see `Choice`.
        rho: Shrinkage of the covariance towards a multiple of the identity, positive, in images per dimension. "auto":
            see `Choice`.
        omega: Weight of CLIP's own offset in the offset of a text, 0 to 1. "auto": see `Choice`; 0 if kappa and rho
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
        set_aside: (C, as `text_embeds`): the text with which `by_text` and `shown` were measured, if the class has
            another text now. They do not count then. Zeros for the other classes.

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

    @property
    def chooses(self) -> bool:
        """Whether left-out images choose kappa, rho or both."""
        return "auto" in (self.kappa, self.rho)

    @property
    def random(self) -> int:
        """Number of random features in x."""
        return self.features if self.chooses else 0

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
        sizes = len(self.numbers), len(self.kappas), len(self.rhos), len(TEMPERATURES), len(WRONG)
        return {
            "text_embeds": per_class(self.text_dim or self.embed_dim, unit=True, may_be_zero=True),
            **super().tensors(),
            "losses": shared(*sizes, dtype=torch.float64, adds=True),
            "judged": shared(2, dtype=torch.float64, adds=True),
            "by_text": per_class(len(OMEGAS), len(SCALES), len(WRONG), dtype=torch.float64, adds=True),
            "shown": per_class(dtype=torch.int64, adds=True),
            "set_aside": per_class(self.text_dim or self.embed_dim),
        }

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        rows, counted_by_class = state.with_new_rows(len(new)), ("by_text", "shown", "set_aside")
        return super().added(state, images, labels, new) | {name: rows[name] for name in counted_by_class}

    def retold(self, state: State, texts: Tensor) -> dict[str, Tensor]:
        """Set aside how well the old texts described their images. It counts again if they come back."""
        was, now = state.set_aside.where(aside(state)[:, None], state.text_embeds), texts.to(state.set_aside)
        other = ((was - now).abs() > SAME_TEXT).any(dim=1)
        nameless = state.replaced({"set_aside": torch.ones_like(was) * (other & ~was.any(dim=1))[:, None]})
        return counted(nameless) | {"set_aside": was * other[:, None]}

    def merged(self, state: State, other: State, places: Tensor) -> dict[str, Tensor]:
        changes = super().merged(state.replaced(counted(state)), other.replaced(counted(other)), places)
        return changes | {"set_aside": state.set_aside.new_zeros(len(changes["counts"]), state.set_aside.shape[1])}

    def moved(self, state: State, matrix: Tensor, lifted: bool = False) -> dict[str, Tensor]:
        """Return the sums after a linear map of z, or of x; the text embeddings stay.

        Random features do not follow a map of z. Their sums become 0, and their loss so large that it is not chosen.
        """
        if lifted:
            return super().moved(state, matrix, lifted)
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
    ) -> tuple[State, Left | None]:
        """Add the losses of a task's images to the tables of `Choice`; return scores as if each were not learned.

        An image is left out together with its group. The image of a class with a single image, or group, cannot be
        left out. The `lone_classes` stand for such classes: each of them is reduced to one image, or group, and its
        remaining images are scored.
        """
        if state.classes < 2:
            return state, None
        images, labels = images.to(state.sums), labels.to(state.sums.device)
        order = ranking(images).argsort()
        groups = None if groups is None else groups.to(labels)[order]
        task = Task(self.lifted(state, images[order]), labels[order], groups)
        state = state.replaced(task.named(Fits.of(self, state).plain, state))
        left = task.left(state, choice := self.fitted(state))
        if not len(left.labels):
            return state, None
        wrong = len(WRONG) * (0.0,) if few_items(labels, groups) else WRONG  # few items say nothing about w
        table, kappas = state.losses.clone(), torch.tensor(self.kappas)
        rows, own = torch.arange(len(left.labels)).to(left.labels), left.weights
        for number, features in enumerate(self.numbers):
            for place, rho in enumerate(self.rhos):
                scores = left.scores(choice, features, kappas, rho, choice.omega)
                right = scores[:, rows, left.labels]
                told = torch.stack([right / each - (scores / each).logsumexp(dim=2) for each in TEMPERATURES])
                for column, likely in enumerate(log_likelihoods(told, state.classes, wrong).to(own)):
                    table[number, :, place, column] -= own @ likely
        squares = own @ own if groups is None else own.sum() ** 2 / max(1, worth(own, left.groups))
        state = state.replaced({"losses": table, "judged": state.judged + torch.stack([own.sum(), squares])})
        kappa, rho, features, omega = (now := self.fitted(state)).mode
        scores = left.scores(choice, features, torch.tensor([kappa]), rho, omega)[0] / now.unit
        return state, Left(order[left.rows], left.labels, left.groups, scores)

    def left_out(self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor:
        """Return the scores of `Fit.left_out`, in float32."""
        choice, labels = self.fitted(state), labels.to(state.sums.device)
        kappa, rho, features, omega = choice.mode
        x = self.lifted(state, images.to(state.sums))
        of = None if groups is None else rows_by_group(groups.to(labels))
        return choice.fit(features).left_out(x, labels, torch.tensor([kappa]), rho, omega, of)[0] / choice.unit

    def fitted(self, state: State) -> Choice:
        return Choice.of(self, state)

    def scores(self, state: State, images: Tensor) -> Tensor:
        solved = self.fitted(state).solved
        width = solved["weight"].shape[1]
        x = self.lifted(state, images)[:, :width] if width > self.embed_dim else images
        return x @ solved["weight"].T + solved["bias"]

    def lifted(self, state: State, images: Tensor) -> Tensor:
        """Return x, (n, d), for unit features: they, the projected ones if there are any, and the random features."""
        parts = [images]
        if self.text_dim:
            parts.append(projected(state, images))
        if self.random:
            parts.append((images @ RandomLayer.of(self, state).at(images)).relu())
        return torch.cat(parts, dim=1) if len(parts) > 1 else images

    def layer(self) -> Tensor:
        """Return R / sqrt(M), (embed_dim, M), float64."""
        return random_layer(0, self.embed_dim, self.random) / math.sqrt(self.random)

    def formula(self, state: State) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        tensors = {name: self.fitted(state).solved[name] for name in ("weight", "bias")}
        if self.text_dim:
            random = tensors["weight"].shape[1] - self.embed_dim - self.text_dim
            layers = {"names": state.projection, "projection": self.layer()[:, :random].to(tensors["weight"])}
            return projected_random_and_linear, tensors | layers
        if tensors["weight"].shape[1] > self.embed_dim:
            return random_and_linear, tensors | {"projection": self.layer().to(tensors["weight"])}
        return linear, tensors


class Fits(Fitted):
    """The model of `text_prior` fitted to the sums, with and without random features; the tables do not matter."""

    rule: BayesRule
    reads = ("text_embeds", "sums", "counts", "scatter", "freedom")

    @once
    def plain(self) -> Fit:
        """The fit to x without random features."""
        return self._fit(0)

    @once
    def random(self) -> Fit:
        """The fit to all of x."""
        return self._fit(self.rule.random)

    def _fit(self, features: int) -> Fit:
        state, width = self.state, self.rule.embed_dim + self.rule.text_dim + features
        return self.to(self._means(width), state.counts, state.scatter[:width, :width], int(state.freedom))

    def _means(self, width: int) -> Tensor:
        return self.state.sums[:, :width] / self.state.counts.to(self.state.sums)[:, None]

    def to(self, means: Tensor, counts: Tensor, scatter: Tensor, freedom: int) -> Fit:
        """Return the fit to other sums of the first features of x, with the same texts."""
        texts = self.rule.logit_scale * self.state.text_embeds.to(means)
        if self.rule.text_dim:
            return ProjectedFit.of_both(means, counts, scatter, freedom, texts, self.rule.embed_dim)
        return Fit.of(means, counts, scatter, freedom, F.pad(texts, (0, means.shape[1] - self.rule.embed_dim)))

    def beside(self, state: State) -> Fits:
        """Return the fits to a state with the same W, f and texts but other means: the eigenvectors stay."""
        same = {name: fit for name, fit in vars(self).items() if type(fit) is Fit and not fit.lone}
        found = self.after(state)
        with computing():
            return found.keep(**{name: found._moved(fit) for name, fit in same.items()})

    def _moved(self, fit: Fit) -> Fit:
        """Return what `Fit.of` would return, from a fit with the same W, f and texts."""
        means = self._means(width := len(fit.centre))
        centre, counts = means.mean(dim=0), self.state.counts.to(means)
        means = means - centre
        total = float(self.state.scatter[:width, :width].trace() + counts @ means.square().sum(dim=1))
        return replace(fit, total=total, centre=centre, means=means @ fit.vectors, counts=counts)


class Choice(Fitted):
    """kappa, rho, the number of random features (0 or M), omega and T that make the labels most likely.

    omega minimises the log-loss of the text classifier alone, at the best of `SCALES`. Only its a, b and S depend on
    the images, so none is left out. The others minimise, over the grid of `KAPPAS`, `RHOS` and `TEMPERATURES`,

        n L(kappa, rho, T, w) + log(kappa / usual)^2 / 2 + log(rho / 0.3)^2 / 2 + log(T / usual)^2 / 2 + v(w)

        L: mean of -log((1 - w) p + w (1 - p) / (C - 1)), with p = softmax(score / T) of the label of a left-out image
        v: -log(1 - w), and log(n) / 2 more if w > 0, over the grid of `WRONG`
        n: (sum of weights)^2 / sum of squared weights, the effective number of these images, or of their groups

    This is a pseudo-likelihood, if a share w of the labels is wrong, with log-normal priors, whose standard deviation
    is a factor of e. T is also the temperature of `probabilities`. Up to 256 images of each task or update are scored
    against all classes seen so far; `BayesRule.judged` adds their losses to the tables. A loss has the weight C / n_c
    times the number of images of the class in the task for each one that was chosen, so all classes have the same
    weight, and later tasks weigh more than earlier ones. The usual kappa follows from how well the texts alone predict
    the labels, and the usual T from the temperatures of images and of texts.

    The properties below are in the order of the choice. The settings are values of the grid; T is then refined:

        misnamed, omega, scale, told      by the texts alone, whatever kappa, rho and T are
        usual_kappa, usual_temperatures   follow from these and the sums
        penalised                         the whole expression, for every setting, T and w
        mode                              the settings for which it is smallest at the best T and w
        best_temperature                  for these settings, the T for which it is smallest, between those of the grid
        unit, temperature                 what divides the scores, and what `probabilities` divides them by afterwards

    With few images, the choice stays near the usual kappa and rho. If no image was left out, no random features are
    used, and kappa, rho and T are the usual ones. If no class has two images, the covariance is the same for every
    rho. The result of "auto" depends on the order of the classes: each image is scored against the classes that were
    seen by then, and the order decides which classes stand for those with a single image.

    Reference:
        Besag, "Statistical Analysis of Non-Lattice Data", 1975: the pseudo-likelihood; Geisser and Eddy, 1979.
    """

    rule: BayesRule

    def __init__(self, rule: BayesRule, state: State) -> None:
        super().__init__(rule, state)
        self.fits, self.classes = Fits.of(rule, state), max(2, state.classes)

    def fit(self, features: int) -> Fit:
        """Return the model without the texts of misnamed classes, for x with a number of random features."""
        return (self.fits.random if features else self.fits.plain).without_texts(self.misnamed)

    @once
    def chance(self) -> float:
        """The log-loss, in nats, of the effective number of labels if all classes are equally likely."""
        return self.state.classes**2 / float((1 / self.state.counts).sum()) * math.log(self.classes)

    @once
    def misnamed(self) -> Tensor:
        """Which names do not describe their images and are left out, (C,) in bool.

        By the texts alone, the images of such a class are less likely, by a factor of 4 or more, than if all classes
        were equally likely, although a fifth of the labels may be wrong. omega and the scale are those that suit the
        other classes best. If all names together say nearly nothing, no name is an exception. With fixed kappa and
        rho, no name is left out, so that the solution does not depend on the order of the classes.
        """
        state, (tables, shown) = self.state, counted(self.state).values()
        table = tables[..., ROBUST]
        given, uniform = state.text_embeds.to(table).any(dim=1), table[:, 0, 0]
        found = nothing = torch.zeros(len(table), dtype=torch.bool, device=table.device)
        for _ in range(2 if self.rule.chooses else 0):  # the second time without the names that were found
            losses = table[~found].sum(dim=0)
            if not len(table) or float(losses.min()) > (1 - LEAST_TOLD) * float(losses[0, 0]):
                return nothing
            # torch.unravel_index would import sympy, which takes most of a second.
            omega, scale = np.unravel_index(int(losses.argmin()), losses.shape)
            beyond = (table[:, omega, scale] / uniform.clamp_min(1e-300) - 1) * shown.to(table)
            found = (beyond * math.log(self.classes) > BEYOND) & given & (uniform > 0)
        return found

    @once
    def exchanged(self) -> list[tuple[int, int]]:
        """Pairs of misnamed classes: of all class means, that of each has the largest cosine with the other's text."""
        fit = self.fits.plain.named
        best = (fit.texts @ F.normalize(fit.means, dim=1).T).argmax(dim=1)
        back = best[best] == torch.arange(len(best)).to(best)
        of = self.misnamed & self.misnamed[best] & back
        return [(one, int(best[one])) for one in of.nonzero()[:, 0].tolist() if one < int(best[one])]

    @once
    def by_text(self) -> Tensor:
        """Log-loss of the labels by the texts alone, in nats, plus the penalty of w, (omegas, scales, wrong)."""
        table = counted(self.state)["by_text"][~self.misnamed].sum(dim=0)
        penalty = penalties(WRONG, self.chance / math.log(self.classes)).to(table)
        return table / (float(table[0, 0, 0]) or 1.0) * self.chance + penalty

    @once
    def omega(self) -> float:
        """omega, which is 0 if kappa and rho are fixed."""
        if self.rule.omega != "auto":
            return float(self.rule.omega)
        return OMEGAS[int(self.by_text.amin(dim=(1, 2)).argmin())] if self.rule.chooses else 0.0

    @once
    def scale(self) -> float:
        """The scale of `SCALES` that makes the labels most likely by text, with a log-normal prior around 1."""
        scales = torch.tensor(SCALES[1:]).to(self.by_text)
        return SCALES[1 + int((self.by_text.amin(dim=(0, 2))[1:] + scales.log() ** 2 / 2).argmin())]

    @once
    def named(self) -> bool:
        """Whether the names of any images were judged."""
        return bool(float(counted(self.state)["by_text"][:, 0, 0, 0].sum()))

    @once
    def told(self) -> float:
        """The share of the labels' log-loss that texts alone explain, (chance - least - 2) / whole, and at least 0.

        The scale and omega are fitted to the same labels, so two nats are subtracted, by Akaike's criterion. Nothing
        explains which labels are wrong, nor what they are instead. The entropy of this is left out of the whole.
        """
        if not self.named:
            return 0.0
        wrong = WRONG[int(self.by_text.amin(dim=(0, 1)).argmin())]
        noise = -(1 - wrong) * math.log1p(-wrong) - (wrong * math.log(wrong / (self.classes - 1)) if wrong else 0.0)
        whole = self.chance * max(0.1, 1 - noise / math.log(self.classes))
        return max(0.0, (self.chance - float(self.by_text.min()) - 2) / whole)

    @once
    def usual_kappa(self) -> float:
        """The number of images that a text counts as before any image is left out.

            max(1, TEXT_WEIGHT told IMAGE_TEMPERATURE / J)                          J: see `usual_temperatures`

        With it, the texts have `TEXT_WEIGHT` times the explained share of the log-loss, `told`, as their weight
        relative to one image per class, if the scores of images and of texts are divided by their temperatures.
        """
        slope, weight = self.fit(0).slope(USUAL_RHO), TEXT_WEIGHT * self.told * IMAGE_TEMPERATURE
        return max(1.0, weight * self.scale / slope) if slope and weight else 1.0

    def usual_temperatures(self, features: int, rho: float, kappas: Sequence[float]) -> list[float]:
        """Return the usual T, which is T if no image can be left out, for each kappa.

            T^2 = (s I)^2 + ((1 - s) J)^2 + 2 r s I (1 - s) J          s = h / (h + kappa), the weight of the images

        where h is the harmonic mean of the n_c. The errors of the images' scores, I, and of the texts', J = a /
        `scale`, add up like random errors with the correlation r: that of the two scores of the class means for wrong
        classes, from 0 to 1. a is the factor with which the texts describe the class means best, by least squares, and
        J is 0 as long as no name was judged. I is `IMAGE_TEMPERATURE`. If no class has two images, it follows from the
        spread of the images' scores of wrong classes: I^2 is the mean of `LONE_SPREAD`^2 spread^2 / d over the C (C -
        3) / 2 pairs of classes that can differ, and of `PAIRS` pairs with `IMAGE_TEMPERATURE`^2. In `Fit`, `slope` is
        a, `correlation` is r, and `spread` is already the sum of spread^2 over the pairs; d is `len(values)`.
        """
        fit, by_images, by_texts, common, found = self.fit(features), IMAGE_TEMPERATURE, 0.0, 0.0, []
        if fit.lone:
            pairs = max(0, self.state.classes * (self.state.classes - 3) // 2)
            squares = LONE_SPREAD**2 * fit.spread(USUAL_RHO) / len(fit.values)
            by_images = math.sqrt((squares + PAIRS * IMAGE_TEMPERATURE**2) / (pairs + PAIRS))
        if self.named:
            by_texts, common = fit.slope(rho) / self.scale, self.common
        for share in map(fit.share, kappas):
            images, texts = share * by_images, (1 - share) * by_texts
            found.append(math.sqrt(images**2 + texts**2 + 2 * common * images * texts))
        return found

    @once
    def common(self) -> float:
        """The correlation of the errors of images and texts."""
        return self.fit(0).correlation(USUAL_RHO, self.omega)

    @once
    def penalised(self) -> Tensor:
        """n L + log(T / usual)^2 / 2 + v(w), (features, kappas, rhos, temperatures, wrong).

        The tables are sums of weighted losses, so L is a table over the sum of the weights.
        """
        rule, (total, squares) = self.rule, self.state.judged.tolist()
        each = [[self.usual_temperatures(number, rho, rule.kappas) for rho in rule.rhos] for number in rule.numbers]
        usual = torch.tensor(each).to(self.state.losses).transpose(1, 2)[..., None]
        away = (torch.tensor(TEMPERATURES).to(usual) / usual).log()[..., None]
        return total / squares * self.state.losses + away**2 / 2 + penalties(WRONG, total**2 / squares).to(usual)

    @once
    def mode(self) -> tuple[float, float, int, float]:
        """kappa, rho, the number of random features and omega."""
        rule, usual = self.rule, self.usual_kappa
        if not float(self.state.judged[0]):
            kappa, rho = usual if rule.kappa == "auto" else rule.kappa, USUAL_RHO if rule.rho == "auto" else rule.rho
            return float(kappa), float(rho), 0, self.omega
        kappas, rhos = (torch.tensor(grid).to(self.penalised) for grid in (rule.kappas, rule.rhos))
        prior = ((kappas / usual).log()[:, None] ** 2 + (rhos / USUAL_RHO).log() ** 2) / 2
        best = self.penalised.amin(dim=(3, 4)) + prior
        table, number, place = np.unravel_index(int(best.argmin()), best.shape)
        return rule.kappas[number], rule.rhos[place], rule.numbers[table], self.omega

    @once
    def best_temperature(self) -> float:
        """T for which `penalised` is smallest with the settings of `mode` and the best w.

        It is the vertex of a parabola of log T through the smallest value of the grid and its two neighbours. At an
        end of the grid it is that end, and the usual T if no image was left out.
        """
        rule, (kappa, rho, features, _) = self.rule, self.mode
        if not float(self.state.judged[0]):
            return self.usual_temperatures(features, rho, [kappa])[0]
        found = self.penalised[rule.numbers.index(features), rule.kappas.index(kappa), rule.rhos.index(rho)]
        losses = found[:, int(found.amin(dim=0).argmin())].tolist()  # with the best w
        best, steps = min(range(len(losses)), key=losses.__getitem__), 0.0
        if 0 < best < len(losses) - 1:
            before, here, after = losses[best - 1 : best + 2]
            steps = (before - after) / (before - 2 * here + after) / 2
        return float(TEMPERATURES[best] * (TEMPERATURES[1] / TEMPERATURES[0]) ** steps)

    @once
    def unit(self) -> float:
        """The divisor of the scores: T, or 1 for fixed settings.

        Scores with fixed settings do not depend on the order of tasks, and T does.
        """
        return self.best_temperature if self.rule.chooses else 1.0

    @once
    def solution(self) -> tuple[Tensor, Tensor]:
        """The weights, (C, d), and the offsets, (C,), of the scores of x; float64."""
        kappa, rho, features, omega = self.mode
        weights, offsets = self.fit(features).solution(kappa, rho, omega)
        return weights / self.unit, offsets / self.unit

    @once
    def solved(self) -> dict[str, Tensor]:
        """The solution in float32, and T of the probabilities."""
        if not self.state.classes:
            return {}
        weights, offsets = (part.float().to(self.state.device) for part in self.solution)
        temperature = torch.tensor(self.best_temperature / self.unit, device=self.state.device)
        return {"weight": weights, "bias": offsets, "temperature": temperature}

    @once
    def solved_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        rule, classes = self.rule, self.state.classes
        widths = {rule.embed_dim + rule.text_dim + features for features in rule.numbers}
        return [{"weight": (classes, width), "bias": (classes,), "temperature": ()} for width in widths]

    @once
    def temperature(self) -> float:
        """What `probabilities` divides the scores by: T / `unit`, 1 if the scores are already divided by T."""
        return float(self.solved["temperature"]) if self.state.classes else 1.0

    @once
    def calibrated(self) -> bool:
        """Whether the texts explain some of the labels, which also determines the temperature."""
        return self.told > 0

    def after(self, state: State) -> Choice:
        return super().after(state).keep(mode=self.mode, best_temperature=self.best_temperature)

    def beside(self, state: State) -> Choice:
        self.fits.beside(state)
        return self.after(state)


@dataclass(frozen=True, eq=False)
class Task:
    """x, (n, d), of the images that a state has just learned, by `ranking`, their labels and groups, (n,).

    Everything below takes the images round robin over the classes, so that these are represented evenly.
    """

    x: Tensor
    labels: Tensor
    groups: Tensor | None

    def inside(self, state: State) -> Tensor:
        """Return how many images of each class are in the task, (C,)."""
        return self.labels.bincount(minlength=state.classes)

    def weights(self, state: State, rows: Tensor) -> Tensor:
        """Return the weight of each image, (n,), if some rows stand for all: C / n_c for each image of its class."""
        picked = self.labels[rows].bincount(minlength=state.classes).clamp_min(1)
        return (state.classes / state.counts.to(self.x) * self.inside(state))[self.labels] / picked[self.labels]

    def named(self, fit: Fit, state: State) -> dict[str, Tensor]:
        """Return `by_text` and `shown` with the losses of images by the texts alone, at least two of each class."""
        rows = in_turn(self.labels, max(MOST_JUDGED, 2 * int((self.inside(state) > 0).sum())), self.groups)
        grid = OMEGAS, SCALES, WRONG
        losses = fit.text_losses(self.x[rows], self.labels[rows], self.weights(state, rows)[rows], USUAL_RHO, grid)
        of = None if self.groups is None else self.groups[rows]
        apart = groups_of_classes(self.labels[rows], of, state.classes)  # photographs of one item are one observation
        here = (self.inside(state) > 0).to(state.device)
        known, kept = counted(state, here), state.set_aside * ~here[:, None]
        return {
            "by_text": known["by_text"] + losses,
            "shown": known["shown"] + apart.to(state.shown),
            "set_aside": kept,
        }

    def left(self, state: State, choice: Choice) -> Scorer:
        """Leave out up to `MOST_JUDGED` images, each with its group, some of them from classes reduced to one."""
        labels, groups, inside = self.labels, self.groups, self.inside(state)
        rows = in_turn(self.labels, MOST_JUDGED, self.groups)
        lone = torch.isin(labels, lone_classes(state, inside, groups_of_classes(labels, groups, state.classes)))
        first = places_among(labels) == 0
        if groups is not None:  # all images of the group of the first image of each class
            pairs = groups * state.classes + labels
            first = first | torch.isin(pairs, pairs[first])
        left = rows[(state.counts.to(labels)[labels] > together(labels, groups))[rows] & ~lone[rows]]
        further, fits = rows[lone[rows] & ~first[rows]], dict[int, Fit]()
        for features in choice.rule.numbers if lone.any() else ():
            fits[features] = reduced(choice, state, features, self.x[lone], labels[lone], first[lone])
        judged = torch.cat([left, further])
        of, weights = None if groups is None else groups[judged], self.weights(state, rows)[judged]
        return Scorer(self, left, further, fits, labels[judged], of, weights)


def aside(state: State) -> Tensor:
    """Return the classes whose text is not the one with which `by_text` was measured, (C,) in bool."""
    return state.set_aside.any(dim=1)


def counted(state: State, of: Tensor | None = None) -> dict[str, Tensor]:
    """Return `by_text` and `shown` without what was measured with another text, of all classes or of some, (C,)."""
    gone = (aside(state) if of is None else aside(state) & of).nonzero()[:, 0]
    return {name: state[name].index_fill(0, gone.to(state[name].device), 0) for name in ("by_text", "shown")}


def lone_classes(state: State, inside: Tensor, groups: Tensor) -> Tensor:
    """Choose the classes that stand for classes with a single image, or group; return their numbers.

    `inside` and `groups`, (C,), count each class's images and groups in the task. Only classes with all their images
    in the task can be chosen. Of these, the same fraction is chosen, spread evenly and rounded down, as classes with a
    single image or group are of all classes.
    """
    counts = state.counts.to(inside.device)
    single = (counts == 1) | ((inside == counts) & (groups == 1))
    whole = ((inside == counts) & ~single).nonzero()[:, 0]
    number = len(whole) * int(single.sum()) // len(counts)
    return whole[torch.arange(number).to(whole) * len(whole) // max(1, number)]


def reduced(choice: Choice, state: State, features: int, images: Tensor, labels: Tensor, kept: Tensor) -> Fit:
    """Return the fit with some classes reduced to one image, or group, each.

    `images` are all x, (n, d), of these classes, and `kept`, (n,), selects the images that remain.
    """
    width, chosen = choice.rule.embed_dim + choice.rule.text_dim + features, labels.unique()
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
    return choice.fits.to(means, counts, scatter, freedom).without_texts(choice.misnamed)


@dataclass(frozen=True, eq=False)
class Scorer:
    """Images of a task that are left out: first `left`, in closed form, then `further`, by the fits in `fits`.

    `left` and `further` are rows of the task. `labels`, `groups` and `weights` are those of both, (n,).
    """

    task: Task
    left: Tensor
    further: Tensor
    fits: dict[int, Fit]
    labels: Tensor
    groups: Tensor | None
    weights: Tensor

    @property
    def rows(self) -> Tensor:
        """The rows of all left-out images in the task, (n,)."""
        return torch.cat([self.left, self.further])

    def scores(self, choice: Choice, features: int, kappas: Tensor, rho: float, omega: float) -> Tensor:
        """Return the scores, (kappas, n, C), float32, of each image without its group."""
        found = [self._scores_of_left(choice.fit(features), kappas, rho, omega)] if len(self.left) else []
        if features in self.fits:
            found.append(self.fits[features].scores(self.task.x[self.further], kappas, rho, omega).float())
        return torch.cat(found, dim=1)

    def _scores_of_left(self, fit: Fit, kappas: Tensor, rho: float, omega: float) -> Tensor:
        """Return the scores of `left` by `Fit.left_out`. A class that lies in one group alone keeps its images."""
        x, labels, groups = self.task.x, self.task.labels, self.task.groups
        if groups is None:
            return fit.left_out(x[self.left], labels[self.left], kappas, rho, omega)
        of = torch.isin(groups, groups[self.left]) & (fit.counts[labels] > together(labels, groups))
        found = fit.left_out(x[of], labels[of], kappas, rho, omega, rows_by_group(groups[of]))
        return found[:, of.cumsum(dim=0)[self.left] - 1]


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


class BayesClassifier(Classifier, rule=BayesRule):
    """Images and texts together, as much of each as helps; its settings are those of `BayesRule`.

    Example:
        >>> features = torch.eye(8)[[0, 0, 1, 1]] + 0.1 * torch.eye(8)[[4, 5, 6, 7]]  # of four images, (4, 8)
        >>> classifier = BayesClassifier(embed_dim=8)
        >>> classifier.add_classes(["cat", "dog"], features, labels=[0, 0, 1, 1], text_embeds=features[[0, 2]])
        >>> classifier.probabilities(features).argmax(dim=1)
        tensor([0, 0, 1, 1])
    """

    rule: BayesRule
    text_embeds: Tensor
    sums: Tensor
    counts: Tensor

    if TYPE_CHECKING:

        @takes(BayesRule)
        def __init__(self) -> None: ...

    @property
    def choice(self) -> tuple[float, float, int, float]:
        """kappa, rho, the number of random features and omega; see `bayes.Choice`."""
        return self.rule.fitted(self.state).mode

    @property
    def misnamed(self) -> list[str]:
        """The classes whose name does not describe their images, so that it is not used; see `bayes.Choice`."""
        places = self.rule.fitted(self.state).misnamed.nonzero()[:, 0].tolist()
        return [self._class_names[place] for place in places]

    @property
    def exchanged(self) -> list[tuple[str, str]]:
        """Pairs of misnamed classes whose names describe each other's images best, as if folders were exchanged."""
        pairs = self.rule.fitted(self.state).exchanged
        return [(self._class_names[one], self._class_names[other]) for one, other in pairs]

    def solution(self) -> tuple[Tensor, Tensor]:
        """Return the weights, (C, d), and the offsets, (C,), of the scores of x; float64."""
        return self.rule.fitted(self.state).solution
