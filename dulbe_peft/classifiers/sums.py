"""What classifiers share that keep sums over the images of each class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.checks import check_directions

POWER = 0.75  # of 0, 1/4, 1/2, 3/4 and 1 the best one on held-back training images of three streams


def class_weights(counts: Tensor) -> Tensor:
    """(mean n / n_c)^3/4, (C,), float64: without it, a class with few images would hardly ever be the answer."""
    return (counts.double().mean() / counts) ** POWER


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
