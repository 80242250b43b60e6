"""Labels from a table: path, label and split, or the keywords of photographs as exiftool prints them."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from dulbe_peft.data.decoding import image_suffixes
from dulbe_peft.data.folders import FileImages
from dulbe_peft.data.images import Splits
from dulbe_peft.data.names import normalized
from dulbe_peft.utils.files import read_csv, read_lines

PATH, LABEL, SPLIT = "path", "label", "split"
GUESS = "class"  # of tables that suggest and predict write
FILE, KEYWORDS = "SourceFile", "Subject"  # exiftool's
BETWEEN = ", "  # what exiftool puts between keywords
NO_CLASS = "no keyword is a class"


def label_splits(path: Path, vocabulary: str | None = None) -> Splits:
    """The images that a table names, by split, see `load_data`; photographs without a keyword of it are left out."""
    rows = _table(path)
    if {FILE, KEYWORDS} <= rows[0].keys():
        return {None: _by_keyword(path, rows, vocabulary)}
    if vocabulary is not None:
        raise ValueError(f"{path} has labels, and a vocabulary is for keywords ({FILE}, {KEYWORDS}): leave it out")
    found: dict[str | None, list[tuple[str, str]]] = {}
    seen: dict[str, str] = {}
    for number, row in enumerate(rows, start=2):
        image, label = row[PATH], normalized(row[LABEL].strip())
        if (place := _place(path, image)) in seen:
            raise ValueError(f"{path} names {image!r} twice, as {seen[place]!r} and, in line {number}, as {label!r}")
        seen[place] = label
        found.setdefault(row.get(SPLIT), []).append((image, label))
    return {split: partial(FileImages, path.parent, split, images, ()) for split, images in found.items()}


def _by_keyword(path: Path, rows: list[dict[str, str]], vocabulary: str | None) -> Callable[[], FileImages]:
    if vocabulary is None:
        raise ValueError(f"{path} has keywords: a vocabulary, a file with a line for each that is a class, is needed")
    classes = {normalized(line.strip()) for line in read_lines(vocabulary)}
    for name in (name for name in classes if BETWEEN in name):
        raise ValueError(f"the class {name!r} of {vocabulary} has {BETWEEN!r} in it, which ends a keyword: rename it")
    keywords: dict[str, tuple[str, dict[str, None]]] = {}
    for row in rows:
        own = (normalized(word.strip()) for word in row[KEYWORDS].split(BETWEEN))
        # A photograph and its sidecar are one.
        image = _photograph(path.parent, row[FILE])
        keywords.setdefault(_place(path, image), (image, {}))[1].update(dict.fromkeys(own))
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
    return partial(FileImages, path.parent, None, found, left_out)


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


def _table(path: Path) -> list[dict[str, str]]:
    """The rows of a table, column -> value, of which there is one at least."""
    rows = list(filter(None, read_csv(path)))
    header = [name.strip() for name in rows[0]] if rows else []
    if GUESS in header and PATH in header and LABEL not in header:
        why = f"has guesses, the column {GUESS!r}, and no labels"
        raise ValueError(f"{path} {why}: write what is right there, and call the column {LABEL!r}")
    if not ({PATH, LABEL} <= set(header) or {FILE, KEYWORDS} <= set(header)):
        raise ValueError(
            f"{path} has the columns {header}, expected {PATH},{LABEL} and perhaps {SPLIT}, or {FILE},{KEYWORDS} as "
            "`exiftool -csv -r -Subject PHOTOS` prints them"
        )
    if len(rows) == 1:
        raise ValueError(f"{path} names no image: it has a header alone")
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(header):
            raise ValueError(f"line {number} of {path} has {len(row)} cells, expected {len(header)}")
        for column, value in zip(header, row, strict=True):
            if column in (PATH, LABEL, SPLIT) and not value.strip():
                raise ValueError(f"line {number} of {path} has no {column}")
    return [dict(zip(header, row, strict=True)) for row in rows[1:]]


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
