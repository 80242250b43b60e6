"""Labels from a table, or the keywords of photographs as exiftool prints them."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from dulbe_peft.data.decoding import image_suffixes
from dulbe_peft.data.folders import SPLIT_NAMES, FileImages, folder_content, like_splits, subfolders
from dulbe_peft.data.images import Splits
from dulbe_peft.data.names import normalized
from dulbe_peft.photos.data.columns import FILE, LABEL, Table, open_table
from dulbe_peft.utils.files import read_lines
from dulbe_peft.utils.terminal import counted

ROOT = "dulbe"  # of the keywords that are guesses, which tells them from a person's
BETWEEN = ", "  # what exiftool puts between keywords
_BETWEEN = re.compile(r"\s*(?:,|;|##)\s*")  # with -sep, people put other signs there
NO_CLASS, NO_LABEL, TWICE = "no keyword is a class", "no label in the table", "a row that stands in the table twice"
NOT_UTF8 = "the name is not UTF-8"
METADATA = ("metadata.csv", "metadata.jsonl")  # in which Hugging Face's image folders have labels
SHOWN = 5  # conflicts that a message names


def label_splits(
    path: Path, vocabulary: str | None = None, path_column: str | None = None, label_column: str = LABEL
) -> Splits:
    """The images that a table names, by split, see `load_data`; rows without a label or a keyword are left out."""
    table = open_table(path, path_column, label_column)
    if table.keywords:
        return {None: _by_keyword(table, vocabulary)}
    if vocabulary is not None:
        raise ValueError(f"{path} has labels, and a vocabulary is for keywords ({FILE}, Subject): leave it out")
    return _splits_of(table, path.parent)


def metadata_splits(folder: Path, label_column: str = LABEL) -> Splits:
    """The splits of Hugging Face's image folder, with `metadata.csv` or `.jsonl` in it or in the folders of splits."""

    def opened(place: Path) -> Table | None:
        files = (place / name for name in METADATA if (place / name).is_file())
        return next((open_table(file, None, label_column) for file in files), None)

    if (table := opened(folder)) is not None:
        return _splits_of(table, folder, by_folder=True)
    found: Splits = {}
    for name in like_splits(subfolders(folder)):
        if (table := opened(folder / name)) is not None:
            found |= _splits_of(table, folder / name, split=name)
    return found


def _splits_of(table: Table, root: Path, split: str | None = None, by_folder: bool = False) -> Splits:
    """The images of a table by split: its column, its own name, or `by_folder` that in which the images lie."""
    found: dict[str | None, list[tuple[str, str]]] = {}
    left_out: list[tuple[str, str]] = []
    seen, conflicts = dict[str, tuple[str, str | None, int]](), list[str]()
    spelt = _paths(table)
    for number, row in enumerate(table.rows, start=2):
        image, label = spelt[number - 2], normalized(table.label_of(row, number))
        own = split or table.split_of(row)
        if by_folder and own is None and image.split("/")[0].lower() in SPLIT_NAMES:
            own = image.split("/")[0]
        why = NO_LABEL if not label else "" if image.encode("utf-8", "ignore").decode() == image else NOT_UTF8
        if own == "":
            raise ValueError(f"line {number} of {table.path} has no {table.split}")
        first = (label, own, number) if why else seen.setdefault(_place(table.path, image), (label, own, number))
        if why or (first[:2] == (label, own) and first[2] != number):
            left_out.append((str(root / image), why or TWICE))
        elif first[2] == number:
            found.setdefault(own, []).append((image, label))
        else:
            differ = 0 if first[0] != label else 1  # else it stands in two splits
            one, other = f"{first[differ]!r} in line {first[2]}", f"{(label, own)[differ]!r} in line {number}"
            conflicts.append(f"{image!r} is {one} and {other}")
    if conflicts:
        more = [f"and {len(conflicts) - SHOWN} more"] * (len(conflicts) > SHOWN)
        raise ValueError(f"{table.path} names images twice: {'; '.join([*conflicts[:SHOWN], *more])}")
    _check_single(table, {label for rows in found.values() for _, label in rows})
    if not found:
        raise ValueError(f"{table.path} has no row with a label in {table.label!r}")
    return {name: _images(table, root, name, rows, left_out) for name, rows in found.items()}


def _images(
    table: Table, root: Path, split: str | None, rows: list[tuple[str, str]], left_out: list[tuple[str, str]]
) -> Callable[[], FileImages]:
    return partial(FileImages, root, split, rows, left_out, table.notes)


def _check_single(table: Table, labels: set[str]) -> None:
    """Raise where a cell has several labels: what stands between signs is a part of other labels, too."""
    cut = {label: {part.strip() for part in re.split(r"[|;,]", label)} for label in labels}
    parts = Counter(part for several in cut.values() for part in several)
    for label, several in sorted(cut.items()):
        if (len(several) > 1 and all(parts[part] > 1 for part in several)) or re.fullmatch(r"\[.*\]|\{.*\}", label):
            raise ValueError(f"{table.path} has the labels {label!r} in one cell: an image has one class")


