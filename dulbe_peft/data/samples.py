"""What a data set is: images with labels, and where it carries them, class names.

A data set is anything with `len(dataset)` and `dataset[i]` giving a {"image", "label"} dict or an (image, label)
pair. Where the labels can be had alone (`.labels`, `.targets`, a "label" column), no image is decoded for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dulbe_peft.data.decoding import decode_image
from dulbe_peft.data.names import check_class_names, spelled_as
from dulbe_peft.data.rows import read_row

_LARGEST = int(np.iinfo(np.int64).max)


def read_sample(dataset: Any, index: int) -> tuple[Any, int]:
    """Image and label of `dataset[index]`, which may be a {"image", "label"} mapping or a pair.

    Raises:
        TypeError: the sample has another form, or its label is no integer.
        ValueError: there is no such sample, or the mapping lacks a key.
    """
    try:
        sample = read_row(dataset, index)
    except (IndexError, KeyError) as error:
        raise ValueError(f"dataset has length {len(dataset)} but no sample {index}: {error!r}") from error
    if isinstance(sample, Mapping):
        if "image" not in sample or "label" not in sample:
            raise ValueError(f"sample {index} has the keys {sorted(map(str, sample))}; 'image' and 'label' are needed")
        image, label = sample["image"], sample["label"]
    elif isinstance(sample, (tuple, list)) and len(sample) == 2:
        image, label = sample
    else:
        raise TypeError(
            f"sample {index} is a {type(sample).__name__}; "
            'it must be a {"image", "label"} mapping or an (image, label) pair'
        )
    value = np.asarray(label)
    if value.ndim or value.dtype.kind not in "iu":
        raise TypeError(f"the label of sample {index} is {label!r} of type {type(label).__name__}; it must be an int")
    if value > _LARGEST:
        raise ValueError(f"the label of sample {index} is {label!r}; labels must be at most {_LARGEST}")
    return image, int(value)


class StoredImages:
    """A data set of images in files; a reader says by `item_source` what Pillow opens, and by `item_name` where it is.

    Attributes:
        labels: (n,), int64.
        class_names: what they index.
    """

    labels: np.ndarray
    class_names: tuple[str, ...]

    def item_name(self, index: int) -> str:
        raise NotImplementedError

    def item_source(self, index: int) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is out of range for {len(self)} images")
        index = int(index) % len(self)
        image = decode_image(self.item_source(index), index, self.item_name(index))
        return {"image": image, "label": int(self.labels[index])}


def source_item(dataset: Any, index: int) -> tuple[Any, int]:
    """The data set that an image comes from, through any subsets of it, and the image's position there."""
    while hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        dataset, index = dataset.dataset, int(dataset.indices[index])
    return dataset, index


def item_name(dataset: Any, index: int) -> str:
    """Name of an image for messages: its path where the data set knows it."""
    origin, position = source_item(dataset, index)
    name = getattr(origin, "item_name", None)
    return str(name(position)) if name is not None else f"item {position}"


def _read_label(dataset: Any, index: int) -> int:
    """A sample's label; an image that the disk does not give is named as where its pixels are read."""
    try:
        return read_sample(dataset, index)[1]
    except OSError as error:
        raise ValueError(f"image {index} ({item_name(dataset, index)}) cannot be preprocessed: {error}") from error


def _label_array(values: Any, source: str) -> np.ndarray:
    """Labels as int64, refusing the bools and floats that a cast would let through."""
    if isinstance(values, (list, tuple)):
        for index, value in enumerate(values):
            if isinstance(value, (bool, np.bool_)):
                raise TypeError(f"{source}[{index}] is {value!r}; labels must be ints")
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise TypeError(f"{source} must hold one int for each image: {error}") from error
    if array.ndim != 1:
        raise ValueError(f"{source} has {array.ndim} dimensions; one label per image is needed")
    if array.dtype.kind not in "iu":
        first = f", the first is {values[0]!r}" if array.size else ""
        raise TypeError(f"{source} must hold ints, got values of type {array.dtype}{first}")
    if array.dtype.kind == "u" and array.size and array.max() > _LARGEST:
        raise ValueError(f"{source} holds {array.max()}; labels must be at most {_LARGEST}")
    return array.astype(np.int64)


