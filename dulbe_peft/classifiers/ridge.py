"""Analytic ridge regression from features to classes, solved again from two sums after every task.

W = (G + lambda I)^-1 C        G = sum of h h',   column c of C = sum of h over the images of class c,   h = z here
logits = tau w_c h' W          w_c = (mean n / n_c)^3/4, because column c of C grows with n_c
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.groups import rows_by_group
from dulbe_peft.classifiers.keeping import takes
from dulbe_peft.classifiers.rule import Rule, sums_without
from dulbe_peft.classifiers.state import Fitted, Layout, State, once, per_class, shared
from dulbe_peft.utils.settings import Positive

RIDGES = [10.0 ** (exponent / 2) for exponent in range(-8, 5)]
CHUNK = 4096  # images whose h is in memory at the same time
POWER = 0.75  # the best of 0, 1/4, 1/2, 3/4 and 1 on held-out training images of three streams


def class_weights(counts: Tensor) -> Tensor:
    """Return (mean n / n_c)^3/4, (C,), float64. Without it, a class with few images would hardly ever be predicted."""
    return (counts.double().mean() / counts) ** POWER


@dataclass(frozen=True)
class RidgeRegression(Rule):
    """Ridge regression from h, which `lifted` defines, to one-hot classes.

    A subclass whose h is not z defines `width`, the length of h, `unit`, the scale of the grid of lambda, and
    `gram_type`, the type in which G is kept. G is summed in float64.
    """

    if TYPE_CHECKING:  # a setting of each subclass
        ridge: Positive | Literal["auto"] = "auto"

    can: ClassVar[frozenset[str]] = frozenset({"update", "merge", "forget images", "move", "follow"})
    gram_type: ClassVar[torch.dtype] = torch.float64

    @property
    def width(self) -> int:
        return self.embed_dim

    @property
    def unit(self) -> float:
        return 1.0

    def tensors(self) -> dict[str, Layout]:
        return {
            "counts": per_class(dtype=torch.int64, adds=True, power=1),
            # Following is exact if the drift is linear.
            "sums": per_class(self.width, dtype=torch.float64, adds=True, moves=True, power=1),
            "gram": shared(self.width, self.width, dtype=self.gram_type, adds=True, moves=True, power=1),
            # They add up only approximately: each classifier measured them over the classes that it knew.
            "errors": shared(len(RIDGES), dtype=torch.float64, adds=True),
        }

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        rows, gram = state.with_new_rows(len(new)), _gram(state)
        for part, classes in zip(images.split(CHUNK), labels.split(CHUNK), strict=True):
            lifted = self.lifted(state, part.to(gram))
            gram = gram + lifted.T @ lifted
            rows["sums"].index_add_(0, classes.to(gram.device), lifted)
        counts = torch.bincount(labels, minlength=len(rows["counts"])).to(rows["counts"])
        return {"gram": gram, "sums": rows["sums"], "counts": rows["counts"] + counts}

    def without(self, state: State, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        gram = _gram(state)
        lifted = self.lifted(state, images.to(gram))
        return sums_without(state, lifted, labels) | {"gram": gram - lifted.T @ lifted}

    def strength(self, state: State) -> float:
        """Return lambda; with "auto", `unit` as long as no image was held out."""
        if self.ridge != "auto":
            return float(self.ridge)
        return self.unit * (RIDGES[int(state.errors.argmin())] if state.errors.any() else 1.0)

    def scores(self, state: State, images: Tensor) -> Tensor:
        return self.logit_scale * self.lifted(state, images) @ self.fitted(state).solution

    def left_out(self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor:
        """Return the leave-one-out scores (f - l y) / (1 - l), weighted by w_c.

        f are the scores of an image, y is its one-hot class, and l = h'(G + lambda I)^-1 h is its leverage. lambda and
        the mean of the counts do not change. For a group with scores F, (m, C), and one-hot classes Y, they are
        (I - L)^-1 (F - L Y), with the leverages L = H (G + lambda I)^-1 H' between its images.
        """
        if groups is not None:
            return self._groups_left_out(state, images, labels, groups)
        sums = state.sums
        rows, factor, labels = self.lifted(state, images.to(sums)), self.fitted(state).factor, labels.to(sums.device)
        by = torch.cholesky_solve(rows.T, factor).T
        scores, leverage = by @ sums.T, (by * rows).sum(dim=1, keepdim=True).clamp_max(1 - 1e-9)
        truth = torch.zeros_like(scores).scatter(1, labels[:, None], 1.0)
        counts = state.counts.to(scores)[labels, None]
        more = torch.where(truth > 0, (counts / (counts - 1)) ** POWER, 1.0)
        weights = self.logit_scale * class_weights(state.counts).to(scores) * more
        return weights * (scores - leverage * truth) / (1 - leverage)

    def _groups_left_out(self, state: State, images: Tensor, labels: Tensor, groups: Tensor) -> Tensor:
        rows, labels = self.lifted(state, images.to(state.sums)), labels.to(state.sums.device)
        by = torch.cholesky_solve(rows.T, self.fitted(state).factor).T
        scores, truth = by @ state.sums.T, F.one_hot(labels, state.classes).to(rows)
        counts = state.counts.to(scores)
        for of in rows_by_group(groups.to(labels)):
            leverage = by[of] @ rows[of].T
            rest = scores[of] - leverage @ truth[of]
            scores[of] = torch.linalg.solve(torch.eye(len(of)).to(leverage) * (1 + 1e-9) - leverage, rest)
            fewer = (counts / (counts - truth[of].sum(dim=0))) ** POWER
            scores[of] *= self.logit_scale * class_weights(state.counts).to(scores) * fewer
        return scores

    def fitted(self, state: State) -> Solution:
        return Solution.of(self, state)


class Solution(Fitted):
    """The solution of a ridge regression."""

    rule: RidgeRegression

    def chosen(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Add the squared error of every lambda on held-out images to `errors`, from one eigendecomposition of G."""
        rule, state = self.rule, self.state
        if rule.ridge != "auto":
            return {}
        values, vectors = torch.linalg.eigh(_gram(state))
        sums, squares, products = state.sums @ vectors, torch.zeros_like(vectors), torch.zeros_like(values)
        for part, classes in zip(images.split(CHUNK), labels.to(sums.device).split(CHUNK), strict=True):
            lifted = rule.lifted(state, part.to(vectors)) @ vectors
            squares += lifted.T @ lifted
            products += (lifted * sums[classes]).sum(dim=0)
        # With L lifted, S sums, T one-hot and D = diag(d): |L D S' - T|^2 = d'(L'L * S'S) d - 2 tr(T'L D S') + n.
        squares *= sums.T @ sums
        scales = (1 / (values.clamp_min(0) + ridge * rule.unit) for ridge in RIDGES)
        errors = torch.stack([d @ squares @ d - 2 * products @ d + len(images) for d in scales])
        return {"errors": state.errors + errors}

    @once
    def solution(self) -> Tensor:
        """W, (M, C), float32, times the weight of each class."""
        state = self.state
        weights = class_weights(state.counts).to(state.sums)
        return (weights * torch.cholesky_solve(state.sums.T, self.factor)).float().to(state.device)

    @once
    def factor(self) -> Tensor:
        """The Cholesky factor of G + lambda I. lambda is raised if rounding made the matrix indefinite."""
        gram, ridge = _gram(self.state), self.rule.strength(self.state)
        identity = torch.eye(len(gram)).to(gram)
        factor, failed = torch.linalg.cholesky_ex(gram + ridge * identity)
        while failed:  # G rounded to float32 can have slightly negative eigenvalues
            ridge *= 10
            if not ridge < 1e3 * float(gram.diagonal().abs().max()):
                raise ValueError("the Gram matrix is not a sum of h h': it is damaged")
            factor, failed = torch.linalg.cholesky_ex(gram + ridge * identity)
        return factor


