"""Check the features and labels that are passed to a classifier."""

from collections.abc import Sequence
from numbers import Real

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.utils.tensors import has_values

SAME_TEXT = 1e-3  # features of the same text on two devices differ by less
TOLERANCE = 1e-5  # difference that counts as rounding, relative to the largest score
ROWS = 256  # number of random features on which scores are compared


def check_default_device() -> None:
    """Raise a `ValueError` if torch would make tensors without values."""
    if torch.get_default_device().type == "meta":
        raise ValueError("torch's default device is 'meta', whose tensors have no values: set it to 'cpu' first")


def unit_features(features: object, name: str, width: int, rows: int | None, device: torch.device | str) -> Tensor:
    """Return `features`, (rows, width), normalised to unit norm, in float32 on a device.

    Raises:
        TypeError: If they are not a floating-point tensor or a NumPy array.
        ValueError: If they have another shape, or a row that is zero or not finite.
    """
    if not torch.compiler.is_compiling():  # a graph has its devices already
        check_default_device()
    if torch.device(device).type == "meta":
        raise ValueError(
            "the classifier is on the device 'meta', whose tensors have no values: make it while torch's default "
            "device is 'cpu'"
        )
    if isinstance(features, np.ndarray) and features.dtype.kind in "fiub":
        features = torch.tensor(features)
    if not isinstance(features, Tensor) or not features.is_floating_point():
        given = getattr(features, "dtype", type(features).__name__)
        raise TypeError(f"{name} must be a floating-point tensor or NumPy array, got {given}")
    if features.layout != torch.strided or features.is_meta:
        kind = "on the device 'meta', without values" if features.is_meta else f"of layout {features.layout}"
        raise ValueError(f"{name} must be a dense tensor with values, got one {kind}")
    if features.ndim != 2 or features.shape[1] != width:
        raise ValueError(f"{name} must be (rows, {width}), got shape {tuple(features.shape)}")
    if rows is not None and len(features) != rows:
        raise ValueError(f"{name} must have {rows} rows, one per seen class in order, got {len(features)}")
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    largest = features.abs().amax(dim=1, keepdim=True)
    if has_values():
        for problem, bad in (("contains NaN or infinity", ~torch.isfinite(largest)), ("is zero", largest == 0)):
            if bad.any():
                raise ValueError(f"{name} row {int(bad.nonzero()[0, 0])} {problem}")
    # Scaled first, because squares of very large or small entries exceed the range of float32.
    return F.normalize((features / largest).to(device, torch.float32), dim=1)


def check_labels(labels: object, count: int, classes: int, name: str = "labels", of: str = "image") -> Tensor:
    """Return `labels` as an int64 tensor after checking that there are `count` labels and all index a class."""
    try:
        indices = torch.tensor(labels) if isinstance(labels, np.ndarray) else torch.as_tensor(labels)
    except (RuntimeError, TypeError, ValueError) as error:
        raise TypeError(f"{name} must be integers, got {labels!r:.100}") from error
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise TypeError(f"{name} must be integers, got {indices.dtype}")
    if indices.shape != (count,):
        raise ValueError(f"{name} must be ({count},), one per {of}, got shape {tuple(indices.shape)}")
    indices = indices.long()
    bad = (indices < 0) | (indices >= classes)
    if bad.any():
        raise ValueError(f"label {indices[bad][0].item()} is out of range for {classes} classes")
    return indices


def check_directions(sums: Tensor, names: Sequence[str]) -> None:
    """Raise a `ValueError` that names a class whose unit features sum to zero; `sums` is (classes, d)."""
    cancelled = sums.norm(dim=1) < 1e-4
    if cancelled.any():
        name = names[int(cancelled.nonzero()[0])]
        raise ValueError(f"features of class {name!r} cancel out: they have no mean direction")


def random_features(width: int, device: torch.device | str = "cpu") -> Tensor:
    """Return random unit features, (256, width) in float32, which are the same in every call."""
    rows = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0))
    return F.normalize(rows, dim=1).to(device)


def same_scores(scores: Tensor, expected: Tensor) -> bool:
    """Return whether two sets of scores differ only by rounding."""
    if scores.shape != expected.shape or not torch.isfinite(scores).all():
        return False
    largest = max(1.0, float(expected.abs().max()))
    return float((scores - expected).abs().max()) <= TOLERANCE * largest


def check_share(name: str, value: float, example: float) -> float:
    """Return `value` as a float, or raise a `ValueError` unless it is between 0 and 1, both excluded."""
    if not isinstance(value, Real) or not 0 < value < 1:
        raise ValueError(f"{name} must be a number between 0 and 1, such as {example}, got {value!r}")
    return float(value)