def dataset_labels(dataset: Any) -> np.ndarray:
    """Labels of a dataset, int64 of shape (len(dataset),), without decoding an image wherever that is possible.

    Raises:
        TypeError: `dataset` has no length or no items, is a mapping of splits, or a label is not an int.
        ValueError: there is not one label per image, or a label is negative.
    """
    if isinstance(dataset, Mapping):
        raise TypeError(f"dataset is a mapping with the keys {sorted(map(str, dataset))}; pass one of its splits")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"dataset is a {type(dataset).__name__}; it must have __len__ and __getitem__")
    column_names = getattr(dataset, "column_names", None)
    if getattr(dataset, "labels", None) is not None:
        labels = _label_array(dataset.labels, "dataset.labels")
    elif getattr(dataset, "targets", None) is not None:
        labels = _label_array(dataset.targets, "dataset.targets")
    elif isinstance(column_names, list):
        if "label" not in column_names:
            raise ValueError(f"dataset has the columns {column_names}; name the one with the labels 'label'")
        labels = _label_array(dataset.with_format(None)["label"][:], "dataset['label']")
    elif hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        labels = dataset_labels(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
    else:
        labels = np.array([_read_label(dataset, index) for index in range(len(dataset))], dtype=np.int64)
    if len(labels) != len(dataset):
        raise ValueError(f"dataset has {len(labels)} labels but {len(dataset)} images")
    if len(labels) and labels.min() < 0:
        index = int(labels.argmin())
        raise ValueError(f"the label of sample {index} is {labels[index]}; labels must not be negative")
    return labels


def dataset_class_names(dataset: Any) -> tuple[str, ...] | None:
    """Class names a dataset carries (`.class_names`, `.classes`, `.features["label"].names`), or None."""
    for attribute in ("class_names", "classes"):
        names = getattr(dataset, attribute, None)
        if names is not None:
            return check_class_names(names)
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping) and getattr(features.get("label"), "names", None) is not None:
        return check_class_names(features["label"].names)
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        return dataset_class_names(dataset.dataset)
    return None


def carried_class_names(dataset: Any) -> tuple[str, ...]:
    """Class names of a dataset that must carry them.

    Raises:
        ValueError: it carries none.
    """
    names = dataset_class_names(dataset)
    if names is None:
        raise ValueError("the dataset carries no class names; give it an attribute class_names, a sequence of strings")
    return names


def checked_labels(dataset: Any, class_names: Sequence[str], name: str = "dataset") -> np.ndarray:
    """Labels of a dataset that must not be empty, int64 of shape (len(dataset),), each an index of `class_names`.

    Args:
        name: what messages call the dataset.

    Raises:
        TypeError: as `dataset_labels`.
        ValueError: as `dataset_labels`, or the dataset is empty, or a label is out of range.
    """
    labels = dataset_labels(dataset)
    if not len(labels):
        raise ValueError(f"{name} is empty; at least one image is needed")
    if labels.max() >= len(class_names):
        index = int(labels.argmax())
        raise ValueError(
            f"the label of {name} sample {index} is {labels[index]}; there are {len(class_names)} classes, "
            f"so labels must lie in 0..{len(class_names) - 1}"
        )
    return labels


def named_labels(
    dataset: Any, class_names: Sequence[str] | None = None, default: Sequence[str] | None = None
) -> tuple[tuple[str, ...], np.ndarray]:
    """Labels of a data set with what they mean.

    Args:
        dataset: any data set that is not empty.
        class_names: what the labels index; None: the names that the data set carries.
        default: what the labels index where neither is there; names of the same letters are spelled as in it.

    Returns:
        The class names, and the labels, int64 of shape (n,), each an index of the names.

    Raises:
        ValueError: nobody names the classes, the given names contradict those that the data set carries, or a label
            is out of range.
    """
    carried = dataset_class_names(dataset)
    names = class_names if class_names is not None else carried if carried is not None else default
    if names is None:
        raise ValueError("the dataset carries no class names; pass class_names")
    names = spelled_as(check_class_names(names), default or ())
    carried = None if carried is None else spelled_as(carried, names)
    labels = checked_labels(dataset, names)
    for label in np.unique(labels) if carried is not None else ():
        meant = carried[label] if carried and label < len(carried) else None
        if meant != names[label]:
            raise ValueError(
                f"label {label} is {names[label]!r} in class_names, but {meant!r} in the dataset's own names: leave "
                "class_names out, or give the names in the dataset's order"
            )
    return names, labels
