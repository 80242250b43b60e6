"""Analytic ridge regression from features to classes, solved anew from two sums whenever classes come.

W = (G + lambda I)^-1 C        G = sum of h h',   column c of C = sum of h over the images of class c
logits = tau h' W              h: what an image's unit feature is turned into
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import torch
from torch.nn import functional as F

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.checks import check_counts, check_symmetric, positive

RIDGES = [10.0 ** (exponent / 2) for exponent in range(-8, 5)]
RIDGE_UNCHOSEN = 1.0
CHUNK = 4096  # images whose h is in memory at a time


class RegressionSums(Classifier):
    """What regression from h to classes keeps of the images; a subclass says what h is, and solves.

    Args:
        embed_dim: d, width of the features.
        logit_scale: tau.
        width: M, width of h.
        dtype: of G, which is added up in float64 whatever it is kept in.
        unit: what the ridges of the grid are multiples of.
        ridge: lambda itself, positive, or one of `rules`, by which it is chosen from the grid.

    Attributes:
        rules: names of the ways in which lambda can be chosen.
        gram: G, (M, M).
        sums: C transposed, (C, M), float64.
        counts: (C,), int64, images of each class.
    """

    rules: ClassVar[tuple[str, ...]] = ("auto",)
    gram: torch.Tensor
    sums: torch.Tensor
    counts: torch.Tensor

    def __init__(
        self,
        embed_dim: int,
        logit_scale: float,
        width: int,
        dtype: torch.dtype,
        unit: float,
        ridge: float | str,
    ) -> None:
        super().__init__(embed_dim, logit_scale)
        self.unit = unit
        if isinstance(ridge, str) and ridge not in self.rules:
            raise ValueError(
                f"ridge must be a positive number or {' or '.join(map(repr, self.rules))}, got {ridge!r:.100}"
            )
        self.ridge = ridge if isinstance(ridge, str) else positive("ridge", ridge)
        self.register_rows("counts", dtype=torch.int64)
        self.register_rows("sums", width, dtype=torch.float64)
        self.register_buffer("gram", torch.zeros(width, width, dtype=dtype))

    @abstractmethod
    def lifted(self, images: torch.Tensor) -> torch.Tensor:
        """h of unit features z, (n, d) to (n, M), in the type of `images`."""

    @abstractmethod
    def strength(self) -> float:
        """lambda."""

    def learn(
        self, names: Sequence[str], images: torch.Tensor, labels: torch.Tensor, texts: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        return self.added(images, labels + len(self._class_names), len(names))

    def learn_more(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.added(images, labels, 0)

    def added(self, images: torch.Tensor, labels: torch.Tensor, new: int) -> dict[str, torch.Tensor]:
        """The sums with further images in them, whose labels index all classes, the `new` last ones included."""
        gram = self.gram.to(self.sums.device).double()
        sums = torch.cat([self.sums, self.sums.new_zeros(new, self.sums.shape[1])])
        for rows, own in zip(images.split(CHUNK), labels.split(CHUNK), strict=True):
            lifted = self.lifted(rows.to(sums.device).double())
            gram = gram + lifted.T @ lifted
            sums.index_add_(0, own.to(sums.device), lifted)
        counts = torch.bincount(labels, minlength=len(sums))
        counts[: len(self.counts)] += self.counts.to(counts.device)
        return {"gram": gram, "sums": sums, "counts": counts}

    def moved_sums(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        """G to M' G M and C to M' C, which is exact for a linear drift where h = z."""
        matrix = matrix.to(self.sums.device)
        return {"gram": matrix.T @ self.gram @ matrix, "sums": self.sums @ matrix}

    def check_state(self, state: Mapping[str, torch.Tensor]) -> None:
        check_counts(state["counts"])
        check_symmetric("gram", state["gram"])


class RidgeSums(RegressionSums):
    """Ridge regression toward zero, with the lambda that errs least on held-back images; see `RegressionSums`.

    Attributes:
        errors: held-back squared error of each ridge of the grid, over all tasks, float64.
    """

    errors: torch.Tensor

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.register_buffer("errors", torch.zeros(len(RIDGES), dtype=torch.float64))

    def strength(self) -> float:
        if self.ridge != "auto":
            return float(self.ridge)
        return self.unit * (RIDGES[int(self.errors.argmin())] if self.errors.any() else RIDGE_UNCHOSEN)

    def choose(self, images: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Add the held-back squared error of every ridge, all from one eigendecomposition of G."""
        if self.ridge != "auto":
            return {}
        values, vectors = torch.linalg.eigh(self.gram.to(self.sums.device).double())
        lifted = self.lifted(images.to(values.device).double()) @ vectors
        sums = vectors.T @ self.sums.T
        truth = F.one_hot(labels.to(values.device), len(self.sums)).to(values)
        errors = self.errors.to(values.device, copy=True)
        for number, ridge in enumerate(RIDGES):
            scores = lifted @ (sums / (values.clamp_min(0) + ridge * self.unit)[:, None])
            errors[number] += ((scores - truth) ** 2).sum()
        return {"errors": errors}

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        return self.logit_scale * self.lifted(images) @ self.derived("solution", self._solve)

    def _solve(self) -> torch.Tensor:
        gram = self.gram.to(self.sums.device).double()
        identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        ridge = self.strength()
        factor, failed = torch.linalg.cholesky_ex(gram + ridge * identity)
        while failed:  # a G that was rounded to float32 can have eigenvalues a little below zero
            ridge *= 10
            if not ridge < 1e3 * float(gram.diagonal().abs().max()):
                raise ValueError(f"the Gram matrix of the {self.name!r} classifier is not a sum of h'h: it is damaged")
            factor, failed = torch.linalg.cholesky_ex(gram + ridge * identity)
        return torch.cholesky_solve(self.sums.T, factor).float().to(self.device)

    def check_state(self, state: Mapping[str, torch.Tensor]) -> None:
        super().check_state(state)
        if (state["errors"] < 0).any():
            raise ValueError("errors must not be negative")


class RidgeClassifier(RidgeSums):
    """Least squares with a ridge from the unit features themselves, h = z, to one-hot classes.

    G and C are exact sums in float64, so the solution for a lambda is the one on all data at once, whatever the order
    of images, classes and tasks.

    Args:
        embed_dim: d, width of the features.
        logit_scale: tau.
        ridge: lambda, positive, fixed as in the papers; G's trace is the number of images. "auto": chosen on held-back
            images of each task, from 1e-4 to 100.

    Reference:
        Zhuang et al., "ACIL: Analytic Class-Incremental Learning", 2022, and "GACL", 2024, equation 5, with the
        identity in place of the random layer.
    """

    name = "ridge"

    def __init__(self, embed_dim: int, logit_scale: float = 100.0, ridge: float | Literal["auto"] = "auto") -> None:
        super().__init__(embed_dim, logit_scale, embed_dim, torch.float64, 1.0, ridge)

    def lifted(self, images: torch.Tensor) -> torch.Tensor:
        return images

    def moved(self, matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        return self.moved_sums(matrix)
