"""Datasets of the Hugging Face library `datasets`, from its hub or saved in a folder."""

from __future__ import annotations

import importlib
import io
import os
from pathlib import Path
from typing import Any

from dulbe_peft.data.rows import row_source, undecoded
from dulbe_peft.data.samples import StoredImages, carried_class_names, dataset_labels

SAVED_FILES = ("dataset_dict.json", "state.json")  # what marks a folder that `datasets` has written


class HubImages(StoredImages):
    """A Hugging Face `datasets.Dataset` with an image column and a `ClassLabel` column.

    The images are decoded here and not by `datasets`, which would try every format that Pillow knows.

    Args:
        dataset: one split.
        name: what messages call it.
        image_column: column with the images.
        label_column: column with the labels.

    Raises:
        ValueError: a column is missing or the labels have no names.
    """

    def __init__(self, dataset: Any, name: str, image_column: str = "image", label_column: str = "label") -> None:
        for column in (image_column, label_column):
            if column not in dataset.column_names:
                raise ValueError(f"{name} has no column {column!r}; its columns are {dataset.column_names}")
        if getattr(dataset.features[label_column], "names", None) is None:
            raise ValueError(
                f"column {label_column!r} of {name} has no class names; make it one with class_encode_column"
            )
        columns = dataset.with_format(None).select_columns([image_column, label_column])
        for old, new in ((image_column, "image"), (label_column, "label")):
            if old != new:
                columns = columns.rename_column(old, new)
        stored = undecoded(columns)
        if stored is None:
            kind = type(columns.features["image"]).__name__
            raise ValueError(f"column {image_column!r} of {name} holds {kind} values, and no images")
        self.name = name
        self.dataset = stored
        self.labels = dataset_labels(columns)
        self.class_names = carried_class_names(columns)

    def item_name(self, index: int) -> str:
        """The dataset and the row."""
        return f"{self.name}[{index}]"

    def item_source(self, index: int) -> io.BytesIO | str:
        """What Pillow opens: the bytes of an image, or the path of a file on this machine."""
        return row_source(self.dataset[index]["image"], f"image {index} ({self.item_name(index)})")


def import_datasets() -> Any:
    """The package `datasets`."""
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            'reading a Hugging Face dataset needs the package datasets: pip install "dulbe_peft[datasets]"'
        ) from error


def load_saved(path: Path, split: str | None) -> Any:
    """One split of what `save_to_disk` wrote."""
    saved = import_datasets().load_from_disk(str(path))
    if hasattr(saved, "keys"):
        if split not in saved:
            raise FileNotFoundError(f"{path} has no split {split!r}; its splits are {sorted(saved)}")
        return saved[split]
    if split is not None and saved.split is not None and str(saved.split) != split:
        raise FileNotFoundError(f"{path} holds the split {str(saved.split)!r} alone, not {split!r}")
    return saved


def is_saved(path: Path) -> bool:
    """Whether `datasets` has written this folder."""
    return any((path / name).is_file() for name in SAVED_FILES)


def hub_splits(name: str | os.PathLike[str]) -> list[str]:
    """Names of the splits of a dataset on the hub, "hf:NAME", or of a folder that `save_to_disk` wrote."""
    text = os.fspath(name)
    if text.startswith("hf:"):
        return list(import_datasets().get_dataset_split_names(text.removeprefix("hf:")))
    saved = import_datasets().load_from_disk(text)
    if hasattr(saved, "keys"):
        return list(saved)
    return [] if saved.split is None else [str(saved.split)]
