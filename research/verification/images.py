"""The images of a check: from the Hub, from an archive with CoOp's split of it, or from a folder that is there."""

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
    """A split file of CoOp: path, label and name of each image."""

    train: list[tuple[str, int, str]]
    val: list[tuple[str, int, str]]
    test: list[tuple[str, int, str]]


@dataclass(frozen=True)
class Places:
    """Where a person says that data is, and the folder of the file of checks, from which paths begin."""

    beside: Path
    images: Path | None = None
    splits: Path | None = None


def open_split(name: str, data: Data, split: str, places: Places, fetcher: Fetcher) -> LabelledImages:
    """One split of a check's data, with the names that its prompts use; another number of images is refused."""
    if data.source.startswith(HUB) and places.images is None:
        images = _from_hub(name, data, split, fetcher)
    elif data.splits is not None:
        images = _from_split_file(name, data, split, places, fetcher)
    else:
        images = load_data(_folder(name, data, places, fetcher), split)
    found = len(images.class_names)
    if data.classes not in (None, found):
        raise ValueError(f"{name} has {found} classes, expected {data.classes}")
    expected = data.images.get(split)
    if expected not in (None, len(images)):
        raise ValueError(f"{name} has {len(images)} images in the split {split!r}, expected {expected}")
    if data.misspelt:
        spelt = [data.misspelt.get(own, own) for own in images.class_names]
        absent = set(data.misspelt.values()) - set(spelt)
        if absent:
            raise ValueError(f"{name} has no class {min(absent)!r}, under whatever name the check knows")
        images = images.at(slice(None), class_names=check_class_names(spelt))
    if not data.names:
        return images
    by_key = {_key(wanted): wanted for wanted in data.names}
    unknown = [own for own in images.class_names if _key(own) not in by_key]
    if unknown:
        raise ValueError(f"{name}: the check has no name for the class {unknown[0]!r} ({len(unknown)} such classes)")
    return images.at(slice(None), class_names=check_class_names(by_key[_key(own)] for own in images.class_names))


def _key(name: str) -> str:
    """What tells which class is meant: letters and digits alone."""
    return re.sub(r"[\W_]+", "", name).casefold()


def photograph(name: str, data: Data, places: Places, fetcher: Fetcher) -> LabelledImages:
    """The one photograph of a check."""
    if data.source.startswith(WEB) and places.images is None:
        path = fetcher.file(data.source, data.sha256)
    else:
        path = places.images or places.beside / data.source
        if not path.is_file():
            raise FileNotFoundError(f"{name}: there is no photograph {path}")
        fetcher.check(str(path), path, data.sha256)
    return LabelledImages([(path, 0)], np.zeros(1, np.int64), ("photograph",), stored=True)


def _from_hub(name: str, data: Data, split: str, fetcher: Fetcher) -> LabelledImages:
    if split not in data.files:
        raise ValueError(f"{name} names no files of the split {split!r}; it has {', '.join(data.files) or 'none'}")
    repo_id = data.source.removeprefix(HUB)
    paths = fetcher.hub_files(repo_id, data.files[split], fetcher.revision(repo_id, "dataset", data.revision))
    try:
        table = import_datasets(data.source).Dataset.from_parquet([str(path) for path in paths])
    except (OSError, ValueError) as error:
        raise ValueError(f"{data.source}: {paths[0].name} cannot be read: {error}") from error
    return hub_images(table, data.source, data.image_column, data.label_column)


def _folder(name: str, data: Data, places: Places, fetcher: Fetcher) -> Path:
    """The folder with the images of data."""
    if places.images is not None:
        inner = places.images / data.folder
        return inner if inner.is_dir() else places.images
    if data.source.startswith(WEB):
        folder = fetcher.unpacked(data.source, data.sha256, data.inside) / data.folder
    elif data.source:
        folder = places.beside / data.source
    else:
        raise FileNotFoundError(
            f"{name}: get the images from {data.link}, and name them: --data {name} --images FOLDER"
        )
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{name}: there is no folder {folder}; --data {name} --images FOLDER names another one"
        )
    return folder


def _from_split_file(name: str, data: Data, split: str, places: Places, fetcher: Fetcher) -> LabelledImages:
    """Images as a split file lists them."""
    file = data.splits
    assert file is not None
    if places.splits is not None:
        path = places.splits
        fetcher.check(file.name, path, file.sha256)
    elif file.url:
        path = fetcher.file(file.url, file.sha256)
    else:
        raise FileNotFoundError(f"{name}: get {file.name} from {file.link}, and name it: --data {name} --splits FILE")
    rows = vars(read_record(path, _Split))
    counts = tuple(map(len, rows.values()))
    if file.images is not None and counts != file.images:
        raise ValueError(
            f"{path} has {counts} images to learn from, to validate and to test on, expected {file.images}"
        )
    folder = _folder(name, data, places, fetcher)
    names = {label: called for part in rows.values() for _, label, called in part}
    if sorted(names) != list(range(len(names))):
        raise ValueError(f"{path} has the labels {sorted(names)[:5]}..., expected 0 to {len(names) - 1}")
    listed = [(folder / image, label) for image, label, _ in rows[split]]
    absent = [image for image, _ in listed if not image.is_file()]
    if absent:
        raise FileNotFoundError(f"{name}: {absent[0]} is not there ({len(absent)} of {len(listed)} images)")
    labels = np.array([label for _, label in listed], dtype=np.int64)
    return LabelledImages(listed, labels, [names[label] for label in range(len(names))], stored=True)


def few_shots(labels: np.ndarray, shots: int, seed: int) -> list[int]:
    """The places of so many images of each class, as CoOp draws them: classes by their first image, with repeats
    where a class has fewer.

    >>> few_shots(np.array([1, 1, 1, 0]), 2, seed=1)
    [0, 2, 3, 3]
    """
    draw, members = random.Random(seed), dict[int, list[int]]()
    for place, label in enumerate(labels.tolist()):
        members.setdefault(label, []).append(place)
    found: list[int] = []
    for places in members.values():
        found += draw.sample(places, shots) if len(places) >= shots else draw.choices(places, k=shots)
    return found
