"""Keep exact sums over images: count and sum for each class, and the scatter W within the classes.

The sums add up over images, tasks and merged classifiers, and a class or an image can be subtracted again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from dulbe_peft.classifiers.checks import check_directions
from dulbe_peft.classifiers.rule import Rule, sums_without
from dulbe_peft.classifiers.state import Layout, State, per_class, shared


@dataclass(frozen=True)
class ClassSums(Rule):
    """Keep n_c, n_c m_c and W in float64. They are sums of x, (d,), to which `lifted` maps a feature.

    Attributes:
        sums: The n_c m_c, (C, d), float64.
        counts: The n_c, (C,), int64.
        scatter: W, (d, d), float64, sum of (x - m_c)(x - m_c)' over all images.
        freedom: Number of images minus number of classes, int64.
        factors: F_c of all classes, one after another, (rows, d), float64. F_c'F_c is the contribution of class c to
            W, and F_c has at most min(n_c, d) rows. Kept only if `exact_forgetting` is set; otherwise the contribution
            of a forgotten class stays in W.
        factor_rows: Number of rows of each F_c, (C,), int64. Kept only if `exact_forgetting` is set.
    """

    exact_forgetting = False  # a subclass may make it a setting
    can: ClassVar[frozenset[str]] = frozenset({"update", "merge", "forget images", "move", "follow"})

    @property
    def width(self) -> int:
        """Length of x."""
        return self.embed_dim

    def tensors(self) -> dict[str, Layout]:
        sums = {
            # The part of the drift that is not linear is not added to W.
            "sums": per_class(self.width, dtype=torch.float64, moves=True, power=1),
            "counts": per_class(dtype=torch.int64, power=1),
            "scatter": shared(self.width, self.width, dtype=torch.float64, moves=True, power=1),
            "freedom": shared(dtype=torch.int64),
        }
        if not self.exact_forgetting:
            return sums
        factors = per_class(self.width, dtype=torch.float64, of="factor_rows", moves=True, power=0.5)
        return sums | {"factor_rows": per_class(dtype=torch.int64), "factors": factors}

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        images, labels = self.lifted(state, images.to(state.sums)), labels.to(state.sums.device)
        counts = labels.bincount(minlength=len(state.counts) + len(new))
        sums = images.new_zeros(len(counts), images.shape[1]).index_add(0, labels, images)
        check_directions(sums[len(sums) - len(new) :, : self.embed_dim], new)
        several = counts[labels] > 1
        rows = (images - (sums / counts.clamp_min(1)[:, None])[labels])[several]
        freedom = counts.sum() - (counts > 0).sum()
        return self._joined(state, sums, counts, rows.T @ rows, freedom, rows, labels[several])

    def merged(self, state: State, other: State, places: Tensor) -> dict[str, Tensor]:
        places = places.to(state.sums.device)
        number = state.classes + int((places >= state.classes).sum())
        sums, counts = (
            rows.new_zeros(number, *rows.shape[1:]).index_copy(0, places, rows)
            for rows in (other.sums.to(places.device), other.counts.to(places.device))
        )
        rows, labels = sums[:0], places[:0]
        if self.exact_forgetting:
            rows, labels = other.factors, places.repeat_interleave(other.factor_rows)
        joined = self._joined(state, sums, counts, other.scatter, other.freedom, rows, labels)
        return super().merged(state, other, places) | joined

    def _joined(
        self,
        state: State,
        sums: Tensor,
        counts: Tensor,
        scatter: Tensor,
        freedom: Tensor,
        rows: Tensor,
        labels: Tensor,
    ) -> dict[str, Tensor]:
        """Return the tensors after adding the sums and factors of further images.

        W also grows by the distance between the old and the new mean of each class.
        """
        kept = state.with_new_rows(len(counts) - state.classes)
        kept = {name: rows.to(state.sums.device) for name, rows in kept.items()}
        both = ((kept["counts"] > 0) & (counts > 0)).nonzero()[:, 0]
        old, new = (each[both, None].to(sums) for each in (kept["counts"], counts))
        apart = (kept["sums"][both] / old - sums[both] / new) * (old * new / (old + new)).sqrt()
        changes = {
            "sums": kept["sums"] + sums,
            "counts": kept["counts"] + counts,
            "scatter": state.scatter + scatter + apart.T @ apart,
            "freedom": state.freedom + freedom + len(both),
        }
        if not self.exact_forgetting:
            return changes
        owners = torch.arange(len(counts)).to(labels).repeat_interleave(kept["factor_rows"])
        owners, factors = torch.cat([owners, labels, both]), torch.cat([state.factors, rows, apart])
        factors, sizes = factors[owners.argsort(stable=True)], owners.bincount(minlength=len(counts))
        if (sizes > factors.shape[1]).any():
            parts = factors.split(sizes.tolist())
            parts = [part if len(part) <= part.shape[1] else torch.linalg.qr(part, mode="r").R for part in parts]
            factors, sizes = torch.cat(parts), sizes.clamp(max=factors.shape[1])
        return changes | {"factors": factors, "factor_rows": sizes}

    def forgotten(self, state: State, kept: Tensor) -> dict[str, Tensor]:
        changes = super().forgotten(state, kept)
        if self.exact_forgetting:
            factors, counts = changes["factors"], changes["counts"]
            changes |= {"scatter": factors.T @ factors, "freedom": counts.sum() - len(counts)}
        return changes

    def without(self, state: State, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        changes: dict[str, Tensor] = {}
        for image, label in zip(images, labels.tolist(), strict=True):
            changes |= self._without_image(state.replaced(changes), image, label)
        return changes

    def _without_image(self, state: State, image: Tensor, label: int) -> dict[str, Tensor]:
        """Subtract v v', v = sqrt(n / (n - 1)) (x - m_c), from the contribution of the class to W; see `downdated`."""
        images, lifted = int(state.counts[label]), self.lifted(state, image[None].to(state.sums))
        row = (images / (images - 1)) ** 0.5 * (lifted[0] - state.sums[label] / images)
        changes = sums_without(state, lifted, torch.tensor([label])) | {"freedom": state.freedom - 1}
        if not self.exact_forgetting:
            return changes | {"scatter": state.scatter - torch.outer(row, row)}
        parts = list(state.factors.split(state.factor_rows.tolist()))
        parts[label] = downdated(parts[label], row)[: images - 2]
        sizes = torch.tensor([len(part) for part in parts]).to(state.factor_rows)
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
