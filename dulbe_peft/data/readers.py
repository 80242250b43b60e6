"""Images on disk: a folder per class, parquet files or a saved folder of `datasets`, or a dataset of the Hub."""

import os
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

from dulbe_peft.data.decoding import ARCHIVES, why_not_read
from dulbe_peft.data.digits import load_digit_images
from dulbe_peft.data.features import feature_splits
from dulbe_peft.data.folders import TABLES, ImageFolder, subfolders
from dulbe_peft.data.hub import HUB_PREFIX, hub_images, hub_splits, import_datasets
from dulbe_peft.data.images import LabelledImages, Splits

DEMO_DIGITS = "demo-digits"  # the name of the handwritten digits that come with the package
# Named, not imported: tables are the application's.
LABEL_TABLES, METADATA = (f"dulbe_peft.photos.data.labels:{name}_splits" for name in ("label", "metadata"))
_HUB_NAME = re.compile(r"(?!.*\.(?i:csv)$)[\w.-]+(/[\w.-]+)?")  # no table of labels is one


def load_data(
    path_or_name: str | os.PathLike[str],
    split: str | None = "train",
    *,
    image_column: str = "image",
    label_column: str = "label",
    vocabulary: str | None = None,
    path_column: str | None = None,
    leave_out: Sequence[str] | None = None,
) -> LabelledImages:
    """Open a dataset by what its path is.

    Args:
        path_or_name: a folder of images; a table of features, which is a parquet file, or a folder of such files,
            with the columns `embedding` and `label`; a folder of the library `datasets`, written by `save_to_disk` or
            with files such as `train.parquet` and `test.parquet` in it or in its folder `data`; "hf:" and the name of
            a dataset on the Hugging Face hub; a table with the columns path, label and perhaps split, or with
            SourceFile and Subject, as exiftool prints them; or "demo-digits", the package's handwritten digits.
        split: the split to read; None for a folder of classes without splits.
        image_column: column with the images, where the dataset is one of Hugging Face.
        label_column: column with the labels, where the dataset is one of Hugging Face, or a table.
        vocabulary: file with the keywords that are classes, one a line, where exiftool's keywords are the labels.
        path_column: column with the paths of the images, where a table of labels is read.
        leave_out: in a folder of images, classes and folders in them that are no part of the data.

    Returns:
        A data set: `len`, items {"image": upright PIL image in RGB, "label": int}, `labels` and `class_names`.

    Raises:
        FileNotFoundError: there is nothing under this path, or it lacks the split.
        ImportError: the package `datasets` is needed and not installed.
        ValueError: the path is a file, or what is there does not have the layout.
    """
    columns, text = (image_column, label_column), os.fspath(path_or_name)
    if text.startswith(HUB_PREFIX) and split is not None:  # without asking the Hub for the splits
        data = import_datasets(text).load_dataset(text.removeprefix(HUB_PREFIX), split=split)
        return hub_images(data, text, *columns)
    found = splits(text, *columns, vocabulary, path_column, leave_out)
    if split == "train" and list(found) == [None]:
        split = None
    if split in found:
        return found[split]()
    if {None} < found.keys():
        return ImageFolder(text, split, leave_out or ())  # which says what its folders are
    raise FileNotFoundError(f"{text} has no split {split!r}; its splits are {list(filter(None, found))}")


def splits(
    text: str,
    image_column: str = "image",
    label_column: str = "label",
    vocabulary: str | None = None,
    path_column: str | None = None,
    leave_out: Sequence[str] | None = None,
) -> Splits:
    """The splits of what `load_data` takes, by their names, each opened by a call."""
    path = Path(text)
    check_data(text)
    if found := feature_splits(path) or hub_splits(text, image_column, label_column):
        return found
    tables: Splits = {}
    if path.suffix.lower() in TABLES and path.is_file():
        tables = resolve_name(LABEL_TABLES)(path, vocabulary, path_column, label_column)
    elif path.is_dir():
        tables = resolve_name(METADATA)(path, label_column)
    if tables:
        return tables
    if path.is_dir():
        return {name: partial(ImageFolder, path, name, leave_out or ()) for name in (*subfolders(path), None)}
    if text == DEMO_DIGITS:
        return {name: partial(load_digit_images, name) for name in ("train", "test")}
    suffix, expected = path.suffix.lower(), "expected a folder of images or of parquet files, or a .csv of labels"
    raise ValueError(f"{path} is a file, {why_not_read(suffix) if suffix in ARCHIVES else expected}")


def check_data(text: str) -> None:
    """Raise a `FileNotFoundError` where nothing is under a path, and it names no other data."""
    if Path(text).exists() or text.startswith(HUB_PREFIX) or text == DEMO_DIGITS:
        return
    hub = f'; a dataset of the Hugging Face hub is written "hf:{text}"' if _HUB_NAME.fullmatch(text) else ""
    raise FileNotFoundError(f"{text} does not exist{hub}")
