"""Read a table of labels, and find out which of its columns hold the paths, the labels and the splits."""

import codecs
import csv
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from dulbe_peft.data.decoding import image_suffixes
from dulbe_peft.utils.files import unguarded

PATH, LABEL, SPLIT = "path", "label", "split"
GUESS, NOVELTY = "predicted", "novelty"  # columns of the tables that `suggest` and `predict` write
_OLD_GUESS = "class"  # the name of the column `GUESS` before version 0.3
FILE = "SourceFile"  # the path column of exiftool's tables
KEYWORDS = {"subject", "keywords", "hierarchicalsubject", "weightedflatsubject", "lastkeywordxmp", "tagslist"}
# The names that programs give to these columns, in lower case. A column named PATH or LABEL is preferred.
_PATHS = (
    *(PATH, "file_name", "filename", "file", "file_path", "filepath", "image", "image_path", "image_name", "photo"),
    *("img", "img_path", "image_id", "imageid", "id"),
)
_LABELS = (LABEL, "labels", "class", "class_name", "classname", "category", "target", "species", "breed")
_SPLITS = (SPLIT, "set", "subset", "is_valid")
# How programs and people write that there is no value.
NO_VALUE = {"", "nan", "null", "none", "<na>", "#n/a", "n/a", "na", "?", "-", "no_label", "unlabeled", "unlabelled"}
_YES, _NO = {"1", "1.0", "true"}, {"0", "0.0", "false", ""}


@dataclass
class Table:
    """The rows of a table, each a dict from column to value, and the roles of the columns."""

    path: Path
    rows: list[dict[str, str]]
    paths: str = PATH
    label: str = LABEL
    split: str | None = None
    one_hot: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    one_label: bool = False  # whether each cell is a class as it is written, also "none" and "Smith, Anna"
    notes: list[str] = field(default_factory=list)  # sentences that report what was guessed

    def label_of(self, row: dict[str, str], number: int) -> str:
        """Return the label of a row, or "" if it has none."""
        if not self.one_hot:
            return "" if not self.one_label and row[self.label].lower() in NO_VALUE else row[self.label]
        labels = [name for name in self.one_hot if row[name].lower() in _YES]
        if len(labels) > 1:
            raise ValueError(f"line {number} of {self.path} has the labels {labels}: an image must have one label")
        return "".join(labels)

    def split_of(self, row: dict[str, str]) -> str | None:
        """Return the split of a row, or None if the table has no column of splits."""
        if self.split is None or self.split.lower() != "is_valid":
            return None if self.split is None else row[self.split]
        return "valid" if row[self.split].lower() in _YES else "train"


def open_table(
    path: Path, path_column: str | None = None, label_column: str = LABEL, one_label: bool = False
) -> Table:
    """Read a table and find its columns; if they are ambiguous, raise a ValueError that names the flag to give."""
    header, rows, absent = _read(path)
    plain = {name: name.rpartition(":")[2] for name in header}  # exiftool may put a group, such as XMP:, before a name
    keywords = tuple(name for name in header if plain[name].lower() in KEYWORDS)
    if FILE in plain.values() and keywords and path_column is None:
        file_column = next(name for name in header if plain[name] == FILE)
        return Table(path, rows, file_column, keywords=keywords)
    lower = {name.lower() for name in header}
    guess = next((name for name in (GUESS, _OLD_GUESS) if {name, PATH, NOVELTY} <= lower), None)
    if guess is not None and LABEL not in lower and label_column == LABEL:
        why = f"has predictions, in the column {guess!r}, and no labels"
        raise ValueError(f"{path} {why}: correct the predictions, and rename the column to {LABEL!r}")
    table = Table(path, rows, one_label=one_label)
    table.paths = _find_column(table, header, path_column, _PATHS, "path")
    table.split = next((name for name in header if name.lower() in _SPLITS), None)
    others = [name for name in header if name not in (table.paths, table.split)]
    requested = None if label_column == LABEL and LABEL not in lower else label_column
    if requested is None and not lower & {*_LABELS} and len(others) > 1 and _is_one_hot(rows, others):
        if "" in others:
            raise ValueError(f"{path} has a column of labels without a name: column {header.index('') + 1} of line 1")
        table.one_hot = tuple(others)
    elif requested is None and not lower & {*_LABELS} and len(others) == 1:
        table.label = others[0]
    else:
        candidates = [name for name in header if name != table.paths]
        table.label = _find_column(table, candidates, requested, _LABELS, "label")
    for name in (table.paths, table.label, table.split):
        if name in absent:
            raise ValueError(
                f"line {absent[name]} of {path} has no {name!r}, which other lines have: add it to all of them"
            )
    _check_utf8(table)
    _add_notes(table, header)
    return table


