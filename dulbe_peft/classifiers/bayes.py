"""Discriminant analysis whose prior for the class means is the text classifier: right with few images and with many.

LDA's score of a class is x'P mu_c - mu_c'P mu_c / 2 with P = S^-1, and CLIP's is tau x'e_c. They agree where
mu_c = b + tau S e~_c. So a text says where the mean of its class is, in the metric of the noise:

    x | c ~ N(mu_c, S)              mu_c ~ N(b + a tau S e~_c, S / kappa)
    b = mean over classes of m_c    e~_c = e_c - mean over classes of e     m_c: mean of the n_c images of a class

    mu~_c = (n_c m_c + kappa (b + a tau S e~_c)) / (n_c + kappa)
    score = (x - b)'P (mu~_c - b) - (mu~_c - b)'P (mu~_c - b) / 2 + tr(P S) / (8 (n_c + kappa))

The last term, of S before its ridge, changes nothing where all counts are equal. Else it helps classes with few
images: where their means lie is less sure, so their images lie farther from them.
Many images of a class make it LDA, a large kappa the text classifier, and n_c decides between them class by class.

    a = sum w_c e~_c'(m_c - b) / (tau sum w_c e~_c'S e~_c), or 0       least squares over the classes
    S = (W + 10 R) / (f + 10)                                          W: scatter within the classes, f: its freedom
    R = (1/C) sum w_c r_c r_c'      r_c = m_c - b - a tau S e~_c       what the texts leave of the means
    w_c = 1 / (1/4 + 1/n_c)         since r_c ~ N(0, S (1/kappa + 1/n_c)) with a kappa of about 4

S is then S + rho times the ridge that OAS has, and a is fitted once more with it. kappa and rho are those with which
images that are left out are right, see `BayesClassifier.choice`.

x is z, or with M random features [z, relu(z R) / sqrt(M)] with the layer R of `ranpac`; texts have zeros there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal, Self

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier, linear
from dulbe_peft.classifiers.calibration import places_among, ranking
from dulbe_peft.classifiers.checks import check_directions
from dulbe_peft.classifiers.lda import oas_shrinkage
from dulbe_peft.classifiers.ranpac import MOST_FEATURES, random_layer
from dulbe_peft.utils.settings import Positive

KAPPAS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
RHOS = (0.3, 1.0, 3.0, 10.0, 30.0)
TEMPERATURES = tuple(2.0**power for power in range(0, -4, -1))  # each is half of the one before
NEVER = 1e300  # an error that no number of images makes the least
CHUNK, LEAST_ROWS = 2**21, 16  # scores in memory at a time, but of so many images in any case
MOST_JUDGED = 256  # images of a task that are left out; of more, each class gives as many

# Chosen on held-back training images of handwriting, printed characters and photographs, with 1 to 80 images a class.
TILT = 1 / 8  # of the last term of the score
USUAL_KAPPA, USUAL_IMAGES, ROUNDS = 4.0, 10, 3  # the kappa of w_c, what R counts for in S, rounds of a, R and S
MIDDLE = 10.0  # the rho that counts as the usual one
LEAST_LEFT = 0.05  # of S in the direction of a class that is left out of R
LEAST_EXPLAINED = 0.02  # names that explain less of the means are taken to say nothing
# With one image a class nothing can be left out: rho, and kappa = 0.2 / the share of the means that texts explain.
LONE_RHO, LONE_SHARE, LONE_KAPPAS = 100.0, 0.2, (4.0, 64.0)


@dataclass(frozen=True, eq=False)
class Fit:
    """What the sums say, in float64.

    `noise` S is (d, d), `centre` b (d,). `means` m_c - b is (C, d), `texts` tau e~_c (C, embed_dim), and `metric`
    tau S e~_c (C, d). `counts` n_c and `weights` w_c are (C, 1). An image counts 1 / `images` in S.
    """

    noise: Tensor
    base: float
    centre: Tensor
    means: Tensor
    texts: Tensor
    metric: Tensor
    counts: Tensor
    weights: Tensor
    images: int

    @classmethod
    def of(cls, means: Tensor, counts: Tensor, scatter: Tensor, freedom: int, texts: Tensor) -> Fit:
        """From m_c, n_c (C,), W, f and tau e_c; the columns that texts lack are zeros."""
        width = texts.shape[1]
        centre, counts = means.mean(dim=0), counts.to(means)[:, None]
        means, texts = means - centre, texts - texts.mean(dim=0)
        weights, images = 1 / (1 / USUAL_KAPPA + 1 / counts), freedom + USUAL_IMAGES
        identity = torch.eye(len(scatter)).to(scatter)
        noise = scatter / freedom if freedom else identity
        fit = cls(noise, 0.0, centre, means, texts, texts @ noise[:width], counts, weights, images)
        for number in range(1, ROUNDS + 1):
            left = means - fit.slope(0.0) * fit.metric
            rows = width if number < ROUNDS else len(scatter)  # of S; a needs those of the texts
            noise = (scatter[:rows] + USUAL_IMAGES / len(means) * left[:, :rows].T @ (weights * left)) / images
            fit = replace(fit, noise=noise, metric=texts @ noise[:width])
        if float(noise.trace()) < 1e-20 * len(noise):  # all images are equal
            fit = replace(fit, noise=identity, metric=texts @ identity[:width])
        share = min(oas_shrinkage(fit.noise, freedom + len(means)), 0.99)
        return replace(fit, base=share / (1 - share) * float(fit.noise.trace()) / len(scatter))

    @cached_property
    def pulls(self) -> tuple[float, ...]:
        """Sums of w_c tau e~_c'v_c where v_c is m_c - b, tau S e~_c, and tau e~_c."""
        texts, width = self.weights * self.texts, self.texts.shape[1]
        return tuple(float((texts * each[:, :width]).sum()) for each in (self.means, self.metric, self.texts))

    def slope(self, rho: float) -> float:
        """a, with the S of a rho; names that say nothing of the images have 0."""
        means, metric, texts = self.pulls
        over = metric + rho * self.base * texts
        return max(0.0, means / over) if over > 0 else 0.0

    def prior(self, rho: float) -> Tensor:
        """a tau S e~_c, (C, d), with the S of a rho."""
        texts = F.pad(self.texts, (0, self.means.shape[1] - self.texts.shape[1]))
        return self.slope(rho) * (self.metric + rho * self.base * texts)

    def solution(self, kappa: float, rho: float) -> tuple[Tensor, Tensor]:
        """P (mu~_c - b), (C, d), and what the score is less than its product with x, (C,)."""
        means = (self.counts * self.means + kappa * self.prior(rho)) / (self.counts + kappa)
        factor, failed = torch.linalg.cholesky_ex(self.noise + rho * self.base * torch.eye(len(self.noise)).to(means))
        if failed:
            raise ValueError(f"the covariance cannot be inverted with rho {rho:g}: raise it, or use 'auto'")
        weights = torch.cholesky_solve(means.T, factor).T
        offsets = (means * weights).sum(dim=1) / 2 - TILT * self.noise_share(rho) / (self.counts[:, 0] + kappa)
        return weights, offsets + weights @ self.centre

    @cached_property
    def basis(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Eigenvalues of S, (d,), float64; in float32 its eigenvectors, (d, d), and by these `means`, `texts`, (C, d).

        S + rho base I is diagonal there. What is chosen by left-out images does not need more digits. The eigenvalues
        themselves do: in float32, those of a small S that is far from full rank are NaN or are not found.
        """
        values, vectors = torch.linalg.eigh(self.noise)
        vectors = vectors.float()
        means, texts = self.means.float() @ vectors, self.texts.float() @ vectors[: self.texts.shape[1]]
        return values.clamp_min(0), vectors, means, texts

    def noise_share(self, rho: float) -> float:
        """tr(P S): how many directions the noise fills."""
        values = self.basis[0]
        return float((values / (values + rho * self.base)).sum())

    def usual_kappa(self) -> float:
        """kappa by moments: r_c'P r_c is d / kappa + tr(P S) / n_c on average, each class left out of b and of R.

        A class puts t r_c r_c' into S. Without it q = r_c'P r_c is q / (1 - t q) (Sherman and Morrison), and r_c is
        C / (C - 1) times as long. Names that say nothing pull all means to the same place, which costs classes with
        few images most: there it is the least of the grid.
        """
        values, _, means, texts = self.basis
        noise, classes = (values + MIDDLE * self.base).float(), len(means)
        prior = self.slope(MIDDLE) * texts * noise
        found = ((means - prior).square() / noise).sum(dim=1, keepdim=True).to(self.means)
        own = USUAL_IMAGES / self.images / classes * self.weights * found
        left = found / (1 - own).clamp_min(LEAST_LEFT) * (classes / max(1, classes - 1)) ** 2
        excess = left - self.noise_share(MIDDLE) / self.counts
        inverse = 1 / USUAL_KAPPA
        for _ in range(4):
            weights = (inverse + 1 / self.counts) ** -2
            inverse = float((weights * excess).sum() / weights.sum()) / len(noise)
            inverse = min(1 / KAPPAS[0], max(1 / KAPPAS[-1], inverse))
        explained = self.explained(MIDDLE)
        return KAPPAS[0] if explained < LEAST_EXPLAINED * (explained + inverse) else 1 / inverse

    def explained(self, rho: float) -> float:
        """Mean square of the priors of the means in the metric of the noise, for each of the d directions."""
        prior = self.prior(rho)[:, : self.texts.shape[1]]
        return self.slope(rho) * float((self.texts * prior).sum()) / self.means.numel()

    def lone_kappa(self) -> float:
        """kappa where every class has one image."""
        explained, (least, most) = self.explained(RHOS[-1]), LONE_KAPPAS
        return min(most, max(least, LONE_SHARE / explained)) if explained > 0 else least

    def left_out(
        self, images: Tensor, labels: Tensor, rhos: Sequence[float], kappas: Sequence[float]
    ) -> Iterator[Tensor]:
        """The scores, (kappas, n, C), float32, of learned images, each as if it had not been, for each rho in turn.

        Without an image x the mean of its class is that of n_c - 1 images, and W is less by n_c / (n_c - 1) d d',
        d = x - m_c (Sherman and Morrison). y is x - b, and q_c is mu~_c - b. a, b, R, the prior of the
        means and the last term of the score stay.
        """
        values, vectors, means, texts = self.basis
        rows, (present, own) = (images - self.centre).float() @ vectors, labels.unique(return_inverse=True)
        away, row_texts, own_texts = rows - means[labels], rows @ texts.T, means[present] @ texts.T
        mean_texts, each = (means * texts).sum(dim=1), torch.arange(len(labels)).to(labels)
        kappa, every = torch.tensor(kappas).to(rows)[:, None], self.counts[:, 0].float()  # (kappas, 1) and (C,)
        counts, share = every[labels], every / (every + kappa)
        total, taken = counts + kappa, counts / (counts - 1) / self.images
        for rho in rhos:
            noise, slope = (values + rho * self.base).float(), self.slope(rho)
            by_mean, by_text = (rows / noise) @ means.T, slope * row_texts
            across_mean = by_mean - ((means[present] / noise) @ means.T)[own]
            length, reach = (rows.square() / noise).sum(dim=1), (rows * away / noise).sum(dim=1)  # y'P y and y'P d
            gain = taken / (1 - taken * (away.square() / noise).sum(dim=1))  # P is then P + gain P d d'P
            square = share**2 * (means.square() @ (1 / noise)) + 2 * share * (1 - share) * slope * mean_texts
            square += (1 - share) ** 2 * slope**2 * (texts.square() @ noise)  # q_c'P q_c, (kappas, C)
            # y'P q_c is t + s (m - t) with the share s, and d'P q_c is u + s (v - u); P makes it a square in s.
            across_text, lift = by_text - slope * own_texts[own], gain[:, None]
            apart, across_apart = by_mean - by_text, across_mean - across_text
            inner = lift * (reach[:, None] - across_text)
            bonus = TILT * self.noise_share(rho) / (every + kappa)
            # Its own class has q = (N q_c - y) / (N - 1), with N = n_c + kappa.
            part = share[:, labels]
            mine, beside = (
                text[each, labels] + part * far[each, labels]
                for text, far in ((by_text, apart), (across_text, across_apart))
            )
            rest = (total**2 * square[:, labels] - 2 * total * mine + length) / (total - 1) ** 2
            mine, beside = (total * mine - length) / (total - 1), (total * beside - reach) / (total - 1)
            mine += gain * beside * (reach - beside / 2) - rest / 2 + bonus[:, labels]
            constant = by_text + lift * across_text * (reach[:, None] - across_text / 2)
            scores = torch.addcmul(
                apart + inner * across_apart, share[:, None], lift * across_apart.square(), value=-0.5
            )
            torch.addcmul(constant, share[:, None], scores, out=scores).add_((bonus - square / 2)[:, None])
            scores[:, each, labels] = mine
            yield scores


class BayesClassifier(Classifier):
    """Classes as Gaussians with one covariance, whose means lie where the texts say until their images say otherwise.

    The sums are exact and in float64, so for a fixed kappa and rho the solution is the one on all data at once,
    whatever the order of images, classes, tasks and merged parts.

    Args:
        kappa: how many images a text counts for, positive. "auto": see `choice`.
        rho: how far the covariance goes to a multiple of the identity, positive; 1 is as far as OAS. "auto": likewise.
        features: M. Images that are left out then say whether the random features help. They do where classes have
            many images and no planes between them; else, and after `move`, scores are affine. 0, or a fixed kappa and
            rho: none.
        exact_forgetting: keep each class's share of W, so that `forget_class` leaves nothing of it. It takes
            8 min(n_c - 1, d) d bytes a class: 2 MiB with d = 512 from 513 images on. False: the share stays in W.
            What the class's images said of kappa and rho stays in the table either way.

    Attributes:
        sums: n_c m_c, (C, d), float64; d is `embed_dim` + M here and below.
        counts: n_c, (C,), int64.
        text_embeds: e_c, (C, embed_dim), unit vectors.
        scatter: W, (d, d), float64, sum of (x - m_c)(x - m_c)' over all images.
        freedom: f, int64, images less classes.
        factors: F_c for one class after another, (rows, d), float64; F_c'F_c is the class's share of W.
        factor_rows: rows of each F_c, (C,), int64.
        losses: (1 or 2, kappas, rhos, temperatures), float64: what images that were left out say, see `choice`; the
            second table is with the random features.
        judged: sum of the weights of these images and of the weights' squares, (2,), float64.

    Reference:
        Wang et al., "A Hard-to-Beat Baseline for Training-free CLIP-based Adaptation", 2024, adds the two scores with
        one weight for all classes; arXiv 2404.00312 has a text classifier as the prior mean of a Gaussian process.
    """

    kappa: Positive | Literal["auto"] = "auto"
    rho: Positive | Literal["auto"] = "auto"
    exact_forgetting: bool = True
    features: Annotated[int, Ge(0), Le(MOST_FEATURES)] = 500

    name = "bayes"
    summary = "discriminant analysis with the text as its prior: a class is its name until its images say otherwise"
    needs_text = True
    updates = True

    def register(self) -> None:
        self._random = self.features if "auto" in (self.kappa, self.rho) else 0
        width = self.embed_dim + self._random
        self.register_rows("sums", width, dtype=torch.float64)
        self.register_rows("counts", dtype=torch.int64)
        self.register_buffer("scatter", torch.zeros(width, width, dtype=torch.float64))
        self.register_buffer("freedom", torch.zeros((), dtype=torch.int64))
        if self.exact_forgetting:
            self.register_rows("factor_rows", dtype=torch.int64)
            self.register_ragged("factors", width, dtype=torch.float64)
        self._kappas = KAPPAS if self.kappa == "auto" else (float(self.kappa),)
        self._rhos = RHOS if self.rho == "auto" else (float(self.rho),)
        self._features = (0, self._random) if self._random else (0,)
        shape = len(self._features), len(self._kappas), len(self._rhos), len(TEMPERATURES)
        self.register_buffer("losses", torch.zeros(shape, dtype=torch.float64))
        self.register_buffer("judged", torch.zeros(2, dtype=torch.float64))

    def added(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        """With further images; each adds a row to the factor of its class, but for the first one of the class."""
        kept = self.with_new_rows(len(new))
        sums, counts = kept["sums"], kept["counts"]
        order = labels.argsort(stable=True).to(sums.device)
        images, labels = self.lifted(images.to(sums))[order], labels.to(sums.device)[order]
        place = places_among(labels)
        before = images.cumsum(dim=0) - images  # of all images, and then of those of the class that came before
        before = before - before[torch.arange(len(labels)).to(place) - place] + sums[labels]
        number = (counts[labels] + place).to(sums)[:, None]
        rows = (number / (number + 1)).sqrt() * (images - before / number.clamp_min(1))
        again = number[:, 0] > 0
        sums = sums.index_add(0, labels, images)
        check_directions(sums[len(sums) - len(new) :, : self.embed_dim], new)
        return {
            "sums": sums,
            "counts": counts + labels.bincount(minlength=len(counts)),
            "freedom": self.freedom + len(images) - len(new),
        } | self._spread(kept, rows[again], labels[again], self.scatter)

    def _spread(self, kept: Mapping[str, Tensor], rows: Tensor, labels: Tensor, scatter: Tensor) -> dict[str, Tensor]:
        """W, and the factors where they are kept, with further rows of the classes' factors."""
        changes = {"scatter": scatter + rows.T @ rows}
        if not self.exact_forgetting:
            return changes
        classes = len(kept["factor_rows"])
        owners = torch.cat([torch.arange(classes).to(labels).repeat_interleave(kept["factor_rows"]), labels])
        factors, sizes = torch.cat([self.factors, rows]), owners.bincount(minlength=classes)
        if (owners.diff() < 0).any():
            factors = factors[owners.argsort(stable=True)]
        if (sizes > rows.shape[1]).any():
            parts = factors.split(sizes.tolist())
            parts = [part if len(part) <= part.shape[1] else torch.linalg.qr(part, mode="r").R for part in parts]
            factors, sizes = torch.cat(parts), sizes.clamp(max=rows.shape[1])
        return changes | {"factors": factors, "factor_rows": sizes}

    def forgotten(self, kept: Tensor) -> dict[str, Tensor]:
        changes = super().forgotten(kept)
        if self.exact_forgetting:
            factors = self.factors[kept.repeat_interleave(self.factor_rows.cpu()).to(self.factors.device)]
            freedom = changes["counts"].sum() - len(changes["counts"])
            changes |= {"factors": factors, "scatter": factors.T @ factors, "freedom": freedom}
        return changes

    def merged(self, other: Self, places: Tensor) -> dict[str, Tensor]:
        kept = self.with_new_rows(int((places >= len(self._class_names)).sum()))
        places, both = places.to(self.sums.device), kept["counts"][places] > 0
        at, mine, theirs = places[both], kept["counts"][places[both], None].to(self.sums), other.counts[both, None]
        apart = kept["sums"][at] / mine - other.sums[both] / theirs
        rows, labels, scatter = (mine * theirs / (mine + theirs)).sqrt() * apart, at, self.scatter
        if self.exact_forgetting:
            rows = torch.cat([other.factors, rows])
            labels = torch.cat([places.repeat_interleave(other.factor_rows), labels])
        else:
            scatter = scatter + other.scatter
        return {
            "sums": kept["sums"].index_add(0, places, other.sums),
            "counts": kept["counts"].index_add(0, places, other.counts),
            "freedom": self.freedom + other.freedom + len(at),
            "losses": self.losses + other.losses,
            "judged": self.judged + other.judged,
        } | self._spread(kept, rows, labels, scatter)

    def without_image(self, image: Tensor, label: int) -> dict[str, Tensor]:
        """Without x the class's share of W is less by v v', v = sqrt(n / (n - 1)) (x - m_c); see `downdated`."""
        sums, counts = self.sums.clone(), self.counts.clone()
        images, lifted = int(counts[label]), self.lifted(image[None].to(sums))[0]
        row = (images / (images - 1)) ** 0.5 * (lifted - sums[label] / images)
        sums[label] -= lifted
        counts[label] -= 1
        check_directions(sums[[label], : self.embed_dim], [self._class_names[label]])
        changes = {"sums": sums, "counts": counts, "freedom": self.freedom - 1}
        if not self.exact_forgetting:
            return changes | {"scatter": self.scatter - torch.outer(row, row)}
        parts = list(self.factors.split(self.factor_rows.tolist()))
        parts[label] = downdated(parts[label], row)[: images - 2]
        sizes = torch.tensor([len(part) for part in parts]).to(self.factor_rows)
        factors = torch.cat(parts)
        return changes | {"factors": factors, "factor_rows": sizes, "scatter": factors.T @ factors}

    def moved(self, matrix: Tensor) -> dict[str, Tensor]:
        """m_c to M' m_c and W to M' W M; texts stay. What the map leaves over of the drift is not added to W.

        No map follows random features: their sums become 0, and an error that no choice takes.
        """
        width = self.embed_dim + self._random
        matrix = F.pad(matrix, (0, width - len(matrix), 0, width - len(matrix))).to(self.sums.device)
        changes = {"sums": self.sums @ matrix, "scatter": matrix.T @ self.scatter @ matrix}
        losses = self.losses.clone()
        losses[1:] = NEVER
        return changes | {"losses": losses} | ({"factors": self.factors @ matrix} if self.exact_forgetting else {})

    def judge(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Add to the table what every kappa and rho says of the images, each left out; scores by those then chosen."""
        images, labels = self.lifted(images.to(self.sums)), labels.to(self.sums.device)
        chosen = self._judged(images, labels)
        if not len(chosen) or len(self._class_names) < 2:
            return None
        counts, losses = self.counts.to(images), self.losses.clone()
        every = labels.bincount(minlength=len(counts))
        images, labels = images[chosen], labels[chosen]
        judged = labels.bincount(minlength=len(every))
        weights = every / counts / judged.clamp_min(1)
        # Those of fewest images stand for the classes with one, which nobody can leave out.
        fewest = (judged > 0) & (counts == counts[labels].min())
        weights = torch.where(fewest, weights * (1 + (every[counts == 1] > 0).sum() / fewest.sum()), weights)[labels]
        weights = weights * len(counts)  # the more classes it stood against, the more an image says
        rows = max(LEAST_ROWS, CHUNK // len(counts) // len(self._kappas))
        for part, own, weight in zip(images.split(rows), labels.split(rows), weights.split(rows), strict=True):
            for table, features in zip(losses, self._features, strict=True):
                left_out = self._fit(features).left_out(self._seen(part, features), own, self._rhos, self._kappas)
                for place, scores in enumerate(left_out):
                    table[:, place] += soft_errors(scores, own, weight.float())
        self._buffers |= {"losses": losses, "judged": self.judged + torch.stack([weights.sum(), weights @ weights])}
        self._derived.pop("choice", None)
        kappa, rho, features = self.choice
        return next(self._fit(features).left_out(self._seen(images, features), labels, [rho], [kappa]))[0], labels

    def _judged(self, images: Tensor, labels: Tensor) -> Tensor:
        """Rows of the images that can be left out, the first ones of every class by `ranking`."""
        rows = (self.counts.to(labels.device)[labels] > 1).nonzero()[:, 0]
        if len(rows) <= MOST_JUDGED:
            return rows
        rows = rows[ranking(images[rows]).argsort()]
        return rows[places_among(labels[rows]).argsort(stable=True)[:MOST_JUDGED]]

    @property
    def choice(self) -> tuple[float, float, int]:
        """kappa, rho and 0 or M: those with which images of the seen classes are right that are left out.

        The images of a task, or 256 of them, and further ones are scored against all classes of then, each as if it
        had not been learned. An image's error is 1 less the probability of its own class, at the best of
        `TEMPERATURES`. It weighs C / n_c, with the C classes of then, so that classes weigh alike, and late tasks more
        than early ones; those with fewest images weigh for those of the task that have one. They have the least of

            n L(kappa, rho) + log(kappa / usual)^2 + log(rho / 10)^2

        with the mean error L and the effective number n of the images; the usual kappa is that by which the texts are
        as far from the means as they are. So few images leave the choice to it. Where no class has two images, rho is
        100, kappa depends on how much of the means the texts explain, and there are no random features.
        """
        return self.derived("choice", self._choose)

    def _choose(self) -> tuple[float, float, int]:
        total, squares = self.judged.tolist()
        if not total:
            kappa = self._fit(0).lone_kappa() if self.kappa == "auto" else float(self.kappa)
            return kappa, LONE_RHO if self.rho == "auto" else float(self.rho), 0
        errors = total**2 / squares * (self.losses / total).amin(dim=3)
        usual = torch.tensor([self._fit(features).usual_kappa() for features in self._features]).to(errors)
        kappas, rhos = (torch.tensor(grid).to(errors) for grid in (self._kappas, self._rhos))
        away = (kappas / usual[:, None]).log()[..., None] ** 2 + (rhos / MIDDLE).log() ** 2
        table, number, place = torch.unravel_index((errors + away).argmin(), errors.shape)
        return self._kappas[number], self._rhos[place], self._features[table]

    @property
    def temperature(self) -> float:
        """T of `probabilities`; where no class has two images, the one at which texts weigh as in zero-shot CLIP."""
        if self.calibration or not self._class_names:
            return super().temperature
        return float(self.solved()["temperature"])

    def _fit(self, features: int) -> Fit:
        """The fit of the unit features and of so many random ones."""
        return self.derived(f"fit {features}", lambda: self._fitted(self.embed_dim + features))

    def _fitted(self, width: int) -> Fit:
        texts = self.logit_scale * self.text_embeds.to(self.sums)
        counts, sums, scatter = self.counts.to(self.sums), self.sums[:, :width], self.scatter[:width, :width]
        return Fit.of(sums / counts[:, None], counts, scatter, int(self.freedom), texts)

    def solution(self) -> tuple[Tensor, Tensor]:
        """The scores of x are x times the first, (C, d), less the second, (C,); float64."""
        kappa, rho, features = self.choice
        return self.derived("solution", lambda: self._fit(features).solution(kappa, rho))

    def solved(self) -> dict[str, Tensor]:
        """The solution in float32, and the temperature that needs no image."""
        return self.derived("solved", self._solved) if self._class_names else {}

    def _solved(self) -> dict[str, Tensor]:
        weights, offsets = (part.float().to(self.device) for part in self.solution())
        kappa, rho, features = self.choice
        usual = self._fit(features).slope(rho) * kappa / (1 + kappa) or 1.0
        return {"weight": weights, "bias": -offsets, "temperature": torch.tensor(usual, device=self.device)}

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

    def _seen(self, images: Tensor, features: int) -> Tensor:
        return images[:, : self.embed_dim + features]

    def formula(self) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        solved = self.solved()
        tensors = {name: solved[name] for name in ("weight", "bias")}
        if tensors["weight"].shape[1] > self.embed_dim:
            return random_and_linear, tensors | {"projection": self._layer().to(tensors["weight"])}
        return linear, tensors


def downdated(factor: Tensor, row: Tensor) -> Tensor:
    """G, (n, d), with G'G = F'F - v v' for a `factor` F, (n, d), and a `row` v, (d,), in the span of its rows.

    With v = F'a it is F - b a v', b = (1 - sqrt(1 - a'a)) / a'a. G is that, turned so that its rows become shorter
    downwards: the last one is 0 where F had no more rows than it needed.
    """
    along = torch.linalg.pinv(factor.T) @ row
    length = min(1.0, float(along @ along))
    share = (1 - math.sqrt(1 - length)) / length if length else 0.0
    _, sizes, directions = torch.linalg.svd(factor - share * torch.outer(along, row), full_matrices=False)
    return sizes[:, None] * directions


def random_and_linear(
    z: torch.Tensor, projection: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Scores, (n, C), of unit features z, (n, d): a random layer beside them, a matrix and a bias."""
    return torch.cat([z, (z @ projection).relu()], dim=1) @ weight.T + bias


def soft_errors(scores: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
    """Weighted sums of 1 - p(own class), (kappas, temperatures), of (kappas, n, C) scores, which it ruins."""
    powers, sums = scores.sub_(scores.amax(dim=2, keepdim=True)).clamp_min_(-40).exp_(), []
    each = torch.arange(len(labels)).to(labels)
    for place in range(len(TEMPERATURES)):
        if place:  # half the temperature; the square of 1e-18 is no subnormal number: those are slow
            powers.square_().clamp_min_(1e-18)
        sums.append((1 - powers[:, each, labels] / powers.sum(dim=2)) @ weights)
    return torch.stack(sums, dim=1)
