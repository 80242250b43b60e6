"""The evidence that an image belongs to an unknown class, from a Gaussian model of images and of class means.

    x | c ~ N(mu_c, S)        mu_c ~ N(b, B) for a class about which nothing is known

For a known class with n_c images, their mean m_c and a text, mu_c is Gaussian too, and so is a further image of the
class. In coordinates in which S is the identity and B is diagonal with entries beta, one coordinate of x - b is
distributed as

    x | known c ~ N(p_c + w (m_c - b - p_c), 1 + beta_c / (1 + n_c beta_c))        w = n_c beta_c / (1 + n_c beta_c)
    x | other   ~ N(0, 1 + beta)              evidence = log p(x | other) - log mean over c of p(x | known c)

p_c = a S t_c is the class mean that the text predicts, with t_c as in `text_prior`, and a fitted to the m_c - b by
least squares with the weights n_c / (n_c + 1). beta_c = q beta, where q is the share of the variance of the class
means that the texts do not explain. Without texts, p_c = 0 and q = 1. A direction in which classes do not differ adds
no evidence, a class with few images adds less than one with many, and few classes determine B poorly.

    S = (W + nu R) / (f + nu), with `RIDGE` times the ridge of OAS, at an unchanged trace; nu is `USUAL_IMAGES`
    R = sum of (m_c - b)(m_c - b)' / (1/4 + 1/n_c) / C, which alone determines S if no class has two images
    B + mean of 1/n_c = covariance of the m_c with C - 1 degrees of freedom, shrunk by OAS

The expectation of R is about S if B is S / 4, which is a convention. beta and beta_c are at least `LEAST`.

Reference:
    Ioffe, "Probabilistic Linear Discriminant Analysis", ECCV 2006; Prince and Elder, "Probabilistic Linear
    Discriminant Analysis for Inferences About Identity", ICCV 2007.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dulbe_peft.classifiers.covariance import oas_shrinkage

# Chosen on streams of both halves of `research.benchmarks.real`, so no held-out set confirms these values yet.
# Doubling or halving each of them changed the mean area under the ROC curve little.
USUAL_IMAGES, RIDGE, LEAST = 10, 5.0, 0.1
AT_ONCE = 2**24  # numbers held in memory at once


@dataclass(frozen=True, eq=False)
class Sums:
    """The sums that evidence needs: m_c, (C, d), n_c, (C,), W, (d, d), f, and tau e_c, (C, d), or None; float64."""

    means: Tensor
    counts: Tensor
    scatter: Tensor
    freedom: int
    texts: Tensor | None = None

    def without(self, images: Tensor, labels: Tensor, classes: Tensor | None = None) -> Sums:
        """Return the sums without some learned images, (n, d), and without the numbered `classes`.

        Other images of these classes keep their contribution to W.
        """
        gone = labels.bincount(minlength=len(self.counts)).to(self.counts)
        left, sums = self.counts - gone, self.means * self.counts[:, None]
        means = (sums - torch.zeros_like(sums).index_add(0, labels, images)) / left.clamp_min(1)[:, None]
        changed = gone > 0
        before = self.means[changed] * self.counts[changed, None].sqrt()
        after = means[changed] * left[changed, None].sqrt()
        rows, signed = torch.cat([images, after, before]), torch.cat([images, after, -before])
        scatter = torch.addmm(self.scatter, rows.T, signed, alpha=-1)
        freedom = self.freedom - len(images) + int(((left < 1) & (self.counts > 0)).sum())
        kept = left > 0
        if classes is not None:
            kept[classes] = False
        texts = None if self.texts is None else self.texts[kept]
        return Sums(means[kept], left[kept], scatter, freedom, texts)


class Evidence:
    """Compute the evidence that images belong to an unknown class, from `Sums`."""

    def __init__(self, sums: Sums) -> None:
        counts, (classes, width) = sums.counts[:, None], sums.means.shape
        self.middle = sums.means.mean(dim=0)
        self.factor = torch.linalg.cholesky(noise(sums, sums.means - self.middle))
        means = self._whitened(sums.means)
        texts, turned = means[:0] if sums.texts is None else sums.texts - sums.texts.mean(dim=0), self.factor
        basis, rows = None, means
        if len(means) + len(texts) < width:  # they span only a subspace, and all directions outside it are alike
            basis = torch.linalg.qr(torch.cat([means, texts @ turned]).T).Q
            rows, turned = means @ basis, turned @ basis
        covariance = rows.T @ rows / max(1, classes - 1)
        values, vectors = torch.linalg.eigh(covariance)
        self.basis = vectors if basis is None else basis @ vectors
        means, texts = rows @ vectors, texts @ (turned @ vectors)
        share = min(1.0, oas_shrinkage(covariance, max(1, classes - 1), width))
        beside = share * float(values.sum()) / width - float((1 / counts).mean())
        self.between, self.beside = ((1 - share) * values + beside).clamp_min(LEAST), max(LEAST, beside)
        prior, left = said_by(texts, means, counts)
        between, beside = (left * self.between).clamp_min(LEAST), max(LEAST, left * self.beside)
        heavy = counts * between
        self.centres = prior + heavy / (1 + heavy) * (means - prior)
        self.precise = 1 / (1 + between / (1 + heavy))
        self.others = 1 / (1 + beside / (1 + counts[:, 0] * beside))
        self.rest = width - len(values)

    def __call__(self, images: Tensor) -> Tensor:
        """Return the evidence, (n,), float64, of unit features, (n, d)."""
        parts = images.to(self.middle).split(max(1, AT_ONCE // max(self.centres.shape)))
        return torch.cat([self._of(part) for part in parts]) if len(images) else self.middle[:0]

    def _of(self, images: Tensor) -> Tensor:
        rows = self._whitened(images)
        turned = rows @ self.basis
        beside = (rows.square().sum(dim=1) - turned.square().sum(dim=1)).clamp_min(0)
        weighted = self.centres * self.precise
        known = turned.square() @ self.precise.T - 2 * turned @ weighted.T + beside[:, None] * self.others
        known += (self.centres * weighted).sum(dim=1) - self.precise.log().sum(dim=1) - self.rest * self.others.log()
        other = (turned.square() / (1 + self.between)).sum(dim=1) + beside / (1 + self.beside)
        other += self.between.log1p().sum() + self.rest * math.log1p(self.beside)
        return (-known / 2).logsumexp(dim=1).neg() + math.log(len(self.centres)) - other / 2

    def _whitened(self, rows: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor, (rows - self.middle).T, upper=False).T


def said_by(texts: Tensor, means: Tensor, counts: Tensor) -> tuple[Tensor, float]:
    """Return p_c, (C, r), fitted to the texts, (C, r), by least squares, and q, the unexplained share, 0 to 1."""
    weights = counts[: len(texts)] / (counts[: len(texts)] + 1) * texts
    over, whole = float((weights * texts).sum()), float(means.square().sum())
    if not len(texts) or over <= 0 or whole <= 0:
        return torch.zeros_like(means), 1.0
    prior = max(0.0, float((weights * means).sum()) / over) * texts
    return prior, min(1.0, float((means - prior).square().sum()) / whole)


def noise(sums: Sums, apart: Tensor) -> Tensor:
    """Return S, (d, d), from the sums and m_c - b, (C, d)."""
    classes, width = apart.shape
    weights = 1 / (1 / 4 + 1 / sums.counts[:, None])
    found = apart.T @ (weights * (USUAL_IMAGES / classes) * apart)
    found.add_(sums.scatter).div_(sums.freedom + USUAL_IMAGES)
    variance = float(found.trace()) / width
    if variance < 1e-20:  # all images are equal
        return torch.eye(width).to(found)
    share = min(oas_shrinkage(found, max(1, sums.freedom + classes - 1)), 0.999)
    ridge = RIDGE * share / (1 - share)
    found.div_(1 + ridge).diagonal().add_(ridge * variance / (1 + ridge))
    return found
