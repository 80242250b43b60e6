"""Datasets of the library `datasets`: on the Hugging Face Hub, saved in a folder, or parquet files in a folder."""

import importlib
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from dulbe_peft.data.folders import SPLIT_NAMES
from dulbe_peft.data.images import LabelledImages, Splits, UnlabelledError, labelled_images
from dulbe_peft.data.names import UNLABELLED, class_key
from dulbe_peft.utils.extras import installed

HUB_PREFIX = "hf:"
SAVED_FILES = ("dataset_dict.json", "state.json")  # their presence shows that `datasets` has written a folder


def hub_images(dataset: Any, name: str, image_column: str = "image", label_column: str = "label") -> LabelledImages:
    """Return the labelled images of a `datasets.Dataset`; error messages call it `name`.

    The label column is a `ClassLabel`, or has texts or whole numbers, which become the class names.
    """
    for column in (image_column, label_column):
        if column not in dataset.column_names:
            raise ValueError(f"{name} has no column {column!r}; its columns are {dataset.column_names}")
    kind = type(dataset.features[image_column]).__name__
    if kind != "Image":
        raise ValueError(f"column {image_column!r} of {name} has {kind} values: expected images")
    names = {image_column: "image", label_column: "label"}
    rows = dataset.with_format(None).select_columns(list(names)).rename_columns(names)
    if getattr(rows.features["label"], "names", None) is None:
        rows = _with_class_label(rows, f"column {label_column!r} of {name}")
    images = labelled_images(rows)
    images.name = name
    waiting = [each for each in images.class_names if class_key(each) in UNLABELLED]
    images.notes = [f"{name}: {each!r} is read as a class; --leave-out {each!r} leaves it out" for each in waiting]
    further = dataset.with_format(None)
    images.columns = {
        column: partial(_column, further, column) for column in further.column_names if column != image_column
    }
    return images


def _column(rows: Any, name: str) -> list[object]:
    return list(rows[name][:])


def _with_class_label(rows: Any, column: str) -> Any:
    """Replace labels that are texts or whole numbers by a `ClassLabel` with the sorted values as names."""
    values = rows["label"][:]
    kinds = {type(value) for value in values}
    if kinds not in ({str}, {int}):
        listed = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(f"{column} has {listed} values: expected class names, texts or whole numbers")
    if kinds == {int} and max(values) < 0:
        raise UnlabelledError(f"all labels of {column} are {max(values)}")
    places = {value: place for place, value in enumerate(sorted(set(values)))}
    feature = import_datasets("a data set").ClassLabel(names=list(map(str, places)))
    return rows.remove_columns("label").add_column("label", [places[value] for value in values], feature=feature)


def hub_splits(text: str, *columns: str) -> Splits:
    """Return the splits of a dataset on the Hub, "hf:NAME", of a folder saved by `datasets`, or of parquet files.

    The result is empty if `text` is none of these.
    """
    files = _parquet_files(Path(text))
    saved = any(Path(text, name).is_file() for name in SAVED_FILES)
    if not (text.startswith(HUB_PREFIX) or files or saved):
        return {}
    datasets = import_datasets(text)
    read: dict[str | None, Callable[[], object]]
    if text.startswith(HUB_PREFIX):
        name = text.removeprefix(HUB_PREFIX)
        names = datasets.get_dataset_split_names(name)
        read = {split: partial(datasets.load_dataset, name, split=split) for split in names}
    elif files:
        read = {split: partial(_read_parquet, datasets, files[split]) for split in files}
    else:
        data = datasets.load_from_disk(text)  # a single Dataset has no splits
        parts = data if isinstance(data, dict) else {data.split and str(data.split): data}
        read = {split: partial(parts.get, split) for split in parts}

    def opened(split: str | None) -> LabelledImages:
        return hub_images(read[split](), text, *columns)

    return {split: partial(opened, split) for split in read}


def _read_parquet(datasets: Any, files: list[str]) -> Any:
    try:
        return datasets.Dataset.from_parquet(files)
    except Exception as error:  # for damaged files the library raises its internal errors
        raise ValueError(f"{', '.join(files)} cannot be read: {error.__cause__ or error}") from error


def _parquet_files(path: Path) -> dict[str | None, list[str]]:
    """Return the parquet files of each split in a folder, or in its folder "data" or "default".

    "train.parquet", "train-00000-of-00002.parquet" and "train/0000.parquet" belong to the split train. The key None is
    used for a single file, and for files in a folder where no name shows a split.
    """
    if path.suffix.lower() == ".parquet" and path.is_file():
        return {None: [os.fspath(path)]}
    by_split: dict[str | None, list[str]] = {}
    for folder in (path, path / "data", path / "default"):
        for file in sorted((*folder.glob("*.parquet"), *folder.glob("*/*.parquet"))) if not by_split else ():
            name = re.match(r"[^\W\d_]+", file.name if file.parent == folder else file.parent.name)
            if name and name[0].lower() in SPLIT_NAMES:
                by_split.setdefault(name[0], []).append(os.fspath(file))
    plain = sorted(map(os.fspath, path.glob("*.parquet")))
    return by_split or ({None: plain} if plain else {})


def import_datasets(name: str) -> Any:
    """Import the package `datasets` to read `name`."""
    if name.strip() == HUB_PREFIX:
        raise ValueError(f"{name} names no dataset: expected hf:NAME, such as hf:cifar10")
    with installed(f"reading {name}"):
        return importlib.import_module("datasets")
