"""Streaming linear discriminant analysis: one Gaussian per class, all with the same covariance.

Sigma = (1 - s) W / f + s (tr W / f d) I      W: scatter within the classes, f: its degrees of freedom
m_c = b + w_c (mu_c - b)                      b: mean of all mu_c,  w_c = n_c / (n_c + k) over that of the largest n
score = z' Sigma^-1 m_c - m_c' Sigma^-1 m_c / 2
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from annotated_types import Gt, Le
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.class_sums import ClassSums
from dulbe_peft.classifiers.covariance import (
    ROUNDING,
    oas_share,
    oas_shrinkage,
    shrunk_covariance,
    solved,
    without_group,
)
from dulbe_peft.classifiers.groups import rows_by_group
from dulbe_peft.classifiers.keeping import takes
from dulbe_peft.classifiers.leaving import Left, choose
from dulbe_peft.classifiers.state import Fitted, State, once
from dulbe_peft.utils.settings import Weight


@dataclass(frozen=True)
class LdaRule(ClassSums):
    """Gaussian classes with one shared, shrunk covariance and equal prior probabilities.

    The result is the same as on all data at once, in any order of images, classes and tasks.

    Args:
        logit_scale: tau. The covariance is I / tau as long as no class has two different images.
        shrinkage: The share s, above 0 and at most 1. Shrinks the covariance toward its mean variance times the
            identity. "oas" computes s from the covariance and its degrees of freedom.
        prior_images: Number k of additional images at b that each class is assumed to have, relative to the largest
            class. With 0, or if all counts are equal, m_c = mu_c.

    Attributes:
        sums: See `ClassSums`, also for `counts`.
        scatter: See `ClassSums`, also for `freedom`. The contributions of forgotten classes remain in both.

    Reference:
        Hayes and Kanan, "Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis", 2020, with
        exact sums; Chen et al., "Shrinkage Algorithms for MMSE Covariance Estimation", 2010, equation 23 (OAS).
    """

    shrinkage: Annotated[float, Gt(0), Le(1)] | Literal["oas"] = "oas"
    prior_images: Weight = 1.0

    name = "lda"
    summary = (
        "linear discriminant analysis: an image goes to the nearest class mean, with distances scaled by "
        "the spread within classes"
    )

    def fitted(self, state: State) -> Gaussians:
        return Gaussians.of(self, state)

    def judged(
        self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None
    ) -> tuple[State, Left | None]:
        left = choose(images := images.to(state.sums), labels, groups, state.counts)
        if not len(left.rows) or state.classes < 2:
            return state, None
        scores = self.left_out(state, images[left.rows], left.labels, left.groups)
        return state, replace(left, scores=scores)

    def left_out(self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor:
        """Return the leave-one-out scores in float64; see `Rule.left_out`.

        Without an image z of class c, with u = z - mu_c, n = n_c, P = Sigma^-1, and with b, s, f and tr W as before,

            mu_c becomes mu_c - u / (n - 1)        Sigma becomes Sigma - h u u',  h = (1 - s) n / ((n - 1) f)
            P becomes P + g P u u' P,  g = h / (1 - h u' P u)                     (Sherman and Morrison)

        Without a group, everything changes, see `_without_group`.
        """
        images, labels, means = images.to(state.sums), labels.to(state.sums.device), self.fitted(state).means
        if groups is not None:
            found = images.new_zeros(len(images), state.classes)
            for rows in rows_by_group(groups.to(labels)):
                found[rows] = self._without_group(state, images[rows], labels[rows])
            return found
        freedom, n = int(state.freedom), state.counts.to(labels.device)[labels].double()
        share = oas_shrinkage(state.scatter / freedom, freedom) if self.shrinkage == "oas" else float(self.shrinkage)
        inverse = torch.linalg.inv(self.fitted(state).covariance)
        away = images - means[labels]
        left = self.drawn(means, means[labels] - away / (n - 1)[:, None], n - 1, int(state.counts.max()))
        means = self.drawn(means, means, state.counts)
        by_image, by_away = images @ inverse, away @ inverse
        across, turned, squares = by_image @ means.T, by_away @ means.T, (means @ inverse * means).sum(dim=1)
        squares = squares.expand_as(across).clone()
        targets = torch.arange(len(labels)), labels
        across[targets], turned[targets] = (by_image * left).sum(dim=1), (by_away * left).sum(dim=1)
        squares[targets] = (left @ inverse * left).sum(dim=1)
        length, along = (by_away * away).sum(dim=1), (by_away * images).sum(dim=1)
        shift = (1 - share) / freedom * n / (n - 1)
        gain = (shift / (1 - shift * length))[:, None]
        return across + gain * along[:, None] * turned - (squares + gain * turned.square()) / 2

    def _without_group(self, state: State, images: Tensor, labels: Tensor) -> Tensor:
        """Return the scores of learned images, (m, d), of a group by everything computed without them; float64.

        In the basis of the eigenvectors of W, with V of `covariance.without_group` and W less V'V,

            tr W becomes tr W - |V|^2        |W|^2 becomes |W|^2 - 2 tr(V W V') + |V V'|^2        f is f - m

        which give s and Sigma; its inverse is that of `covariance.solved`.
        """
        values, vectors, means = self.fitted(state).eigenvectors
        images = images @ vectors
        means, counts, down = without_group(means, state.counts.to(means), images, labels)
        freedom, width = int(state.freedom) - len(images), len(values)
        trace = float(values.sum() - down.square().sum())
        if freedom == 0 or trace / max(freedom, 1) / width < ROUNDING:
            noise, down = torch.full_like(values, 1 / self.logit_scale), down[:0]
        else:
            square = values.square().sum() - 2 * (down.square() @ values).sum() + (down @ down.T).square().sum()
            found = oas_share(float(square) / freedom**2, trace / freedom, freedom, width)
            share = found if self.shrinkage == "oas" else float(self.shrinkage)
            noise = (1 - share) / freedom * values + share * trace / freedom / width
            down = ((1 - share) / freedom) ** 0.5 * down
        means = self.drawn(means, means, counts)
        by_means = solved(means, noise, down, -1)
        return images @ by_means.T - (by_means * means).sum(dim=1) / 2

    def drawn(self, every: Tensor, means: Tensor, counts: Tensor, most: int = 0) -> Tensor:
        """Return m_c for some means mu_c, (m, d), and their numbers of images, (m,), in float64.

        `every`, (C, d), are the means of all classes, and `most` is the largest number of images, by default that of
        `counts`.
        """
        middle, most = every.mean(dim=0), most or (int(counts.max()) if len(counts) else 1)
        confidence = (1 + self.prior_images / most) / (1 + self.prior_images / counts.to(means))
        return middle + confidence[:, None] * (means - middle)

    def scores(self, state: State, images: Tensor) -> Tensor:
        weights, offsets = self.fitted(state).solution
        return images @ weights - offsets


class Gaussians(Fitted):
    """The Gaussians of the classes, and the discriminant that they give."""

    rule: LdaRule
    reads = ("sums", "counts", "scatter", "freedom")

    @once
    def means(self) -> Tensor:
        """mu_c, (C, d), float64."""
        return self.state.sums / self.state.counts.to(self.state.sums)[:, None]

    @once
    def covariance(self) -> Tensor:
        """Sigma, (d, d), float64, shrunk."""
        rule, state = self.rule, self.state
        return shrunk_covariance(state.scatter, int(state.freedom), rule.shrinkage, 1 / rule.logit_scale)

    @once
    def eigenvectors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The eigenvalues and eigenvectors of W, and the mu_c in their basis."""
        values, vectors = torch.linalg.eigh(self.state.scatter)
        return values.clamp_min(0), vectors, self.means @ vectors

    @once
    def solution(self) -> tuple[Tensor, Tensor]:
        """The weights, (d, C), and the offsets, (C,), of the scores; float32."""
        factor, failed = torch.linalg.cholesky_ex(self.covariance)
        if failed:
            raise ValueError(
                f"the covariance cannot be inverted with shrinkage {self.rule.shrinkage!r}: use a larger value, or "
                "'oas'"
            )
        means = self.rule.drawn(self.means, self.means, self.state.counts)
        weights = torch.cholesky_solve(means.T, factor)
        offsets = (means * weights.T).sum(dim=1) / 2
        return weights.float().to(self.state.device), offsets.float().to(self.state.device)


class LdaClassifier(Classifier, rule=LdaRule, example="embed_dim=8"):
    """Linear discriminant analysis of the images; its settings are those of `LdaRule`."""

    rule: LdaRule
    sums: Tensor
    counts: Tensor
    scatter: Tensor

    if TYPE_CHECKING:

        @takes(LdaRule)
        def __init__(self) -> None: ...

    @property
    def means(self) -> Tensor:
        """mu_c, (C, d), float64."""
        return self.rule.fitted(self.state).means

    def covariance(self) -> Tensor:
        """Return Sigma, (d, d), float64, shrunk."""
        return self.rule.fitted(self.state).covariance
