"""Open data sets: class folders, parquet files, folders saved by `datasets`, tables of labels, and Hub datasets."""

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from dulbe_peft.data.camtrap import is_camtrap
from dulbe_peft.data.decoding import ARCHIVES, why_not_read
from dulbe_peft.data.digits import load_digit_images
from dulbe_peft.data.feature_tables import feature_splits
from dulbe_peft.data.folders import FolderSplit, ImageFolder, subfolders
from dulbe_peft.data.hub import HUB_PREFIX, hub_images, hub_splits, import_datasets
from dulbe_peft.data.images import LabelledImages, Splits
from dulbe_peft.data.labels import Reading, label_splits, metadata_splits
from dulbe_peft.data.tables import is_table

DEMO_DIGITS = "demo-digits"  # name of the handwritten digits included in the package
_HUB_NAME = re.compile(r"(?!.*\.(?i:csv)$)[\w.-]+(/[\w.-]+)?")  # excludes names of tables, such as labels.csv


def load_data(
    path_or_name: str | os.PathLike[str],
    split: str | None = "train",
    *,
    image_column: str = "image",
    label_column: str = "label",
    vocabulary: str | None = None,
    path_column: str | None = None,
    leave_out: Sequence[str] | None = None,
    one_label: bool = False,
    machine_labels: bool = False,
) -> LabelledImages:
    """Open a data set, whose kind is recognised from its path.

    Args:
        path_or_name: One of

            - a folder of images, with one folder per class;
            - a feature table: a parquet file, or a folder of parquet files, with the columns `embedding` and `label`;
            - a folder written by `save_to_disk` of the library `datasets`, or with files such as `train.parquet` and
              `test.parquet` in it or in its folder `data`;
            - "hf:" and the name of a dataset on the Hugging Face Hub;
            - a table with the columns path, label and optionally split, or with SourceFile and Subject, as exiftool
              writes it;
            - "demo-digits", the handwritten digits included in the package.
        split: Split to read; None for a folder of classes without splits.
        image_column: Column with the images of a Hugging Face dataset.
        label_column: Column with the labels of a Hugging Face dataset or a table.
        vocabulary: File with the keywords that are classes, one per line, if the labels are exiftool's keywords.
        path_column: Column with the paths of the images in a table of labels.
        leave_out: Classes, or folders in classes, to skip in a folder of images.
        one_label: Whether each cell of a table of labels is one class as it is written, such as "Smith, Anna" or
            "none". Otherwise words such as none, n/a or unlabelled mean that there is no label, and cells that look
            like several labels are refused.
        machine_labels: Whether files of a Camtrap DP package that nobody identified get the label of a machine.

    Returns:
        A data set with `len`, items {"image": upright PIL image in RGB, "label": int}, `labels` and `class_names`.

    Raises:
        FileNotFoundError: If nothing exists at this path, or the split does not exist.
        ImportError: If the package `datasets` is needed and not installed.
        ValueError: If the path is a file of another kind, or the folder does not have the expected layout.
    """
    text = os.fspath(path_or_name)
    if text.startswith(HUB_PREFIX) and split is not None:  # without asking the Hub for the splits
        data = import_datasets(text).load_dataset(text.removeprefix(HUB_PREFIX), split=split)
        return hub_images(data, text, image_column, label_column)
    reading = Reading(image_column, label_column, vocabulary, path_column, leave_out or (), one_label, machine_labels)
    return split_of(splits(text, reading), text, split)


def split_of(available: Splits, text: str, split: str | None) -> LabelledImages:
    """Open one of the splits that `splits` returns for the data set `text`."""
    if split == "train" and list(available) == [None]:
        split = None
    if split in available:
        return available[split]()
    if {None} < available.keys():
        return ImageFolder(text, split)  # raises an error that lists the folders
    raise FileNotFoundError(f"{text} has no split {split!r}; its splits are {list(filter(None, available))}")


def splits(text: str, reading: Reading) -> Splits:
    """Return a function that opens each split of a data set, keyed by the split."""
    path = Path(text)
    check_data(text)
    camtrap = is_camtrap(path)  # whose tables may be parquet files
    columns = reading.image_column, reading.label_column
    if not camtrap and (available := feature_splits(path) or hub_splits(text, *columns)):
        return available
    if is_table(path) and path.is_file():
        return label_splits(path, reading)
    if path.is_dir():
        folders: Splits = {name: FolderSplit(path, name, reading.leave_out) for name in (*subfolders(path), None)}
        return metadata_splits(path, reading) or folders
    if text == DEMO_DIGITS:
        return {name: partial(load_digit_images, name) for name in ("train", "test")}
    suffix, expected = path.suffix.lower(), "expected a folder of images or of parquet files, or a .csv of labels"
    raise ValueError(f"{path} is a file: {why_not_read(suffix) if suffix in ARCHIVES else expected}")


def reading_of(text: str) -> tuple[str, frozenset[str]]:
    """Return what a data set is, in words, and the settings of `load_data` that change how it is read."""
    path = Path(text)
    if text.startswith(HUB_PREFIX):
        return "a data set of the Hub", frozenset({"image_column", "label_column"})
    if is_camtrap(path) or (is_table(path) and is_camtrap(path.parent)):
        return "a Camtrap DP package", frozenset({"machine_labels"})
    if feature_splits(path):
        return "a table of features", frozenset()
    if hub_splits(text, "image", "label"):
        return "a data set of parquet files", frozenset({"image_column", "label_column"})
    if path.is_file():
        return "a table of labels", frozenset({"label_column", "path_column", "vocabulary", "one_label"})
    if path.is_dir() and metadata_splits(path, Reading()):
        return "a folder with labels in a table", frozenset({"label_column", "one_label"})
    return "a folder of classes", frozenset()


def check_data(text: str) -> None:
    """Raise a `FileNotFoundError` if a path does not exist and is not the name of a data set either."""
    if (text and Path(text).exists()) or text.startswith(HUB_PREFIX) or text == DEMO_DIGITS:
        return
    hub = f'; to load a dataset from the Hugging Face Hub, write "hf:{text}"' if _HUB_NAME.fullmatch(text) else ""
    raise FileNotFoundError(f"{text or repr(text)} does not exist{hub}")
