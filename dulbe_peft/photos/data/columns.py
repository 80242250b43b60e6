"""A table of labels as programs write it: which rows it has, and which columns say what."""

import codecs
import csv
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from dulbe_peft.data.decoding import image_suffixes
from dulbe_peft.utils.files import unguarded

PATH, LABEL, SPLIT = "path", "label", "split"
GUESS, NOVELTY = "class", "novelty"  # of tables that suggest and predict write
FILE = "SourceFile"  # exiftool's
KEYWORDS = {"subject", "keywords", "hierarchicalsubject", "weightedflatsubject", "lastkeywordxmp", "tagslist"}
# What the columns are called in tables of others, in lower case.
_PATHS = (
    *(PATH, "file_name", "filename", "file", "file_path", "filepath", "image", "image_path", "image_name", "photo"),
    *("img", "img_path", "image_id", "imageid", "id"),
)
_LABELS = (LABEL, "labels", "class", "class_name", "classname", "category", "target", "species", "breed")
_SPLITS = (SPLIT, "set", "subset", "is_valid")
_NO_VALUE = {"", "nan", "null", "<na>", "#n/a"}  # as programs write what is not there
_YES, _NO = {"1", "1.0", "true"}, {"0", "0.0", "false", ""}


@dataclass
class Table:
    """The rows of a table, column -> value, and what its columns are."""

    path: Path
    rows: list[dict[str, str]]
    paths: str = PATH
    label: str = LABEL
    split: str | None = None
    one_hot: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    notes: list[str] = field(default_factory=list)  # what was guessed, in sentences

    def label_of(self, row: dict[str, str], number: int) -> str:
        """The label of a row, or "" where it has none."""
        if not self.one_hot:
            return "" if row[self.label].lower() in _NO_VALUE else row[self.label]
        named = [name for name in self.one_hot if row[name].lower() in _YES]
        if len(named) > 1:
            raise ValueError(f"line {number} of {self.path} has the labels {named}: an image has one")
        return "".join(named)

    def split_of(self, row: dict[str, str]) -> str | None:
        """The split of a row, or None where the table has none."""
        if self.split is None or self.split.lower() != "is_valid":
            return None if self.split is None else row[self.split]
        return "valid" if row[self.split].lower() in _YES else "train"


def open_table(path: Path, path_column: str | None = None, label_column: str = LABEL) -> Table:
    """Read a table and find its columns; what is not clear is a ValueError that says which flag makes it so."""
    header, rows = _read(path)
    plain = {name: name.rpartition(":")[2] for name in header}  # without exiftool's group
    keywords = tuple(name for name in header if plain[name].lower() in KEYWORDS)
    if FILE in plain.values() and keywords and path_column is None:
        file = next(name for name in header if plain[name] == FILE)
        return Table(path, rows, file, keywords=keywords)
    lower = {name.lower() for name in header}
    if {GUESS, PATH, NOVELTY} <= lower and LABEL not in lower and label_column == LABEL:
        why = f"has guesses, the column {GUESS!r}, and no labels"
        raise ValueError(f"{path} {why}: write what is right there, and call the column {LABEL!r}")
    found = Table(path, rows)
    found.paths = _column(found, header, path_column, _PATHS, "path")
    found.split = next((name for name in header if name.lower() in _SPLITS), None)
    others = [name for name in header if name not in (found.paths, found.split)]
    asked = None if label_column == LABEL and LABEL not in lower else label_column
    if asked is None and not lower & {*_LABELS} and len(others) > 1 and _one_hot(rows, others):
        found.one_hot = tuple(others)
    elif asked is None and not lower & {*_LABELS} and len(others) == 1:
        found.label = others[0]
    else:
        found.label = _column(found, [one for one in header if one != found.paths], asked, _LABELS, "label")
    _say(found, header)
    return found


def _column(table: Table, header: list[str], asked: str | None, names: tuple[str, ...], what: str) -> str:
    """The column that is asked for, or else called like one of this kind."""
    fitting = [name for name in header if name == asked or (asked is None and name.lower() in names)]
    first = [name for name in fitting if name.lower() == names[0]]
    if what == "path" and len(fitting) > 1:
        first = first or [one for one in fitting if table.rows[0][one].lower().endswith(image_suffixes())]
    fitting = first or fitting
    if len(fitting) > 1:
        both = " and ".join(map(repr, fitting))
        raise ValueError(f"{table.path} has the columns {both}: --{what}-column names the one with the {what}s")
    if not fitting:
        known = (
            f"{PATH},{LABEL} and perhaps {SPLIT}, or {FILE},Subject as `exiftool -csv -r -Subject PHOTOS` prints them"
        )
        raise ValueError(
            f"{table.path} has the columns {header}, expected {known}; --{what}-column names the {what}s'"
        )
    return fitting[0]


def _one_hot(rows: list[dict[str, str]], columns: list[str]) -> bool:
    return all(row[name].lower() in _YES | _NO for row in rows for name in columns)


def _say(table: Table, header: list[str]) -> None:
    """Note what was guessed of the columns, and which are not read."""
    label = f"the columns {', '.join(table.one_hot[:3])}, ..." if table.one_hot else f"the column {table.label!r}"
    split = "" if table.split in (None, SPLIT) else f", the split from {table.split!r}"
    if (table.paths, table.label) != (PATH, LABEL) or table.one_hot or split:
        table.notes.append(
            f"{table.path}: the paths are from the column {table.paths!r}, the labels from {label}{split}"
        )
    unread = [name for name in header if name not in (table.paths, table.label, table.split, *table.one_hot)]
    if unread:
        table.notes.append(f"{table.path}: not read: the columns {', '.join(map(repr, unread))}")


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Header and rows of a table, of which there is one at least; cells are without blanks around them."""
    lines = _json_lines(path) if path.suffix.lower() == ".jsonl" else _csv_lines(path)
    header, *rows = lines or [[]]
    if not rows:
        raise ValueError(f"{path} names no image: it has {'a header alone' if header else 'no line'}")
    twice = [name for name, count in Counter(header).items() if count > 1 and name]
    if twice:
        raise ValueError(f"{path} has the column {twice[0]!r} twice: take one of them away")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise ValueError(f"line {number} of {path} has {len(row)} cells, expected {len(header)}")
    return header, [dict(zip(header, row, strict=True)) for row in rows]


def _csv_lines(path: Path) -> list[list[str]]:
    """The rows of a text with commas, semicolons, tabs or bars between cells: what makes most columns of the first."""
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a cell may hold a picture as text
    try:
        # A path may be no UTF-8, as `suggest --csv` writes it; a label may not.
        with path.open("rb") as file:
            wide = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        encoding = "utf-16" if wide else "utf-8-sig"
        with path.open(encoding=encoding, errors="surrogateescape", newline="") as text:
            first = text.readline()
            between = max(",;\t|", key=lambda mark: len(next(csv.reader([first], delimiter=mark), [])))
            text.seek(0)
            rows = list(csv.reader(text, delimiter=between, skipinitialspace=between != "\t"))
    except csv.Error as error:
        raise ValueError(f"{path} is no CSV file: {error}") from error
    finally:
        csv.field_size_limit(limit)
    return [[unguarded(cell).strip() for cell in row] for row in rows if any(map(str.strip, row))]


def _json_lines(path: Path) -> list[list[str]]:
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8-sig").splitlines() if line.strip()]
        header = list(found[0]) if found else []
        return [header, *([str(row.get(name, "")).strip() for name in header] for row in found)]
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} holds no JSON object in each line: {error}") from error