def _check_utf8(table: Table) -> None:
    """Raise a ValueError if a label is not UTF-8, or a path that is not UTF-8 names no file.

    `suggest --csv` writes the paths of files whose names are not UTF-8 as they are on the disk.
    """
    for number, row in enumerate(table.rows, start=2):
        for name, cell in row.items():
            is_file = name == table.paths and (table.path.parent / cell).is_file()
            if not is_file and cell.encode("utf-8", "ignore").decode() != cell:
                shown = cell.encode("utf-8", "surrogateescape").decode("cp1252", "replace")
                raise ValueError(
                    f"line {number} of {table.path} is not UTF-8 (in Windows' encoding it has {shown!r:.100}): "
                    "save the table as CSV UTF-8"
                )


def _find_column(table: Table, header: list[str], requested: str | None, names: tuple[str, ...], role: str) -> str:
    """Return the requested column, or the one whose name is among `names` if none was requested."""
    matches = [name for name in header if name == requested or (requested is None and name.lower() in names)]
    preferred = [name for name in matches if name.lower() == names[0]]
    if role == "path" and len(matches) > 1:
        preferred = preferred or [name for name in matches if table.rows[0][name].lower().endswith(image_suffixes())]
    matches = preferred or matches
    if len(matches) > 1:
        both = " and ".join(map(repr, matches))
        raise ValueError(f"{table.path} has the columns {both}: choose the one with the {role}s by --{role}-column")
    if not matches:
        known = (
            f"{PATH},{LABEL} and maybe {SPLIT}, or {FILE},Subject as `exiftool -csv -r -Subject PHOTOS` prints them"
        )
        raise ValueError(
            f"{table.path} has the columns {header}, expected {known}; choose the one with the {role}s by "
            f"--{role}-column"
        )
    return matches[0]


def _is_one_hot(rows: list[dict[str, str]], columns: list[str]) -> bool:
    return all(row[name].lower() in _YES | _NO for row in rows for name in columns)


def _add_notes(table: Table, header: list[str]) -> None:
    """Add notes that say which columns were chosen and which are ignored."""
    label = f"the columns {', '.join(table.one_hot[:3])}, ..." if table.one_hot else f"the column {table.label!r}"
    split = "" if table.split in (None, SPLIT) else f", the split from {table.split!r}"
    if (table.paths, table.label) != (PATH, LABEL) or table.one_hot or split:
        table.notes.append(
            f"{table.path}: the paths are read from the column {table.paths!r}, the labels from {label}{split}"
        )
    unread = [name for name in header if name not in (table.paths, table.label, table.split, *table.one_hot)]
    if unread:
        table.notes.append(f"{table.path}: further columns, which --group can name: {', '.join(map(repr, unread))}")


def _read(path: Path) -> tuple[list[str], list[dict[str, str]], dict[str, int]]:
    """Return the header, the rows, with the cells stripped of blanks, and the first line without each column.

    Raise a ValueError if there is no row.
    """
    lines, absent = _json_lines(path) if path.suffix.lower() == ".jsonl" else (csv_lines(path), {})
    header, *rows = lines or [[]]
    if not rows:
        raise ValueError(f"{path} names no image: it {'has only a header' if header else 'is empty'}")
    repeated = [name for name, count in Counter(header).items() if count > 1 and name]
    if repeated:
        raise ValueError(f"{path} has the column {repeated[0]!r} twice: remove one of them")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise ValueError(f"line {number} of {path} has {len(row)} cells, expected {len(header)}")
    return header, [dict(zip(header, row, strict=True)) for row in rows], absent


def csv_lines(path: Path) -> list[list[str]]:
    """Return the rows of a CSV file, whose delimiter is the one of `,`, `;`, tab and `|` most frequent in line 1.

    A first line such as `sep=;`, which spreadsheets understand, names it.
    """
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a cell may hold a picture as text
    try:
        # `suggest --csv` writes paths that are not UTF-8 with surrogate escapes. Labels must be UTF-8.
        with path.open("rb") as file:
            wide = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        encoding = "utf-16" if wide else "utf-8-sig"
        with path.open(encoding=encoding, errors="surrogateescape", newline="") as text:
            first = text.readline()
            if match := re.fullmatch(r'"?sep=(.)"?\s*', first):
                delimiter = match[1]
            else:
                delimiter = max(",;\t|", key=lambda mark: len(next(csv.reader([first], delimiter=mark), [])))
                text.seek(0)
            rows = list(csv.reader(text, delimiter=delimiter, skipinitialspace=delimiter != "\t"))
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from error
    finally:
        csv.field_size_limit(limit)
    return [[unguarded(cell).strip() for cell in row] for row in rows if any(map(str.strip, row))]


def _json_lines(path: Path) -> tuple[list[list[str]], dict[str, int]]:
    """Return the rows of a JSON Lines file, with the union of all keys as header, and the first line without each."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        rows = {number: json.loads(line) for number, line in enumerate(lines, start=1) if line.strip()}
        header = list(dict.fromkeys(name for row in rows.values() for name in row))
        absent = {name: number for number, row in reversed(rows.items()) for name in header if name not in row}
        cells = [["" if row.get(name) is None else str(row[name]).strip() for name in header] for row in rows.values()]
        return [header, *cells], absent
    except (ValueError, AttributeError, TypeError) as error:
        raise ValueError(f"{path} does not hold one JSON object per line: {error}") from error