def _paths(table: Table) -> list[str]:
    """The paths of a table as they lead to files: with slashes, with a suffix, and in the folder where they are."""
    paths = [row[table.paths] for row in table.rows]
    for number, path in enumerate(paths, start=2):
        if not path:
            raise ValueError(f"line {number} of {table.path} has no {table.paths}")
        if "://" in path:
            raise ValueError(f"line {number} of {table.path} has an address, {path:.100}: download the images first")
    root = table.path.parent
    spelt = [path if "\\" not in path or os.path.lexists(root / path) else path.replace("\\", "/") for path in paths]
    lost = {path for path in spelt if not os.path.lexists(root / path)}
    if not lost:
        return spelt
    places: dict[str, list[str]] = {}
    for place in folder_content(root)[0]:
        for name in {place, os.path.splitext(place)[0]}:
            places.setdefault(os.path.basename(name), []).append(place)
    meant = dict[str, str]()
    for path in lost:
        stem = f"/{os.path.splitext(path)[0] if path.lower().endswith(image_suffixes()) else path}"
        ends = [one for one in places.get(os.path.basename(path), []) if f"/{one}".rpartition(".")[0].endswith(stem)]
        if len(ends) == 1:
            meant[path] = ends[0]
    if meant:
        path, place = min(meant.items())
        table.notes.append(
            f"{table.path}: {counted(len(meant), 'path')} of images elsewhere, such as {path} at {place}"
        )
    return [meant.get(path, path) for path in spelt]


def _by_keyword(table: Table, vocabulary: str | None) -> Callable[[], FileImages]:
    path = table.path
    if vocabulary is None:
        raise ValueError(f"{path} has keywords: a vocabulary, a file with a line for each that is a class, is needed")
    classes = {normalized(line.strip()) for line in read_lines(vocabulary)}
    for name, sign in ((name, _BETWEEN.search(name)) for name in classes):
        if sign:
            raise ValueError(
                f"the class {name!r} of {vocabulary} has {sign[0]!r} in it, which ends a keyword: rename it"
            )
    keywords: dict[str, tuple[str, dict[str, None]]] = {}
    for row in table.rows:
        # A photograph and its sidecar are one.
        image = _photograph(path.parent, row[table.paths])
        words = dict.fromkeys(word for column in table.keywords for word in _words(row[column]))
        keywords.setdefault(_place(path, image), (image, {}))[1].update(words)
    found, left_out = list[tuple[str, str]](), list[tuple[str, str]]()
    for image, words in keywords.values():
        named = [word for word in words if word in classes]
        if len(named) > 1:
            both = " and ".join(map(repr, named))
            why = f"and both are classes: a photograph has one. Take one away, there or in {vocabulary}"
            raise ValueError(f"{image} has the keywords {both}, {why}")
        if named:
            found.append((image, named[0]))
        else:
            left_out.append((str(path.parent / image), NO_CLASS))
    if not found:
        raise ValueError(
            f"no photograph of {path} has a keyword of {vocabulary}, such as {min(classes, default='')!r}"
        )
    return _images(table, path.parent, None, found, left_out)


def _words(cell: str) -> list[str]:
    """The keywords of a cell; of a hierarchical one, such as animals|cat, also the last part. Guesses are none."""
    words = [normalized(word) for word in _BETWEEN.split(cell.strip())]
    person = [word for word in words if word.split("|")[0] != ROOT]
    return [part for word in person for part in dict.fromkeys((word, word.rpartition("|")[2].strip()))]


def _place(table: Path, name: str) -> str:
    """One spelling of a path in a table: `./a.png` is `a.png`."""
    return os.path.normpath(os.path.join(os.path.abspath(table.parent), name))


def _photograph(folder: Path, name: str) -> str:
    """The photograph of a sidecar: IMG.jpg of IMG.jpg.xmp, or of IMG.xmp where it is the only one; else the name."""
    if not name.lower().endswith(".xmp"):
        return name
    stem = name[: -len(".xmp")]
    if stem.lower().endswith(image_suffixes()):
        return stem
    beside = (folder / name).parent
    same = [
        one.name for one in beside.glob("*") if one.stem == Path(stem).name and one.suffix.lower() in image_suffixes()
    ]
    if len(same) != 1:
        raise ValueError(f"{name} is the sidecar of no photograph, or of several: {sorted(same)}")
    return str(Path(name).with_name(same[0]))


def exiftool_rows(answers: Iterable[tuple[str, str]], root: str) -> list[list[str]]:
    """A table that `exiftool -csv+=FILE -sep ', '` takes: each photograph's class as a keyword below `root`.

    A sidecar that is there already, IMG.jpg.xmp or IMG.xmp, has a row, too: exiftool passes over rows of other files.
    """
    rows, stems = [[FILE, "HierarchicalSubject"]], dict[str, str]()
    for image, name in answers:
        if "|" in name or BETWEEN in name:
            raise ValueError(
                f"the class {name!r} has '|' or {BETWEEN!r} in it, which divides keywords: rename it first"
            )
        for file in (image, f"{image}.xmp", f"{os.path.splitext(image)[0]}.xmp"):
            if file != image and not os.path.isfile(file):
                continue
            if stems.setdefault(file, image) != image:
                raise ValueError(
                    f"{file} is the sidecar of {stems[file]} and of {image}: rename one of the photographs"
                )
            rows.append([file, f"{root}|{name}"])
    return rows
