"""Some classes of a data set, without its images in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dulbe_peft.data.samples import item_name, read_sample, source_item


@dataclass(eq=False, repr=False)
class ClassSubset:
    """The images of some classes of a dataset, with labels that index `class_names`.

    Attributes:
        dataset: the dataset the images come from.
        indices: positions in `dataset`, shape (n,), int64.
        labels: label of each of them in this subset, shape (n,), int64.
        class_names: names of the subset's classes.
        source_labels: the label each sample must carry in `dataset`, shape (n,), int64.
    """

    dataset: Any
    indices: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...]
    source_labels: np.ndarray

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> dict[str, Any]:
        position = int(self.indices[index])
        image, label = read_sample(self.dataset, position)
        if label != self.source_labels[index]:  # a target_transform, say, would put the image into another class
            raise ValueError(
                f"sample {position} of the dataset gives the label {label}, "
                f"but its list of labels says {self.source_labels[index]}"
            )
        return {"image": image, "label": int(self.labels[index])}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))

    def item_name(self, index: int) -> str:
        """Name of an image for messages: its path where the dataset knows it."""
        return item_name(self, index)

    def content_id(self, index: int) -> str:
        """What tells this image from others without reading it; its position where the dataset knows no better."""
        origin, position = source_item(self, index)
        content_id = getattr(origin, "content_id", None)
        return str(content_id(position)) if content_id is not None else f"#{position}"
