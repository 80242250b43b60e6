"""Checks that classifiers share: of settings, of labels and sums, and of values that a file holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dulbe_peft.utils.checks import check_number


def positive(name: str, value: Any, tiny: bool = False) -> float:
    """`value` as a float, which must be positive and finite; `tiny` as for `check_number`."""
    check_number(name, value, positive=True, tiny=tiny)
    return float(value)


def class_sums(images: torch.Tensor, labels: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """Sum of each class's features, (classes, d), in the type of `images`; they must not cancel out."""
    sums = torch.stack([images[labels == index].sum(dim=0) for index in range(len(names))])
    check_directions(sums, names)
    return sums


def check_directions(sums: torch.Tensor, names: Sequence[str]) -> None:
    """Raise a ValueError that names a class whose unit features add up to nothing; `sums` is (classes, d)."""
    cancelled = sums.norm(dim=1) < 1e-4
    if cancelled.any():
        name = names[int(cancelled.nonzero()[0])]
        raise ValueError(f"features of class {name!r} cancel out: they have no mean direction")


def check_labels(labels: Any, count: int, names: Sequence[str]) -> torch.Tensor:
    """`labels` as a tensor of int64, after a check that there are `count` of them and that they index `names`."""
    try:
        indices = torch.as_tensor(labels)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"labels must be integers, got {labels!r:.100}") from error
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise TypeError(f"labels must be integers, got {indices.dtype}")
    if indices.shape != (count,):
        raise ValueError(f"labels must be ({count},), one per image, got shape {tuple(indices.shape)}")
    indices = indices.long()
    bad = (indices < 0) | (indices >= len(names))
    if bad.any():
        raise ValueError(f"label {indices[bad][0].item()} is out of range for {len(names)} classes")
    return indices


def check_counts(counts: torch.Tensor) -> None:
    """Raise a ValueError unless every class has at least one image."""
    if (counts < 1).any():
        raise ValueError(f"counts must be at least 1, got {int(counts.min())}")


def check_unit_rows(name: str, rows: torch.Tensor) -> None:
    """Raise a ValueError unless every row has norm 1, within the rounding of half precision."""
    if ((rows.float().norm(dim=1) - 1).abs() > 1e-2).any():
        raise ValueError(f"{name} must hold unit vectors")


def check_symmetric(name: str, matrix: torch.Tensor) -> None:
    """Raise a ValueError unless a sum of outer products can be this matrix, as far as its entries tell."""
    scale = float(matrix.diagonal().abs().max())
    if (matrix.diagonal() < -1e-6 * scale).any():
        raise ValueError(f"{name} has a negative diagonal")
    if float((matrix - matrix.T).abs().max()) > 1e-4 * scale:
        raise ValueError(f"{name} is not symmetric")
