"""Classes as Gaussians whose means start from their texts: the derivation, what sums say of it, and its scores.

LDA's score of a class is x'P mu_c - mu_c'P mu_c / 2 with P = S^-1, and CLIP's is tau x'e_c. They agree where
mu_c = b + tau S e_c. So a text says where the mean of its class is, in the metric of the noise:

    x | c ~ N(mu_c, S)          mu_c ~ N(b + a S t_c, S / kappa)          t_c = tau (e_c - mean over classes of e)

With the mean m_c of n_c images and s = n_c / (n_c + kappa), mu_c - b is then s (m_c - b) + (1 - s) a S t_c, and so

    score = s (m_c - b)'P (x - b) + (1 - s) a t_c'(x - b) + offset

Many images of a class make it LDA, a large kappa the text classifier, and n_c decides between them class by class. The
offset is (1 - omega) that of the Gaussian and omega that of LDA and CLIP side by side, with m for m_c - b:

    -(s^2 m'P m + 2 s (1 - s) a m't_c + (1 - s)^2 a^2 t_c'S t_c) / 2        and        -s m'P m / 2 + (1 - s) a t_c'b

They are alike where names point at the means. Where names share a large direction, the first favours classes whose
texts are unlike the others.

    b = mean over classes of m_c        a = sum w_c t_c'(m_c - b) / sum w_c t_c'S t_c, or 0          (least squares)
    S = (W + nu R) / (f + nu)           W: scatter within the classes, f: its freedom, images less classes
    R = sum w_c r_c r_c' / C            r_c = m_c - b - a S t_c: what the texts leave of the means
    w_c = 1 / (1/4 + 1/n_c)             since r_c ~ N(0, S (1/kappa + 1/n_c)), with a usual kappa of 4

In the scores S has rho times the ridge of OAS, and a is fitted with it. A class without a text has t_c = 0; without
any texts a = 0, and what is left is LDA whose means are drawn to their middle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dulbe_peft.classifiers.covariance import oas_shrinkage

OMEGAS = (0.0, 0.25, 0.5, 0.75, 1.0)
SCALES = (0.0, *(2.0**power for power in range(-4, 4)))  # of the scores by texts alone; with 0 they say nothing
# Without nu, S is not known with one image a class; a and S need each other, so that they are taken in turn.
USUAL_KAPPA, USUAL_IMAGES, ROUNDS = 4.0, 10, 3


def least_squares(weights: Tensor, texts: Tensor, means: Tensor, moved: Tensor) -> float:
    """a, from t_c, m_c - b and S t_c, (C, d), and w_c, (C, 1); texts that point away from the means have 0."""
    over = float((weights * texts * moved).sum())
    return max(0.0, float((weights * texts * means).sum()) / over) if over > 0 else 0.0


@dataclass(frozen=True, eq=False)
class Fit:
    """What the sums say, in float64, in the basis of the eigenvectors of S, (d, d), whose eigenvalues are `values`.

    `centre` b, (d,), is in the basis of the features. `means` m_c - b and `texts` t_c are (C, d), `counts` n_c and
    `weights` w_c (C, 1). `base` is the ridge of OAS, and an image counts 1 / `images` in S.
    """

    values: Tensor
    vectors: Tensor
    base: float
    centre: Tensor
    means: Tensor
    texts: Tensor
    counts: Tensor
    weights: Tensor
    images: int

    @classmethod
    def of(cls, means: Tensor, counts: Tensor, scatter: Tensor, freedom: int, texts: Tensor) -> Fit:
        """From m_c, n_c (C,), W, f and tau e_c (C, d), float64; a class without a text has zeros."""
        centre, counts, given = means.mean(dim=0), counts.to(means)[:, None], texts.any(dim=1, keepdim=True)
        means, texts = means - centre, (texts - texts.sum(dim=0) / given.sum().clamp_min(1)) * given
        weights, images = 1 / (1 / USUAL_KAPPA + 1 / counts), freedom + USUAL_IMAGES
        identity = torch.eye(len(scatter)).to(scatter)
        noise = scatter / freedom if freedom else identity
        for _ in range(ROUNDS):
            moved = texts @ noise
            left = means - least_squares(weights, texts, means, moved) * moved
            noise = (scatter + USUAL_IMAGES / len(means) * left.T @ (weights * left)) / images
        if float(noise.trace()) < 1e-20 * len(noise):  # all images are equal
            noise = identity
        share = min(oas_shrinkage(noise, freedom + len(means)), 0.99)
        base = share / (1 - share) * float(noise.trace()) / len(noise)
        values, vectors = torch.linalg.eigh(noise)
        turned = (means @ vectors, texts @ vectors)
        return cls(values.clamp_min(0), vectors, base, centre, *turned, counts, weights, images)

    def slope(self, rho: float) -> float:
        """a, with the S of a rho."""
        return least_squares(self.weights, self.texts, self.means, self.texts * (self.values + rho * self.base))

    def explained(self, rho: float) -> float:
        """The share of how the means lie, sum of (m_c - b)'P (m_c - b), that is a S t_c."""
        square, _, length, _ = self._lengths(self.values + rho * self.base, self.slope(rho))
        return float(length.sum() / square.sum())

    def solution(self, kappa: float, rho: float, omega: float) -> tuple[Tensor, Tensor]:
        """The scores of x are x times the first, (C, d), and the second, (C,); texts alone with an infinite kappa."""
        noise, slope, share = self.values + rho * self.base, self.slope(rho), self.counts / (self.counts + kappa)
        weights = (share * self.means / noise + (1 - share) * slope * self.texts) @ self.vectors.T
        offset = mixed(share[:, 0], omega, *self._lengths(noise, slope))
        return weights, offset - weights @ self.centre

    def _lengths(self, noise: Tensor, slope: float) -> tuple[Tensor, ...]:
        """m'P m, a m't, a^2 t'S t and a t'b of every class, (C,)."""
        pairs = (self.means.square() / noise, slope * self.means * self.texts, slope**2 * self.texts.square() * noise)
        return *(pair.sum(dim=1) for pair in pairs), slope * self.texts @ (self.centre @ self.vectors)

    def by_text(self, images: Tensor, labels: Tensor, weights: Tensor, rho: float) -> Tensor:
        """Weighted sums, (omegas, scales), of the log-losses of (n, d) images by their texts alone."""
        rows, scale, table = images[:, : len(self.centre)], self.slope(rho) or 1, []
        for omega in OMEGAS:
            matrix, offset = self.solution(math.inf, rho, omega)
            scores = (rows @ matrix.T + offset) / scale
            table.append([weights @ F.cross_entropy(each * scores, labels, reduction="none") for each in SCALES])
        return torch.tensor(table).to(weights)

    def left_out(self, images: Tensor, labels: Tensor, kappas: Tensor, rho: float, omega: float) -> Tensor:
        """The scores, (kappas, n, C), float32, of learned images, (n, d), each as if it had not been learned.

        Without an image x, with y = x - b, d = x - m_c and n = n_c,

            n_c is n - 1      m_c is m_c - d / (n - 1)      P is P + g P d d'P      g = h / (1 - h d'P d)

        with h = n / (n - 1) / (f + nu) (Sherman and Morrison). Held as they are: b, a, R, the ridge and a S t_c. With
        many classes that is close to learning anew without x; with few, it is not.
        """
        noise, slope, own = (
            self.values + rho * self.base,
            self.slope(rho),
            (torch.arange(len(labels)).to(labels), labels),
        )
        square, cross, length, along = (part.float() for part in self._lengths(noise, slope))
        rows = ((images[:, : len(self.centre)] - self.centre) @ self.vectors).float()
        means, texts = self.means.float(), self.texts.float()
        noise, counts = noise.float(), self.counts[:, 0].float().expand(len(labels), -1).clone()
        away, less = rows - means[labels], 1 / (counts[own] - 1)
        near = (rows / noise) @ means.T  # y'P m_c
        turned = near - ((means / noise) @ means.T)[labels]  # d'P m_c
        reach, far = (away * rows / noise).sum(dim=1), (away.square() / noise).sum(dim=1)  # y'P d and d'P d
        gain = (1 + less) / self.images
        gain = (gain / (1 - gain * far))[:, None]
        square, cross = square.repeat(len(labels), 1), cross.repeat(len(labels), 1)
        square[own] += less * (less * far - 2 * turned[own])
        cross[own] -= less * slope * (away * texts[labels]).sum(dim=1)
        near[own] -= less * reach
        turned[own] -= less * far
        counts[own] -= 1
        near, square = near + gain * reach[:, None] * turned, square + gain * turned.square()
        shares = counts / (counts + kappas.to(counts)[:, None, None])
        by_text = slope * rows @ texts.T
        return by_text + shares * (near - by_text) + mixed(shares, omega, square, cross, length, along)


def mixed(share: Tensor, omega: float, square: Tensor, cross: Tensor, length: Tensor, along: Tensor) -> Tensor:
    """The offset of a score, from s and what `Fit._lengths` gives."""
    gaussian = share**2 * square + 2 * share * (1 - share) * cross + (1 - share) ** 2 * length
    return omega * ((1 - share) * along - share * square / 2) - (1 - omega) * gaussian / 2
