"""Analytic ridge regression from features to classes, solved again from two sums after every task.

W = (G + lambda I)^-1 C        G = sum of h h',   column c of C = sum of h over the images of class c,   h = z here
logits = tau w_c h' W          w_c = (mean n / n_c)^3/4, because column c of C grows with n_c
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.utils.settings import Positive

RIDGES = [10.0 ** (exponent / 2) for exponent in range(-8, 5)]
CHUNK = 4096  # images whose h is in memory at the same time
POWER = 0.75  # the best of 0, 1/4, 1/2, 3/4 and 1 on held-out training images of three streams


def class_weights(counts: Tensor) -> Tensor:
    """Return (mean n / n_c)^3/4, (C,), float64. Without it, a class with few images would hardly ever be predicted."""
    return (counts.double().mean() / counts) ** POWER


class RidgeRegression(Classifier):
    """Ridge regression from h to one-hot classes. Subclasses define h. `unit` is the scale of the grid of lambda."""

    updates = True
    # The errors add up only approximately: each classifier measured them over the classes that it knew.
    adds_up = ("counts", "sums", "gram", "errors")
    unit = 1.0
    moves = ("sums", "gram")  # exact if the drift is linear

    def _keep_sums(self, width: int, dtype: torch.dtype) -> None:
        """Register empty sums for h of this width. G is stored in `dtype`, but summed in float64."""
        self.register_rows("counts", dtype=torch.int64)
        self.register_rows("sums", width, dtype=torch.float64)
        self.register_buffer("gram", torch.zeros(width, width, dtype=dtype))
        self.register_buffer("errors", torch.zeros(len(RIDGES), dtype=torch.float64))

    def followed(self, matrix: Tensor) -> dict[str, Tensor]:
        return Classifier.moved(self, matrix)  # all sums are of h

    def added(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        rows, gram = self.with_new_rows(len(new)), self._gram()
        for part, classes in zip(images.split(CHUNK), labels.split(CHUNK), strict=True):
            lifted = self.lifted(part.to(gram))
            gram = gram + lifted.T @ lifted
            rows["sums"].index_add_(0, classes.to(gram.device), lifted)
        counts = torch.bincount(labels, minlength=len(rows["counts"])).to(rows["counts"])
        return {"gram": gram, "sums": rows["sums"], "counts": rows["counts"] + counts}

    def without_image(self, image: Tensor, label: int) -> dict[str, Tensor]:
        gram = self._gram()
        lifted = self.lifted(image[None].to(gram))
        return self.sums_without(lifted[0], label) | {"gram": gram - lifted.T @ lifted}

    def choose(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Add the squared error of every lambda on held-out images to `errors`, from one eigendecomposition of G."""
        if self.ridge != "auto":
            return {}
        values, vectors = torch.linalg.eigh(self._gram())
        sums, squares, products = self.sums @ vectors, torch.zeros_like(vectors), torch.zeros_like(values)
        for part, classes in zip(images.split(CHUNK), labels.to(sums.device).split(CHUNK), strict=True):
            lifted = self.lifted(part.to(vectors)) @ vectors
            squares += lifted.T @ lifted
            products += (lifted * sums[classes]).sum(dim=0)
        # With L lifted, S sums, T one-hot and D = diag(d): |L D S' - T|^2 = d'(L'L * S'S) d - 2 tr(T'L D S') + n.
        squares *= sums.T @ sums
        scales = (1 / (values.clamp_min(0) + ridge * self.unit) for ridge in RIDGES)
        return {
            "errors": self.errors + torch.stack([d @ squares @ d - 2 * products @ d + len(images) for d in scales])
        }

    def strength(self) -> float:
        """Return lambda; with "auto", `unit` as long as no image was held out."""
        if self.ridge != "auto":
            return float(self.ridge)
        return self.unit * (RIDGES[int(self.errors.argmin())] if self.errors.any() else 1.0)

    def logits(self, images: Tensor) -> Tensor:
        return self.logit_scale * self.lifted(images) @ self.derived("solution", self._solve)

    def left_out(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the leave-one-out scores (f - l y) / (1 - l), weighted by w_c.

        f are the scores of an image, y is its one-hot class, and l = h'(G + lambda I)^-1 h is its leverage. lambda and
        the mean of the counts do not change.
        """
        rows, factor, labels = self.lifted(images.to(self.sums)), self._factor(), labels.to(self.sums.device)
        by = torch.cholesky_solve(rows.T, factor).T
        scores, leverage = by @ self.sums.T, (by * rows).sum(dim=1, keepdim=True).clamp_max(1 - 1e-9)
        truth = torch.zeros_like(scores).scatter(1, labels[:, None], 1.0)
        counts = self.counts.to(scores)[labels, None]
        more = torch.where(truth > 0, (counts / (counts - 1)) ** POWER, 1.0)
        weights = self.logit_scale * class_weights(self.counts).to(scores) * more
        return weights * (scores - leverage * truth) / (1 - leverage)

    def _gram(self) -> Tensor:
        """Return G in float64 on the device of the other sums."""
        return self.gram.to(self.sums)

    def _solve(self) -> Tensor:
        """Return W, (M, C), times the weight of each class."""
        weights = class_weights(self.counts).to(self.sums)
        return (weights * torch.cholesky_solve(self.sums.T, self._factor())).float().to(self.device)

    def _factor(self) -> Tensor:
        """Return the Cholesky factor of G + lambda I. lambda is raised if rounding made the matrix indefinite."""
        gram, ridge = self._gram(), self.strength()
        identity = torch.eye(len(gram)).to(gram)
        factor, failed = torch.linalg.cholesky_ex(gram + ridge * identity)
        while failed:  # G rounded to float32 can have slightly negative eigenvalues
            ridge *= 10
            if not ridge < 1e3 * float(gram.diagonal().abs().max()):
                raise ValueError("the Gram matrix is not a sum of h h': it is damaged")
            factor, failed = torch.linalg.cholesky_ex(gram + ridge * identity)
        return factor


class RidgeClassifier(RidgeRegression):
    """Ridge regression from unit features to one-hot classes.

    For a fixed lambda, the solution is the same as on all data at once, in any order of images, classes and tasks.

    Args:
        ridge: lambda, positive. "auto" chooses it from 1e-4 to 100 on held-out images of each task.

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

    def register(self) -> None:
        self._keep_sums(self.embed_dim, torch.float64)