def _gram(state: State) -> Tensor:
    """Return G in float64 on the device of the other sums."""
    return state.gram.to(state.sums)


@dataclass(frozen=True)
class RidgeRule(RidgeRegression):
    """Ridge regression from unit features to one-hot classes.

    For a fixed lambda, the solution is the same as on all data at once, in any order of images, classes and tasks.

    Args:
        ridge: Lambda, positive. "auto" chooses it from 1e-4 to 100 on held-out images of each task.

    Attributes:
        gram: G, (d, d), float64.
        sums: C transposed, (C, d), float64.
        counts: Number of images of each class, (C,), int64.
        errors: Squared error on held-out images for each lambda of the grid, summed over all tasks, (13,), float64.

    Reference:
        Zhuang et al., "ACIL: Analytic Class-Incremental Learning", 2022, and "GACL", 2024, equation 5, with the
        identity in place of the random layer.
    """

    ridge: Positive | Literal["auto"] = "auto"

    name = "ridge"
    summary = (
        "analytic ridge: a linear map from image features to classes, solved exactly and extended with every task"
    )


class RidgeClassifier(Classifier, rule=RidgeRule, example="embed_dim=8"):
    """Ridge regression on the features; its settings are those of `RidgeRule`."""

    rule: RidgeRegression
    gram: Tensor
    sums: Tensor
    counts: Tensor

    if TYPE_CHECKING:

        @takes(RidgeRule)
        def __init__(self) -> None: ...

    def strength(self) -> float:
        """Return lambda."""
        return self.rule.strength(self.state)
