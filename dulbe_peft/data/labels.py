"""Read labels from a table, or from keywords of photographs as exiftool prints them."""

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from dulbe_peft.data.camtrap import OBSERVATIONS, is_camtrap, open_camtrap, table_in
from dulbe_peft.data.columns import FILE, LABEL, Table, open_table
from dulbe_peft.data.decoding import image_suffixes
from dulbe_peft.data.folders import SPLIT_NAMES, FileImages, like_splits, subfolders
from dulbe_peft.data.images import Splits
from dulbe_peft.data.names import check_class_names, class_key, normalized
from dulbe_peft.data.table_paths import paths_of
from dulbe_peft.utils.files import read_lines
from dulbe_peft.utils.terminal import counted

ROOT = "dulbe"  # the parent of keywords that are predictions, which distinguishes them from a person's keywords
BETWEEN = ", "  # exiftool's separator of keywords
_BETWEEN = re.compile(r"\s*(?:,|;|##)\s*")  # exiftool's option -sep sets other separators
NO_CLASS, NO_LABEL, TWICE = "no keyword is a class", "no label in the table", "the row repeats an earlier one"
SEVERAL = "a box of another class in the image"
METADATA = ("metadata.csv", "metadata.jsonl")  # the label files of Hugging Face's image folders
Rows = list[tuple[str, str, dict[str, str]]]  # the path and the label of each image, and its row in the table
SHOWN = 5  # how many conflicts a message lists


@dataclass(frozen=True)
class Reading:
    """How labelled images are read: the arguments of `load_data` of the same names."""

    image_column: str = "image"
    label_column: str = LABEL
    vocabulary: str | None = None
    path_column: str | None = None
    leave_out: Sequence[str] = ()
    one_label: bool = False
    machine_labels: bool = False


def label_splits(path: Path, reading: Reading) -> Splits:
    """Return the images of a table by split, as `load_data` does. Rows without a label or keyword are left out."""
    if is_camtrap(path.parent) and path == table_in(path.parent, OBSERVATIONS):
        return _camtrap_splits(path.parent, reading)
    table = open_table(path, reading.path_column, reading.label_column, reading.one_label)
    if table.keywords and reading.one_label:
        raise ValueError(f"one_label is for a column of labels, but {path} has keywords: leave it out")
    if table.keywords:
        return {None: _by_keyword(table, reading.vocabulary)}
    if reading.vocabulary is not None:
        raise ValueError(f"{path} has labels, but a vocabulary is only for keywords ({FILE}, Subject): leave it out")
    return _splits_of(table, path.parent)


def metadata_splits(folder: Path, reading: Reading) -> Splits:
    """Return the splits of a Camtrap DP package or of a Hugging Face image folder; {} for another folder.

    An image folder has a metadata file at its top or one in each split.
    """

    def open_metadata(parent: Path) -> Table | None:
        files = (parent / name for name in METADATA if (parent / name).is_file())
        return next((open_table(file, None, reading.label_column, reading.one_label) for file in files), None)

    if is_camtrap(folder):
        return _camtrap_splits(folder, replace(reading, path_column=None, vocabulary=None))
    if (table := open_metadata(folder)) is not None:
        return _splits_of(table, folder, by_folder=True)
    splits: Splits = {}
    for name in like_splits(subfolders(folder)):
        if (table := open_metadata(folder / name)) is not None:
            splits |= _splits_of(table, folder / name, split=name)
    return splits


def _camtrap_splits(folder: Path, reading: Reading) -> Splits:
    given = {"path column": reading.path_column, "vocabulary": reading.vocabulary}
    given["label column"] = None if reading.label_column == LABEL else reading.label_column
    if wrong := [f"{what} {value!r}" for what, value in given.items() if value is not None]:
        raise ValueError(f"{folder} is a Camtrap DP package, whose columns are fixed: leave out the {wrong[0]}")
    return _splits_of(open_camtrap(folder, reading.machine_labels), folder)


