"""Analytic ridge regression from features to classes, solved anew from two sums whenever classes come.

W = (G + lambda I)^-1 C        G = sum of z z',   column c of C = sum of z over the images of class c
logits = tau w_c z' W                              w_c = (mean n / n_c)^3/4: column c of C grows with n_c
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import torch
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.sums import RIDGES, RegressionSums, best_ridge, check_ridge, class_weights, merged_rows


class RidgeRegression(Classifier):
    """Ridge regression from h to one-hot classes; a subclass says what h is. `unit` is the middle of lambda's grid."""

    unit = 1.0

    def _keep_sums(self, width: int, dtype: torch.dtype, ridge: float | str) -> None:
        """Register the empty sums, for an h of this width and a G of this type."""
        self.ridge = check_ridge(ridge, ["auto"])
        RegressionSums.register(self, width, dtype)
        self.register_buffer("errors", torch.zeros(len(RIDGES), dtype=torch.float64))

    def lifted(self, images: Tensor) -> Tensor:
        """h of unit features z, (n, d) to (n, M), in the type of `images`."""
        return images

    def _kept(self) -> RegressionSums:
        return RegressionSums(self.gram, self.sums, self.counts, self.lifted)

    def learn(self, names: Sequence[str], images: Tensor, labels: Tensor, texts: Tensor | None) -> dict[str, Tensor]:
        return self._kept().added(images, labels + len(self._class_names), len(names))

    def learn_more(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return self._kept().added(images, labels)

    def merged(self, other: Self, places: Tensor) -> dict[str, Tensor]:
        """Sums are added, and held-back errors: each task's are of the classes that its own side knew."""
        shared = {"gram": self._kept().gram64() + other._kept().gram64().to(self.sums.device)}
        errors = self.errors + other.errors.to(self.errors.device)
        return merged_rows(self, other, places, "sums", "counts") | shared | {"errors": errors}

    def choose(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Add the held-back squared error of every ridge."""
        if self.ridge != "auto":
            return {}
        return {"errors": self.errors + self._kept().errors(images, labels, [ridge * self.unit for ridge in RIDGES])}

    def strength(self) -> float:
        """lambda."""
        return self.unit * best_ridge(self.errors) if self.ridge == "auto" else float(self.ridge)

    def logits(self, images: Tensor) -> Tensor:
        return self.logit_scale * self.lifted(images) @ self.derived("solution", self._solve)

    def _solve(self) -> Tensor:
        weights = class_weights(self.counts).to(self.sums.device)
        return (weights * self._kept().solution(self.strength())).float().to(self.device)


class RidgeClassifier(RidgeRegression):
    """Least squares with a ridge from the unit features themselves to one-hot classes.

    G and C are exact sums in float64, so the solution for a lambda is the one on all data at once, whatever the order
    of images, classes and tasks.

    Args:
        ridge: lambda, positive, fixed as in the papers; G's trace is the number of images. "auto": chosen on held-back
            images of each task, from 1e-4 to 100.

    Attributes:
        gram: G, float64.
        sums: C transposed, float64.
        counts: (C,), int64, images of each class.
        errors: held-back squared error of each ridge of the grid, over all tasks, float64.

    Reference:
        Zhuang et al., "ACIL: Analytic Class-Incremental Learning", 2022, and "GACL", 2024, equation 5, with the
        identity in place of the random layer.
    """

    name = "ridge"
    gram: Tensor
    sums: Tensor
    counts: Tensor
    errors: Tensor

    def __init__(self, embed_dim: int, logit_scale: float = 100.0, ridge: float | Literal["auto"] = "auto") -> None:
        super().__init__(embed_dim, logit_scale)
        self._keep_sums(embed_dim, torch.float64, ridge)

    def moved(self, matrix: Tensor) -> dict[str, Tensor]:
        return self._kept().moved(matrix)
