"""Keep exact sums over images: count and sum for each class, and the scatter W within the classes.

The sums add up over images, tasks and merged classifiers, and a class or an image can be subtracted again.
"""

import math
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.checks import check_directions


class ClassSums(Classifier):
    """Keep n_c, n_c m_c and W in float64. They are sums of x, (d,), to which `lifted` maps a feature.

    Attributes:
        sums: n_c m_c, (C, d), float64.
        counts: n_c, (C,), int64.
        scatter: W, (d, d), float64, sum of (x - m_c)(x - m_c)' over all images.
        freedom: f, int64, number of images minus number of classes.
        factors: F_c of all classes, one after another, (rows, d), float64. F_c'F_c is the contribution of class c to
            W, and F_c has at most min(n_c, d) rows. Kept only if `exact_forgetting` is set; otherwise the contribution
            of a forgotten class stays in W.
        factor_rows: Number of rows of each F_c, (C,), int64. Kept only if `exact_forgetting` is set.
    """

    exact_forgetting = False  # a subclass may make it a setting
    updates = True
    adds_up: ClassVar[tuple[str, ...] | None] = ()
    moves = ("sums", "scatter", "factors")  # the part of the drift that is not linear is not added to W

    def keep_sums(self, width: int) -> None:
        """Register empty sums for x of this width."""
        self.register_rows("sums", width, dtype=torch.float64)
        self.register_rows("counts", dtype=torch.int64)
        self.register_buffer("scatter", torch.zeros(width, width, dtype=torch.float64))
        self.register_buffer("freedom", torch.zeros((), dtype=torch.int64))
        if self.exact_forgetting:
            self.register_rows("factor_rows", dtype=torch.int64)
            self.register_rows("factors", width, dtype=torch.float64, of="factor_rows")

    def followed(self, matrix: Tensor) -> dict[str, Tensor]:
        return Classifier.moved(self, matrix)  # all sums are of x

    def added(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        images, labels = self.lifted(images.to(self.sums)), labels.to(self.sums.device)
        counts = labels.bincount(minlength=len(self.counts) + len(new))
        sums = images.new_zeros(len(counts), images.shape[1]).index_add(0, labels, images)
        check_directions(sums[len(sums) - len(new) :, : self.embed_dim], new)
        several = counts[labels] > 1
        rows = (images - (sums / counts.clamp_min(1)[:, None])[labels])[several]
        freedom = counts.sum() - (counts > 0).sum()
        return self._joined(sums, counts, rows.T @ rows, freedom, rows, labels[several])

    def merged(self, other: Self, places: Tensor) -> dict[str, Tensor]:
        places = places.to(self.sums.device)
        number = len(self._class_names) + int((places >= len(self._class_names)).sum())
        sums, counts = (
            rows.new_zeros(number, *rows.shape[1:]).index_copy(0, places, rows)
            for rows in (other.sums.to(places.device), other.counts.to(places.device))
        )
        rows, labels = sums[:0], places[:0]
        if self.exact_forgetting:
            rows, labels = other.factors, places.repeat_interleave(other.factor_rows)
        joined = self._joined(sums, counts, other.scatter, other.freedom, rows, labels)
        return super().merged(other, places) | joined

    def _joined(
        self, sums: Tensor, counts: Tensor, scatter: Tensor, freedom: Tensor, rows: Tensor, labels: Tensor
    ) -> dict[str, Tensor]:
        """Return the buffers after adding the sums and factors of further images.

        W also grows by the distance between the old and the new mean of each class.
        """
        kept = self.with_new_rows(len(counts) - len(self._class_names))
        kept = {name: rows.to(self.sums.device) for name, rows in kept.items()}
        both = ((kept["counts"] > 0) & (counts > 0)).nonzero()[:, 0]
        old, new = (each[both, None].to(sums) for each in (kept["counts"], counts))
        apart = (kept["sums"][both] / old - sums[both] / new) * (old * new / (old + new)).sqrt()
        changes = {
            "sums": kept["sums"] + sums,
            "counts": kept["counts"] + counts,
            "scatter": self.scatter + scatter + apart.T @ apart,
            "freedom": self.freedom + freedom + len(both),
        }
        if not self.exact_forgetting:
            return changes
        owners = torch.arange(len(counts)).to(labels).repeat_interleave(kept["factor_rows"])
        owners, factors = torch.cat([owners, labels, both]), torch.cat([self.factors, rows, apart])
        factors, sizes = factors[owners.argsort(stable=True)], owners.bincount(minlength=len(counts))
        if (sizes > factors.shape[1]).any():
            parts = factors.split(sizes.tolist())
            parts = [part if len(part) <= part.shape[1] else torch.linalg.qr(part, mode="r").R for part in parts]
            factors, sizes = torch.cat(parts), sizes.clamp(max=factors.shape[1])
        return changes | {"factors": factors, "factor_rows": sizes}

    def forgotten(self, kept: Tensor) -> dict[str, Tensor]:
        changes = super().forgotten(kept)
        if self.exact_forgetting:
            factors, counts = changes["factors"], changes["counts"]
            changes |= {"scatter": factors.T @ factors, "freedom": counts.sum() - len(counts)}
        return changes

    def without_image(self, image: Tensor, label: int) -> dict[str, Tensor]:
        """Subtract v v', v = sqrt(n / (n - 1)) (x - m_c), from the contribution of the class to W; see `downdated`."""
        images, lifted = int(self.counts[label]), self.lifted(image[None].to(self.sums))[0]
        row = (images / (images - 1)) ** 0.5 * (lifted - self.sums[label] / images)
        changes = self.sums_without(lifted, label) | {"freedom": self.freedom - 1}
        check_directions(changes["sums"][[label], : self.embed_dim], [self._class_names[label]])
        if not self.exact_forgetting:
            return changes | {"scatter": self.scatter - torch.outer(row, row)}
        parts = list(self.factors.split(self.factor_rows.tolist()))
        parts[label] = downdated(parts[label], row)[: images - 2]
        sizes = torch.tensor([len(part) for part in parts]).to(self.factor_rows)
        factors = torch.cat(parts)
        return changes | {"factors": factors, "factor_rows": sizes, "scatter": factors.T @ factors}


def downdated(factor: Tensor, row: Tensor) -> Tensor:
    """Return G, (n, d), with G'G = F'F - v v' for a `factor` F, (n, d), and a `row` v, (d,), in the span of its rows.

    With v = F'a, one solution is F - b a v', b = (1 - sqrt(1 - a'a)) / a'a. G is this matrix, rotated so that the
    lengths of its rows decrease. The last row is 0 if the rows of F were linearly independent.
    """
    along = torch.linalg.pinv(factor.T) @ row
    length = min(1.0, float(along @ along))
    share = (1 - math.sqrt(1 - length)) / length if length else 0.0
    _, sizes, directions = torch.linalg.svd(factor - share * torch.outer(along, row), full_matrices=False)
    return sizes[:, None] * directions