def _splits_of(table: Table, root: Path, split: str | None = None, by_folder: bool = False) -> Splits:
    """Return the images of a table by split.

    The split of an image is `split` if given, else the value in the table's column of splits, else, with `by_folder`,
    the folder of the image if it is named like a split.
    """
    by_split: dict[str | None, Rows] = {}
    left_out: list[tuple[str, str]] = []
    seen, conflicts = dict[str, tuple[str, str | None, int]](), list[str]()
    paths = paths_of(table)
    labels = [normalized(table.label_of(index)) for index in range(len(paths))]
    boxes = _other_boxes(table, paths, labels)
    for index, (image, label) in enumerate(zip(paths, labels, strict=True)):
        row_split = split or table.split_of(index)
        if by_folder and row_split is None and image.split("/")[0].lower() in SPLIT_NAMES:
            row_split = image.split("/")[0]
        why = boxes.get(index, "") if label else NO_LABEL
        current = (label, row_split, index)
        first = current if why else seen.setdefault(_absolute(table.path, image), current)
        if why or (first[:2] == current[:2] and first[2] != index):
            left_out.append((str(root / image), why or TWICE))
        elif first[2] == index:
            by_split.setdefault(row_split, []).append((image, label, table.rows[index]))
        else:
            differing = 0 if first[0] != label else 1  # the labels differ, or else the splits
            values = (f"{row[differing]!r} in {table.at(row[2])}" for row in (first, current))
            conflicts.append(f"{image!r} is {' and '.join(values)}")
    if conflicts:
        more = [f"and {len(conflicts) - SHOWN} more"] * (len(conflicts) > SHOWN)
        raise ValueError(f"{table.path} lists images twice: {'; '.join([*conflicts[:SHOWN], *more])}")
    _check_spelling(table, labels)
    learned = [label for rows in by_split.values() for _, label, _ in rows]
    if not table.one_label:
        _check_single(table, {*learned})
    _check_repeated(table, learned)
    if not by_split:
        raise ValueError(f"{table.path} has no row with a label in {table.label!r}")
    return {name: _images(table, root, name, rows, left_out) for name, rows in by_split.items()}


def _check_spelling(table: Table, labels: Sequence[str]) -> None:
    """Raise a ValueError if a label cannot name a class, or has two spellings."""
    first: dict[str, int] = {}
    for index, label in enumerate(labels):
        before = first.setdefault(class_key(label), index) if label else index
        if labels[before] != label:
            both = f"{labels[before]!r} in {table.at(before)} and {label!r} in {table.at(index)}"
            raise ValueError(f"{table.path} has {both}, two spellings of one name: use one of them")
    for index in first.values():
        try:
            check_class_names([labels[index]])
        except ValueError as error:
            raise ValueError(f"{table.at(index)} of {table.path}: {str(error).partition(' ')[2]}") from error


def _other_boxes(table: Table, paths: Sequence[str], labels: Sequence[str]) -> dict[int, str]:
    """Return the rows of boxes that do not give their image its label, each with the reason.

    The label of an image is that of the box of which a program was most sure, or else that of most boxes.
    """
    boxes: dict[str, list[int]] = {}
    for index, (path, label) in enumerate(zip(paths, labels, strict=True)):
        if label:
            boxes.setdefault(_absolute(table.path, path), []).append(index)
    boxes = {path: rows for path, rows in boxes.items() if len({labels[index] for index in rows}) > 1}
    if not boxes or not (table.boxes or table.confidence):
        return {}
    others, undecided = dict[int, str](), 0
    for rows in boxes.values():
        weights = dict.fromkeys((labels[index] for index in rows), 0.0)
        for index in rows:
            sure = _number(table.rows[index][table.confidence]) if table.confidence else weights[labels[index]] + 1
            weights[labels[index]] = max(weights[labels[index]], sure)
        most = [label for label, weight in weights.items() if weight == max(weights.values())]
        undecided += len(most) > 1
        others |= {index: SEVERAL for index in rows if len(most) > 1 or labels[index] != most[0]}
    how = f"the highest {table.confidence!r}" if table.confidence else "most boxes"
    table.notes.append(
        f"{table.path}: {counted(len(boxes), 'image')} with boxes of several classes; each has the class with {how}"
        + (f", but {undecided}, of which two are equal, are left out" if undecided else "")
    )
    return others


def _number(cell: str) -> float:
    try:
        return float(cell.replace(",", "."))
    except ValueError:
        return 0.0


def _images(
    table: Table, root: Path, split: str | None, rows: Rows, left_out: list[tuple[str, str]]
) -> Callable[[], FileImages]:
    images = [(image, label) for image, label, _ in rows]
    return partial(FileImages, root, split, images, left_out, table.notes, [row for *_, row in rows])


