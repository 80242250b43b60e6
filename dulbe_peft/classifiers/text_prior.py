"""Two classifiers side by side, of the images and of the texts: the derivation, what sums say, and the scores.

The images give each class a Gaussian, all with one covariance S, P = S^-1, and the texts are CLIP's classifier:

    L_c(x) = w_c (m_c - b)'P (x - b) - w_c^2 (m_c - b)'P (m_c - b) / 2
    T_c(x) = a t_c'(x - b) - (1 - omega) a^2 t_c'S t_c / 2 + omega a t_c'b          t_c = tau (e_c - mean of e)
    score  = (n L_c(x) + kappa T_c(x)) / (n + kappa)

so that a text counts as much as kappa images beside the n that a class usually has. Many images make it LDA, a large
kappa the text classifier. Sums of log-probabilities are the logarithmic opinion pool, which is right where an expert
errs independently of the other, and its weight takes in that they do not (Genest and Zidek, 1986).

**Why T_c is in the units of L_c.** LDA's score is x'P mu_c - mu_c'P mu_c / 2 and CLIP's tau x'e_c; they agree where
mu_c = b + a S t_c, which is where texts say that means are, and where m_c - b lies by least squares:

    a = sum w_c t_c'(m_c - b) / sum w_c t_c'S t_c, or 0

The offset of T_c is that of this Gaussian, omega = 0, or CLIP's own, omega = 1. They are alike where names point at
the means. Where names share a large direction, as those of real networks do, the first favours classes whose texts
are unlike the others.

**Which images say what.**

    b = mean over classes of m_c        n = C / sum 1/n_c               the images of a class, harmonic mean
    S = (W + rho V I) / (f + rho d)     W: scatter within the classes, f: its freedom, images less classes
    V = sum |x - b|^2 / N               over all N images: how far an image is away from b, squared
    w_c = n_c / (n_c + k), over that of the largest class

S is the mean of W, as a sample of f images from N(0, S), and of rho d further ones that are alike in all directions,
with V / d in each: an inverse Wishart prior. With one image a class f is 0, nothing is known of S, and it is V / d
times the identity however many the classes are; S goes from there to W / f as images come. How the classes lie apart
is no part of it: the more classes there are, the better that is known, and it is not what tells an image from another
one of its class. w_c draws the means of classes with fewer images to the middle, as if each had k images there; what
all classes lose alike is left out, so that nothing is drawn where all have as many images.

A class without a text has t_c = 0, and without any texts a = 0.

Reference:
    Genest and Zidek, "Combining Probability Distributions: A Critique and an Annotated Bibliography", 1986. Wang et
    al., "A Hard-to-Beat Baseline for Training-free CLIP-based Adaptation", 2024, has such a sum, with LDA's means and
    ridge. "Cross-Modal Prototype Alignment and Mixing", arXiv 2603.24528, mixes projected means of images with texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

OMEGAS = (0.0, 0.25, 0.5, 0.75, 1.0)
SCALES = (0.0, *(2.0 ** (half / 2) for half in range(-8, 8)))  # of the scores by texts alone; with 0 they say nothing
# k. With 1, as `lda` has it, a class that has lost one of two images is taken for others too often, with 4 too rarely:
# images that are left out are then right as often as test images are.
PRIOR_IMAGES = 2.0
ROUNDING = 1e-20  # a variance below it is that of images which are equal


def shares(counts: Tensor, dim: int) -> Tensor:
    """w_c of numbers of images along a dimension."""
    found = counts / (counts + PRIOR_IMAGES)
    return found / found.amax(dim=dim, keepdim=True)


@dataclass(frozen=True, eq=False)
class Fit:
    """What the sums say, in float64, in the basis of the eigenvectors of W, (d, d), whose eigenvalues are `values`.

    `centre` b, (d,), is in the basis of the features; `means` m_c - b and `texts` t_c are (C, d), `counts` n_c (C,).
    `total` is N V, and `freedom` f.
    """

    values: Tensor
    vectors: Tensor
    total: float
    freedom: int
    centre: Tensor
    means: Tensor
    texts: Tensor
    counts: Tensor

    @classmethod
    def of(cls, means: Tensor, counts: Tensor, scatter: Tensor, freedom: int, texts: Tensor) -> Fit:
        """From m_c, n_c (C,), W, f and tau e_c (C, d), float64; a class without a text has zeros."""
        centre, counts, given = means.mean(dim=0), counts.to(means), texts.any(dim=1, keepdim=True)
        means, texts = means - centre, (texts - texts.sum(dim=0) / given.sum().clamp_min(1)) * given
        total = float(scatter.trace() + counts @ means.square().sum(dim=1))
        values, vectors = torch.linalg.eigh(scatter)
        turned = (means @ vectors, texts @ vectors)
        return cls(values.clamp_min(0), vectors, total, freedom, centre, *turned, counts)

    def noise(self, rho: float) -> Tensor:
        """The eigenvalues of S, (d,)."""
        variance = self.total / float(self.counts.sum())
        ridge = rho * (variance if variance > ROUNDING else 1.0)
        return (self.values + ridge) / (self.freedom + rho * len(self.values))

    def slope(self, rho: float) -> float:
        """a; texts that point away from the means have 0."""
        weights = shares(self.counts, 0)[:, None]
        over = float((weights * self.texts.square() * self.noise(rho)).sum())
        return max(0.0, float((weights * self.texts * self.means).sum()) / over) if over > 0 else 0.0

    def by_images(self, rho: float) -> tuple[Tensor, Tensor]:
        """L_c is x - b times the first, (C, d), and the second, (C,)."""
        share, weights = shares(self.counts, 0), self.means / self.noise(rho)
        return share[:, None] * weights @ self.vectors.T, -(share**2) * (weights * self.means).sum(dim=1) / 2

    def by_texts(self, rho: float, omega: float) -> tuple[Tensor, Tensor]:
        """T_c likewise."""
        slope, lengths = self.slope(rho), self.texts.square() @ self.noise(rho)
        texts = slope * self.texts @ self.vectors.T
        return texts, omega * texts @ self.centre - (1 - omega) * slope**2 * lengths / 2

    def solution(self, kappa: float, rho: float, omega: float) -> tuple[Tensor, Tensor]:
        """The scores of x are x times the first, (C, d), and the second, (C,)."""
        share = self.share(kappa)
        pairs = zip(self.by_images(rho), self.by_texts(rho, omega), strict=True)
        weights, offsets = (share * image + (1 - share) * text for image, text in pairs)
        return weights, offsets - weights @ self.centre

    def scores(self, images: Tensor, kappas: Tensor, rho: float, omega: float) -> Tensor:
        """The scores, (kappas, n, C), of images, (n, d)."""
        solutions = [self.solution(kappa, rho, omega) for kappa in kappas.tolist()]
        return torch.stack([images[:, : len(self.centre)] @ weights.T + offsets for weights, offsets in solutions])

    def share(self, kappa: float) -> float:
        """n / (n + kappa)."""
        usual = len(self.counts) / float((1 / self.counts).sum())
        return usual / (usual + kappa)

    def text_losses(self, images: Tensor, labels: Tensor, weights: Tensor, rho: float) -> Tensor:
        """Weighted sums, (omegas, scales), of the log-losses of (n, d) images by their texts alone."""
        rows, table = images[:, : len(self.centre)] - self.centre, []
        for omega in OMEGAS:
            texts, offsets = self.by_texts(rho, omega)
            scores = (rows @ texts.T + offsets) / (self.slope(rho) or 1)
            table.append([weights @ F.cross_entropy(each * scores, labels, reduction="none") for each in SCALES])
        return torch.tensor(table).to(weights)

    def left_out(self, images: Tensor, labels: Tensor, kappas: Tensor, rho: float, omega: float) -> Tensor:
        """The scores, (kappas, n, C), float32, of learned images, (n, d), each by what is learned of all others."""
        rows = (images[:, : len(self.centre)] - self.centre) @ self.vectors
        return LeftOut.of(self, rows, labels, rho).scores(kappas, omega)


@dataclass(frozen=True, eq=False)
class LeftOut:
    """What the scores of images are made of, each with all that is fitted to the others; float32.

    Without an image x of class c, with y = x - b, d = x - m_c, u = 1 / (n_c - 1) and g = u / C,

        n_c is n_c - 1      m_c is m_c - u d      b is b - g d      f is f - 1      W is W - (1 + u) d d'
        N V is N V + 2 g d' sum n_k (m_k - b) + N g^2 d'd - |y + g d|^2

    A class k then has m_k - b + q_k d in place of m_k - b, with q_c = g - u and q_k = g for the others; x - b is
    y + g d; and with the new ridge in A = W + rho V I and h = 1 + u (Sherman and Morrison),

        P = (f - 1 + rho d) (A^-1 + r A^-1 d d'A^-1)        r = h / (1 - h d'A^-1 d)

    `near` is (m_k - b)'P (x - b), `square` (m_k - b)'P (m_k - b), and `cross`, `length`, `across` and `along` are
    t_k'(m_k - b), t_k'S t_k, t_k'(x - b) and t_k'b, all of them (n, C) as `counts` is. Nothing else changes.
    """

    counts: Tensor
    near: Tensor
    square: Tensor
    cross: Tensor
    length: Tensor
    across: Tensor
    along: Tensor

    @classmethod
    def of(cls, fit: Fit, rows: Tensor, labels: Tensor, rho: float) -> LeftOut:
        """Of y, (n, d), in the basis of the fit; each class has a second image."""
        own = torch.arange(len(labels)).to(labels), labels
        away, less = rows - fit.means[labels], 1 / (fit.counts[labels, None] - 1)
        back, freedom = less / len(fit.means), fit.freedom - 1 + rho * len(fit.centre)
        ridge = rho * variances(fit, rows, away, back)
        lengths = fit.texts.square() @ fit.values + ridge * fit.texts.square().sum(dim=1)  # t_k'A t_k
        counts, shift = fit.counts.expand(len(labels), -1).clone(), back.expand(-1, len(fit.means)).clone()
        counts[own] -= 1
        shift[own] -= less[:, 0]
        noise, away, rows, means, texts, centre = (
            part.float() for part in (fit.values + ridge, away, rows, fit.means, fit.texts, fit.centre @ fit.vectors)
        )
        less, back, counts, shift, lengths = (part.float() for part in (less, back, counts, shift, lengths))
        lone, apart = away / noise, away @ texts.T
        turned, far = lone @ means.T, (lone * away).sum(dim=1, keepdim=True)  # d'A^-1 (m_k - b), d'A^-1 d
        reach = (lone * rows).sum(dim=1, keepdim=True)  # y'A^-1 d
        gain, moved = (1 + less) / (1 - (1 + less) * far), turned + shift * far
        near = (rows / noise) @ means.T + shift * reach + (back + gain * (reach + back * far)) * moved
        square = (1 / noise) @ means.square().T + shift * (turned + moved) + gain * moved.square()
        return cls(
            counts=counts,
            near=freedom * near,
            square=freedom * square,
            cross=(texts * means).sum(dim=1) + shift * apart,
            length=(lengths - (1 + less) * apart.square()) / freedom,
            across=rows @ texts.T + back * apart,
            along=texts @ centre - back * apart,
        )

    def scores(self, kappas: Tensor, omega: float) -> Tensor:
        """The scores, (kappas, n, C)."""
        share = shares(self.counts, 1)
        over = (share * self.length).sum(dim=1, keepdim=True)
        slope = ((share * self.cross).sum(dim=1, keepdim=True) / over).clamp_min(0).where(over > 0, 0.0)
        by_images = share * self.near - share**2 * self.square / 2
        by_texts = slope * (self.across + omega * self.along) - (1 - omega) * slope**2 * self.length / 2
        usual = self.counts.shape[1] / (1 / self.counts).sum(dim=1, keepdim=True)
        weights = usual / (usual + kappas.to(usual)[:, None, None])
        return by_texts + weights * (by_images - by_texts)


def variances(fit: Fit, rows: Tensor, away: Tensor, back: Tensor) -> Tensor:
    """V without each image, (n, 1), from y, d and g; see `LeftOut`."""
    number, apart = float(fit.counts.sum()), fit.counts @ fit.means
    further = 2 * back * (away @ apart)[:, None] + number * back**2 * away.square().sum(dim=1, keepdim=True)
    found = (fit.total + further - (rows + back * away).square().sum(dim=1, keepdim=True)) / (number - 1)
    return torch.where(found > ROUNDING, found, 1.0)
