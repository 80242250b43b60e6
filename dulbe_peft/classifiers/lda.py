"""Streaming linear discriminant analysis: one Gaussian per class, all with the same covariance.

Sigma = (1 - s) W / f + s (tr W / f d) I      W: scatter within the classes, f: its degrees of freedom
m_c = b + w_c (mu_c - b)                      b: mean of all mu_c,  w_c = n_c / (n_c + k) over that of the largest n
score = z' Sigma^-1 m_c - m_c' Sigma^-1 m_c / 2
"""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import torch
from annotated_types import Gt, Le
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.class_sums import ClassSums
from dulbe_peft.classifiers.covariance import oas_shrinkage, shrunk_covariance
from dulbe_peft.classifiers.groups import some_left_out
from dulbe_peft.classifiers.rule import LeftOut
from dulbe_peft.classifiers.state import State
from dulbe_peft.utils.settings import Weight

MOST_JUDGED = 1000  # images of a task whose leave-one-out scores are computed


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

    def means(self, state: State) -> Tensor:
        """Return mu_c, (C, d), float64."""
        means: Tensor = state.derived("means", lambda: state.sums / state.counts.to(state.sums)[:, None])
        return means

    def judged(
        self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None
    ) -> tuple[State, LeftOut | None]:
        images, labels, groups = some_left_out(images.to(state.sums), labels, groups, state.counts, MOST_JUDGED)
        if not len(images) or state.classes < 2:
            return state, None
        return state, LeftOut(self.left_out(state, images, labels, groups), labels, groups)

    def left_out(self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor:
        """Return the leave-one-out scores in float64; see `Rule.left_out`.

        Without an image z of class c, with u = z - mu_c, n = n_c, P = Sigma^-1, and with b, s, f and tr W as before,

            mu_c becomes mu_c - u / (n - 1)        Sigma becomes Sigma - h u u',  h = (1 - s) n / ((n - 1) f)
            P becomes P + g P u u' P,  g = h / (1 - h u' P u)                     (Sherman and Morrison)

        Without a group, everything is computed again from the sums without it.
        """
        if groups is not None:
            scores = partial(LdaRule.scores, self)  # of this rule, also for a rule that is derived from it
            return self.without_groups(state, images, labels, groups, scores).to(state.sums)
        images, labels, means = images.to(state.sums), labels.to(state.sums.device), self.means(state)
        freedom, n = int(state.freedom), state.counts.to(labels.device)[labels].double()
        share = oas_shrinkage(state.scatter / freedom, freedom) if self.shrinkage == "oas" else float(self.shrinkage)
        inverse = torch.linalg.inv(self.covariance(state))
        away = images - means[labels]
        left = self._drawn(state, means[labels] - away / (n - 1)[:, None], n - 1)
        means = self._drawn(state, means, state.counts)
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

    def covariance(self, state: State) -> Tensor:
        """Return Sigma, (d, d), float64, shrunk."""
        return shrunk_covariance(state.scatter, int(state.freedom), self.shrinkage, 1 / self.logit_scale)

    def _drawn(self, state: State, means: Tensor, counts: Tensor) -> Tensor:
        """Return m_c for the means mu_c, (C, d), and the numbers of images, (C,), in float64."""
        middle, most = self.means(state).mean(dim=0), int(state.counts.max()) if state.classes else 1
        confidence = (1 + self.prior_images / most) / (1 + self.prior_images / counts.to(means))
        return middle + confidence[:, None] * (means - middle)

    def scores(self, state: State, images: Tensor) -> Tensor:
        weights, offsets = state.derived("solution", lambda: self._solve(state))
        return images @ weights - offsets

    def _solve(self, state: State) -> tuple[Tensor, Tensor]:
        factor, failed = torch.linalg.cholesky_ex(self.covariance(state))
        if failed:
            raise ValueError(
                f"the covariance cannot be inverted with shrinkage {self.shrinkage!r}: use a larger value, or 'oas'"
            )
        means = self._drawn(state, self.means(state), state.counts)
        weights = torch.cholesky_solve(means.T, factor)
        offsets = (means * weights.T).sum(dim=1) / 2
        return weights.float().to(state.device), offsets.float().to(state.device)


class LdaClassifier(Classifier, rule=LdaRule):
    rule: LdaRule

    @property
    def means(self) -> Tensor:
        """mu_c, (C, d), float64."""
        return self.rule.means(self.state)

    def covariance(self) -> Tensor:
        """Return Sigma, (d, d), float64, shrunk."""
        return self.rule.covariance(self.state)