def _check_single(table: Table, labels: set[str]) -> None:
    """Raise a ValueError if a cell holds several labels, and add a note where that may be meant.

    A cell does if it looks like a list, or if each of its parts between `|`, `;` or `,` also occurs in another label.
    Tags between blanks are recognised if each of them also occurs in another label, some labels contain all tags of
    others, and there are fewer tags than labels.
    """
    way_out = (
        "an image must have one class; if these are names of classes, give --one-label (one_label=True in Python)"
    )
    for separator in (r"[|;,]|##", r"\s+"):
        parts_of = {label: {part.strip() for part in re.split(separator, label)} for label in labels}
        occurrences = Counter(part for parts in parts_of.values() for part in parts)
        several = [
            label
            for label, parts in sorted(parts_of.items())
            if len(parts) > 1 and all(occurrences[part] > 1 for part in parts)
        ]
        if separator == r"\s+" and several:
            nested = any(parts_of[a] < parts_of[b] for a in labels for b in several)
            if not nested or len(occurrences) >= len(labels) or len(several) < len(labels) / 2:
                several = []
        several += [label for label in labels if re.fullmatch(r"\[.*\]|\{.*\}|.*##.*", label)]
        if several:
            raise ValueError(f"{table.path} has the labels {several[0]!r} in one cell: {way_out}")
    with_comma = sorted(label for label in labels if re.search(r"[|;,]", label))
    if with_comma:
        table.notes.append(f"{table.path}: {with_comma[0]!r} is one class, although it has a comma or the like")


MANY_LABELS = 10  # this many labels that are all different look like captions


def _check_repeated(table: Table, labels: list[str]) -> None:
    """Add a note if no label occurs twice."""
    if len(labels) >= MANY_LABELS and len(set(labels)) == len(labels):
        table.notes.append(
            f"{table.path}: each of the {len(labels)} images has a label of its own, such as {labels[0]!r:.60}: "
            "these look like captions, and each becomes a class"
        )


def _by_keyword(table: Table, vocabulary: str | None) -> Callable[[], FileImages]:
    path = table.path
    if vocabulary is None:
        raise ValueError(f"{path} has keywords: give a vocabulary, a file that lists the keywords that are classes")
    classes = {normalized(line.strip()) for line in read_lines(vocabulary)}
    for name, separator in ((name, _BETWEEN.search(name)) for name in classes):
        if separator:
            raise ValueError(
                f"the class {name!r} of {vocabulary} contains {separator[0]!r}, which separates keywords: rename it"
            )
    keywords: dict[str, tuple[str, dict[str, None], dict[str, str]]] = {}
    for row in table.rows:
        image = _photograph(path.parent, row[table.paths])  # so that a photograph and its sidecar are combined
        words = dict.fromkeys(word for column in table.keywords for word in _words(row[column]))
        keywords.setdefault(_absolute(path, image), (image, {}, row))[1].update(words)
    labelled, left_out = Rows(), list[tuple[str, str]]()
    for image, words, row in keywords.values():
        labels = [word for word in words if word in classes]
        if len(labels) > 1:
            both = " and ".join(map(repr, labels))
            why = f"which are all classes, but a photograph has one: keep only one of them, there or in {vocabulary}"
            raise ValueError(f"{image} has the keywords {both}, {why}")
        if labels:
            labelled.append((image, labels[0], row))
        else:
            left_out.append((str(path.parent / image), NO_CLASS))
    if not labelled:
        raise ValueError(
            f"no photograph of {path} has a keyword of {vocabulary}, such as {min(classes, default='')!r}"
        )
    return _images(table, path.parent, None, labelled, left_out)


def _words(cell: str) -> list[str]:
    """Return the keywords of a cell, without predictions; a hierarchical one, such as animals|cat, also gives cat."""
    words = [normalized(word) for word in _BETWEEN.split(cell.strip())]
    by_person = [word for word in words if word.split("|")[0] != ROOT]
    return [part for word in by_person for part in dict.fromkeys((word, word.rpartition("|")[2].strip()))]


def _absolute(table: Path, name: str) -> str:
    """Return the absolute, normalized path of a file in a table, so that `./a.png` equals `a.png`."""
    return os.path.normpath(os.path.join(os.path.abspath(table.parent), name))


def _photograph(folder: Path, name: str) -> str:
    """Return the photograph of a sidecar, or `name` if it is not a sidecar.

    It is IMG.jpg for IMG.jpg.xmp, and for IMG.xmp the only image file with the stem IMG.
    """
    if not name.lower().endswith(".xmp"):
        return name
    stem = name[: -len(".xmp")]
    if stem.lower().endswith(image_suffixes()):
        return stem
    beside = (folder / name).parent
    files = [file for file in beside.glob("*") if file.suffix.lower() in image_suffixes()]
    names = [file.name for file in files if file.stem == Path(stem).name]
    if len(names) != 1:
        raise ValueError(f"{name} must be the sidecar of one photograph, found {sorted(names)}")
    return str(Path(name).with_name(names[0]))
