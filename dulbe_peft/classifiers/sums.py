"""What regression from h to one-hot classes keeps of the images: sums, to which every further image is added.

G = sum of h h'       column c of C = sum of h over the images of class c       h: what a unit feature z is turned into
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.checks import check_directions, positive

RIDGES = [10.0 ** (exponent / 2) for exponent in range(-8, 5)]
POWER = 0.75  # chosen on training images of three streams
CHUNK = 4096  # images whose h is in memory at a time


@dataclass(frozen=True, eq=False)
class RegressionSums:
    """G, (M, M), C transposed, (C, M), and images of each class, (C,): what a classifier keeps as its buffers.

    `lift` takes unit features, (n, d), to h, (n, M), in their type. G is added up in float64 whatever it is kept in.
    """

    gram: Tensor
    sums: Tensor
    counts: Tensor
    lift: Callable[[Tensor], Tensor]

    @staticmethod
    def register(classifier: Classifier, width: int, dtype: torch.dtype) -> None:
        """Give a classifier the empty buffers, for an h of this width and a G of this type."""
        classifier.register_rows("counts", dtype=torch.int64)
        classifier.register_rows("sums", width, dtype=torch.float64)
        classifier.register_buffer("gram", torch.zeros(width, width, dtype=dtype))

    def added(self, images: Tensor, labels: Tensor, new: int = 0) -> dict[str, Tensor]:
        """The buffers with further images in them, whose labels index all classes, the `new` last ones included."""
        gram = self.gram64()
        sums = torch.cat([self.sums, self.sums.new_zeros(new, self.sums.shape[1])])
        for rows, own in zip(images.split(CHUNK), labels.split(CHUNK), strict=True):
            lifted = self.lifted(rows)
            gram = gram + lifted.T @ lifted
            sums.index_add_(0, own.to(sums.device), lifted)
        counts = torch.bincount(labels, minlength=len(sums))
        counts[: len(self.counts)] += self.counts.to(counts.device)
        return {"gram": gram, "sums": sums, "counts": counts}

    def moved(self, matrix: Tensor) -> dict[str, Tensor]:
        """G to M' G M and C to M' C, which is exact for a linear drift where h = z."""
        matrix = matrix.to(self.sums.device)
        return {"gram": matrix.T @ self.gram @ matrix, "sums": self.sums @ matrix}

    def gram64(self) -> Tensor:
        """G in float64, where the other sums are."""
        return self.gram.to(self.sums.device).double()

    def lifted(self, images: Tensor) -> Tensor:
        """h in float64, where the sums are."""
        return self.lift(images.to(self.sums.device).double())

    def solution(self, ridge: float) -> Tensor:
        """W = (G + lambda I)^-1 C, (M, C), float64."""
        gram = self.gram64()
        identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        factor, failed = torch.linalg.cholesky_ex(gram + ridge * identity)
        while failed:  # a G that was rounded to float32 can have eigenvalues a little below zero
            ridge *= 10
            if not ridge < 1e3 * float(gram.diagonal().abs().max()):
                raise ValueError("the Gram matrix is not a sum of h h': it is damaged")
            factor, failed = torch.linalg.cholesky_ex(gram + ridge * identity)
        return torch.cholesky_solve(self.sums.T, factor)

    def errors(self, images: Tensor, labels: Tensor, ridges: Sequence[float]) -> Tensor:
        """Squared error of each ridge's solution on other images, (ridges,), from one eigendecomposition of G."""
        values, vectors = torch.linalg.eigh(self.gram64())
        lifted, sums = self.lifted(images) @ vectors, vectors.T @ self.sums.T
        truth = F.one_hot(labels.to(values.device), len(self.sums)).to(values)
        scores = (lifted @ (sums / (values.clamp_min(0) + ridge)[:, None]) for ridge in ridges)
        return torch.stack([((each - truth) ** 2).sum() for each in scores])


def class_weights(counts: Tensor) -> Tensor:
    """(mean n / n_c)^3/4, (C,), float64: without it, a class with few images would hardly ever be the answer."""
    return (counts.double().mean() / counts) ** POWER


def check_ridge(ridge: float | str, rules: Sequence[str]) -> float | str:
    """A ridge that is a positive number, or one of the rules by which it is chosen."""
    if isinstance(ridge, str) and ridge not in rules:
        raise ValueError(f"ridge must be a positive number or {' or '.join(map(repr, rules))}, got {ridge!r:.100}")
    return ridge if isinstance(ridge, str) else positive("ridge", ridge)


def best_ridge(errors: Tensor) -> float:
    """The ridge of the grid with the least error; the grid's 1 while no image was held back."""
    return RIDGES[int(errors.argmin())] if errors.any() else 1.0


def class_sums(images: Tensor, labels: Tensor, names: Sequence[str]) -> Tensor:
    """Sum of each class's (n, d) features, (classes, d), in their type; they must not cancel out."""
    sums = torch.stack([images[labels == index].sum(dim=0) for index in range(len(names))])
    check_directions(sums, names)
    return sums


def added_sums(
    kept: Mapping[str, Tensor], images: Tensor, labels: Tensor, new: Sequence[str] = ()
) -> dict[str, Tensor]:
    """The rows `sums` and `counts` with further images in them; the last classes are the `new` ones."""
    own, images = labels.to(kept["sums"].device), images.to(kept["sums"].device).double()
    sums = kept["sums"].index_add(0, own, images)
    check_directions(sums[len(sums) - len(new) :], new)
    return {"sums": sums, "counts": kept["counts"] + torch.bincount(labels, minlength=len(sums))}


def merged_rows(mine: Classifier, other: Classifier, places: Tensor, *names: str) -> dict[str, Tensor]:
    """Rows of two classifiers that add up, by name; `places` as for `Classifier.merged`."""
    rows = mine.with_new_rows(int((places >= len(mine.class_names)).sum()))
    added = {name: (rows[name], other.tensors()[name].to(rows[name])) for name in names}
    return {name: own.index_add(0, places.to(own.device), theirs) for name, (own, theirs) in added.items()}


def random_layer(embed_dim: int, features: int, seed: int) -> Tensor:
    """R, (d, M), float64, independent normal entries; the same for a seed in every version of the libraries."""
    # RandomState gives the same numbers in all versions of numpy; torch promises that for none of its generators.
    return torch.from_numpy(np.random.RandomState(seed).standard_normal((embed_dim, features)))
