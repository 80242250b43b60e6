"""Open the images of a check from the Hub, from an archive with CoOp's split file, or from a local folder."""

import random
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dulbe_peft.data.hub import hub_images, import_datasets
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.names import check_class_names
from dulbe_peft.data.readers import load_data
from dulbe_peft.utils.records import Record, read_record
from research.verification.checks import Data
from research.verification.fetching import HUB, WEB, Fetcher


class _Split(Record, extra="ignore"):
    """The content of CoOp's split file: path, label and class name of each image."""

    train: list[tuple[str, int, str]]
    val: list[tuple[str, int, str]]
    test: list[tuple[str, int, str]]


@dataclass(frozen=True)
class Places:
    """The paths given to the command, and `beside`, the folder to which paths in the file of checks are relative."""

    beside: Path
    images: Path | None = None
    splits: Path | None = None


def open_split(name: str, data: Data, split: str, places: Places, fetcher: Fetcher) -> LabelledImages:
    """Open one split of a check's data, with the class names for its prompts.

    Raises:
        ValueError: If the numbers of classes or images, or the class names, differ from those of the check.
        FileNotFoundError: If files are missing.
    """
    if data.source.startswith(HUB) and places.images is None:
        images = _from_hub(name, data, split, fetcher)
    elif data.splits is not None:
        images = _from_split_file(name, data, split, places, fetcher)
    else:
        images = load_data(_folder(name, data, places, fetcher), split)
    classes = len(images.class_names)
    if data.classes not in (None, classes):
        raise ValueError(f"{name} has {classes} classes, expected {data.classes}")
    expected = data.images.get(split)
    if expected not in (None, len(images)):
        raise ValueError(f"{name} has {len(images)} images in the split {split!r}, expected {expected}")
    if data.misspelt:
        corrected = [data.misspelt.get(class_name, class_name) for class_name in images.class_names]
        missing = set(data.misspelt.values()) - set(corrected)
        if missing:
            raise ValueError(f"{name} has no class {min(missing)!r}, and no misspelling of it that the check lists")
        images = images.at(slice(None), class_names=check_class_names(corrected))
    if not data.names:
        return images
    by_key = {_key(class_name): class_name for class_name in data.names}
    unknown = [class_name for class_name in images.class_names if _key(class_name) not in by_key]
    if unknown:
        raise ValueError(f"{name}: the check has no name for the class {unknown[0]!r} ({len(unknown)} such classes)")
    return images.at(slice(None), class_names=check_class_names(by_key[_key(n)] for n in images.class_names))


def _key(name: str) -> str:
    """Reduce a class name to its letters and digits, so that spellings can be compared."""
    return re.sub(r"[\W_]+", "", name).casefold()


def photograph(name: str, data: Data, places: Places, fetcher: Fetcher) -> LabelledImages:
    """Open the single photograph of a check."""
    if data.source.startswith(WEB) and places.images is None:
        path = fetcher.file(data.source, data.sha256)
    else:
        path = places.images or places.beside / data.source
        if not path.is_file():
            raise FileNotFoundError(f"{name}: the photograph {path} does not exist")
        fetcher.check(str(path), path, data.sha256)
    return LabelledImages([(path, 0)], np.zeros(1, np.int64), ("photograph",), stored=True)


def _from_hub(name: str, data: Data, split: str, fetcher: Fetcher) -> LabelledImages:
    if split not in data.files:
        known = ", ".join(data.files) or "none"
        raise ValueError(f"{name} lists no files for the split {split!r}; the listed splits are {known}")
    repo_id = data.source.removeprefix(HUB)
    paths = fetcher.hub_files(repo_id, data.files[split], fetcher.revision(repo_id, "dataset", data.revision))
    try:
        table = import_datasets(data.source).Dataset.from_parquet([str(path) for path in paths])
    except (OSError, ValueError) as error:
        raise ValueError(f"{data.source}: {paths[0].name} cannot be read: {error}") from error
    return hub_images(table, data.source, data.image_column, data.label_column)


def _folder(name: str, data: Data, places: Places, fetcher: Fetcher) -> Path:
    """Return the folder with a check's images, unpacked from an archive if necessary."""
    if places.images is not None:
        inner = places.images / data.folder
        return inner if inner.is_dir() else places.images
    if data.source.startswith(WEB):
        folder = fetcher.unpacked(data.source, data.sha256, data.inside) / data.folder
    elif data.source:
        folder = places.beside / data.source
    else:
        raise FileNotFoundError(
            f"{name}: download the images from {data.link}, and give their folder: --data {name} --images FOLDER"
        )
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{name}: the folder {folder} does not exist; --data {name} --images FOLDER gives another one"
        )
    return folder


def _from_split_file(name: str, data: Data, split: str, places: Places, fetcher: Fetcher) -> LabelledImages:
    """Return the images of one split as CoOp's split file lists them."""
    file = data.splits
    assert file is not None
    if places.splits is not None:
        path = places.splits
        fetcher.check(file.name, path, file.sha256)
    elif file.url:
        path = fetcher.file(file.url, file.sha256)
    else:
        raise FileNotFoundError(
            f"{name}: download {file.name} from {file.link}, and give its path: --data {name} --splits FILE"
        )
    rows = vars(read_record(path, _Split))
    counts = tuple(map(len, rows.values()))
    if file.images is not None and counts != file.images:
        raise ValueError(f"{path} has {counts} images for training, validation and testing, expected {file.images}")
    folder = _folder(name, data, places, fetcher)
    names = {label: class_name for part in rows.values() for _, label, class_name in part}
    if sorted(names) != list(range(len(names))):
        raise ValueError(f"{path} has the labels {sorted(names)[:5]}..., expected 0 to {len(names) - 1}")
    listed = [(folder / image, label) for image, label, _ in rows[split]]
    missing = [image for image, _ in listed if not image.is_file()]
    if missing:
        raise FileNotFoundError(f"{name}: {len(missing)} of {len(listed)} images do not exist, such as {missing[0]}")
    labels = np.array([label for _, label in listed], dtype=np.int64)
    return LabelledImages(listed, labels, [names[label] for label in range(len(names))], stored=True)


def few_shots(labels: np.ndarray, shots: int, seed: int) -> list[int]:
    """Return the indices of `shots` images of each class, drawn as in CoOp.

    The classes are in the order of their first images. A class with fewer images is drawn from with replacement.

    >>> few_shots(np.array([1, 1, 1, 0]), 2, seed=1)
    [0, 2, 3, 3]
    """
    draw, members = random.Random(seed), dict[int, list[int]]()
    for index, label in enumerate(labels.tolist()):
        members.setdefault(label, []).append(index)
    drawn: list[int] = []
    for indices in members.values():
        drawn += draw.sample(indices, shots) if len(indices) >= shots else draw.choices(indices, k=shots)
    return drawn
