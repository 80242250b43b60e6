"""Read the rows of tables that people and programs write: CSV, JSON, spreadsheets and parquet files."""

import codecs
import csv
import gzip
import importlib
import io
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass, field
from datetime import date, time
from pathlib import Path
from typing import Any

from dulbe_peft.utils.extras import installed
from dulbe_peft.utils.files import unguarded

_TEXT, _SHEETS = (".csv", ".tsv", ".jsonl", ".json"), (".xlsx", ".xlsm", ".xls", ".ods")
TABLES = (*_TEXT, *(f"{suffix}.gz" for suffix in _TEXT), *_SHEETS)  # the ends of the names of tables of labels
BETWEEN_VALUES = "##"  # stands between the values of a list in a cell
_EXTRA = "excel"  # the extra that reads spreadsheets
Rows = list[tuple[int, list[str]]]  # the number of each row in its file, and its cells; the header is the first
# Characters of Western European texts in Windows' encoding. Other languages use the same bytes for other characters.
_WESTERN = frozenset("\u2026\u2018\u2019\u201c\u201d\u2022\u2013\u2014\u00a0\u00a7\u00ab\u00b0\u00b4\u00b7\u00bb")
_WESTERN |= {chr(code) for code in range(0xC0, 0x100)} - {"\u00d7", "\u00f7"}


@dataclass
class Rectangle:
    """The rows of a file, each a dict from column to value, with cells stripped of blanks.

    Attributes:
        lines: The number of each row in the file.
        unit: What `lines` counts: lines, rows of a sheet, or entries of a list.
        absent: Column -> the number of the first row that lacks it, in a JSON file.
        notes: Sentences that report what was guessed.
    """

    path: Path
    header: list[str]
    rows: list[dict[str, str]]
    lines: list[int]
    unit: str = "line"
    absent: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def is_table(path: Path) -> bool:
    """Return whether a path has the name of a table of labels."""
    return path.name.lower().endswith(TABLES)


def read_table(path: Path, empty: bool = False) -> Rectangle:
    """Read a table, whose kind is recognised from its name; raise a ValueError if it has no row and is not `empty`."""
    suffix, notes, absent, unit = path.name.lower(), list[str](), dict[str, int](), "line"
    if suffix.endswith(_SHEETS):
        unit, rows = "row", _sheet_rows(path, notes)
    elif suffix.endswith(".parquet"):
        unit, rows = "row", _parquet_rows(path)
    elif suffix.removesuffix(".gz").endswith((".jsonl", ".json")):
        unit, rows, absent = _json_rows(path)
    else:
        rows = _csv_rows(path, notes)
    (_, header), *rows = rows or [(0, [])]
    if not rows and not (empty and header):
        raise ValueError(f"{path} names no image: it {'has only a header' if header else 'is empty'}")
    repeated = [name for name, count in Counter(header).items() if count > 1 and name]
    if repeated:
        raise ValueError(f"{path} has the column {repeated[0]!r} twice: remove one of them")
    for number, row in rows:
        if len(row) != len(header):
            raise ValueError(f"{unit} {number} of {path} has {len(row)} cells, expected {len(header)}")
    cells = [dict(zip(header, row, strict=True)) for _, row in rows]
    return Rectangle(path, header, cells, [number for number, _ in rows], unit, absent, notes)


def csv_lines(path: Path) -> list[list[str]]:
    """Return the rows of a CSV file, header first; see `_csv_rows`."""
    return [cells for _, cells in _csv_rows(path, [])]


def _csv_rows(path: Path, notes: list[str]) -> Rows:
    """Return the rows of a CSV file, whose delimiter is the one of `,`, `;`, tab and `|` most frequent in line 1.

    A first line such as `sep=;`, which spreadsheets understand, names it. Rows that are empty are left out.
    """
    limit = csv.field_size_limit(min(sys.maxsize, 2**31 - 1))  # a cell may hold a picture as text
    try:
        text = io.StringIO(_text_of(path, notes), newline="")
        first, start = text.readline(), 0
        if match := re.fullmatch(r'"?sep=(.)"?\s*', first):
            delimiter, start = match[1], 1
        else:
            delimiter = max(",;\t|", key=lambda mark: len(next(csv.reader([first], delimiter=mark), [])))
            text.seek(0)
        reader, rows, before = csv.reader(text, delimiter=delimiter, skipinitialspace=delimiter != "\t"), Rows(), start
        for row in reader:
            if any(map(str.strip, row)):
                rows.append((before + 1, [unguarded(cell).strip() for cell in row]))
            before = start + reader.line_num
        return rows
    except csv.Error as error:
        raise ValueError(f"{path} is not a CSV file: {error}") from error
    finally:
        csv.field_size_limit(limit)


def _text_of(path: Path, notes: list[str]) -> str:
    """Return the text of a file in UTF-8, UTF-16, or Windows' encoding for Western Europe, of which a note is made.

    Bytes that are none of these become surrogates: `suggest --csv` writes names of files that are not UTF-8 so.
    """
    content = _bytes_of(path)
    if content[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        return content.decode("utf-16", errors="surrogateescape")
    text = content.decode("utf-8-sig", errors="surrogateescape")
    if text.isascii():
        return text
    words = [word for word in re.split(r"[,;\t|\"\r\n]+", text) if not word.isascii()]
    if not all(_escaped(word) for word in words) or any((path.parent / word.strip()).is_file() for word in words):
        return text
    western = content.decode("cp1252", errors="replace")
    strange = [word for word in re.findall(r"\w+", western) if sum(not c.isascii() for c in word) > len(word) / 2]
    if strange or {character for character in western if not character.isascii()} - _WESTERN:
        return text
    example = next(word for word in re.split(r"[,;\t|\"\r\n]+", western) if not word.isascii())
    notes.append(
        f"{path} is not in UTF-8; it is read in Windows' encoding for Western Europe, in which it has {example!r:.100}"
    )
    return western


def _escaped(word: str) -> bool:
    """Return whether all characters of a word that are not ASCII are bytes that are not UTF-8."""
    return all(character.isascii() or "\udc80" <= character <= "\udcff" for character in word)


def _bytes_of(path: Path) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if path.name.lower().endswith(".gz") else path.read_bytes()
    except (gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}") from error


def _json_rows(path: Path) -> tuple[str, Rows, dict[str, int]]:
    """Return the rows of a file with a list of JSON objects, or with one object per line, as exiftool writes both.

    The header has the union of all keys; the first row without each of them is returned as well.
    """
    text = _bytes_of(path).decode("utf-8-sig", errors="surrogateescape")
    try:
        whole = json.loads(text)
    except ValueError:
        whole = None
    if isinstance(whole, list) and any(_is_task(row) for row in whole):
        whole = _label_studio_rows(path, whole)
    if isinstance(whole, dict) and {"images", "annotations", "categories"} <= {*whole}:
        whole = _coco_rows(path, whole)
    unit, objects = "line", dict[int, Any]()
    try:
        if isinstance(whole, list):
            unit, objects = "entry", dict(enumerate(whole, start=1))
        else:
            if isinstance(whole, dict) and path.name.lower().removesuffix(".gz").endswith(".json"):
                _check_row(path, whole)
                text = json.dumps(whole)
            objects = {n: json.loads(line) for n, line in enumerate(text.split("\n"), start=1) if line.strip()}
        header = list(dict.fromkeys(name for row in objects.values() for name in row))
        absent = {name: number for number, row in reversed(objects.items()) for name in header if name not in row}
        cells = [(number, [_cell(row.get(name)) for name in header]) for number, row in objects.items()]
    except (ValueError, AttributeError, TypeError) as error:
        if isinstance(whole, dict):
            raise
        raise ValueError(f"{path} does not hold a list of JSON objects, or one object per line: {error}") from error
    return unit, [(0, header), *cells], absent


def _is_task(row: object) -> bool:
    """Return whether an object is a task of Label Studio."""
    return isinstance(row, dict) and "data" in row and ("annotations" in row or "predictions" in row)


def _label_studio_rows(path: Path, tasks: list[Any]) -> list[dict[str, Any]]:
    """Return the rows of the tasks that Label Studio exports: the data of each and, for each control, its choice.

    What the data say under the name of a control, or as `label`, is older than the annotations, and is left out.
    Raises a ValueError if two annotations of a task differ, or nothing was annotated.
    """
    rows, choices = list[dict[str, Any]](), list[dict[str, str]]()
    for number, task in enumerate(tasks, start=1):
        chosen = list[dict[str, str]]()
        try:
            for annotation in task.get("annotations", []):
                values: dict[str, dict[str, None]] = {}  # of all regions of an image
                for result in annotation["result"]:
                    if result["type"] == "choices":
                        values.setdefault(result["from_name"], {}).update(dict.fromkeys(result["value"]["choices"]))
                choice = {name: _cell([*each]) for name, each in values.items()}
                if choice and choice not in chosen and not annotation.get("was_cancelled"):
                    chosen.append(choice)
            rows.append({name: value for name, value in task["data"].items() if name.lower() != "label"})
            choices.append(chosen[0] if chosen else {})
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"entry {number} of {path} is no task as Label Studio exports it: {error!r}") from error
        if len(chosen) > 1:
            both = " and ".join(map(str, chosen[:2]))
            raise ValueError(f"entry {number} of {path} has annotations that differ, {both}: cancel one of them")
    controls = dict.fromkeys((name for choice in choices for name in choice), "")
    if not controls:
        raise ValueError(f"{path} has tasks of Label Studio, but no choice of a person: annotate them there")
    return [row | controls | choice for row, choice in zip(rows, choices, strict=True)]


def _coco_rows(path: Path, content: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each annotation of a COCO file, with its category and box, and for each image without one."""
    try:
        names = {category["id"]: category["name"] for category in content["categories"]}
        plain = {image["id"]: {k: v for k, v in image.items() if k != "id"} for image in content["images"]}
        for kind in ("images", "categories"):
            for key, times in Counter(each["id"] for each in content[kind]).items():
                if times > 1:
                    raise ValueError(f"{path} has {times} {kind} with the id {key!r}: give each of them its own")
        rows = [
            plain[each["image_id"]] | {"category": names[each["category_id"]], "bbox": each.get("bbox", "")}
            for each in content["annotations"]
        ]
        annotated = {each["image_id"] for each in content["annotations"]}
        rows += [image | {"category": "", "bbox": ""} for key, image in plain.items() if key not in annotated]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} has the keys of a COCO file, but is none: {error!r}") from error
    boxes = any(row["bbox"] for row in rows)
    return [row if boxes else {k: v for k, v in row.items() if k != "bbox"} for row in rows]


def _check_row(path: Path, content: dict[str, Any]) -> None:
    """Raise a ValueError if an object does not describe one image, but, as COCO and MegaDetector do, all of them."""
    if "detection_categories" in content:
        raise ValueError(
            f"{path} has what a machine found (MegaDetector), and no labels of a person: export a table from the "
            "program in which they were given, such as Timelapse"
        )
    if any(isinstance(value, (list, dict)) and value for value in content.values()):
        raise ValueError(
            f"{path} is one JSON object with the keys {list(content)[:5]}, expected a list of objects, one per image: "
            "convert it into a table with the columns path and label"
        )


def _cell(value: object) -> str:
    """Return the text of a value; the values of a list are joined by `BETWEEN_VALUES`."""
    if isinstance(value, list) and not any(isinstance(each, (list, dict)) for each in value):
        return BETWEEN_VALUES.join(map(_cell, value))
    if isinstance(value, float) and value.is_integer():
        value = int(value)  # spreadsheets have no whole numbers
    if isinstance(value, (date, time)):
        return value.isoformat()
    return "" if value is None else unguarded(str(value)).strip()


def _parquet_rows(path: Path) -> Rows:
    with installed(f"reading {path}"):
        read: Any = importlib.import_module("pyarrow.parquet").read_table
    try:
        table = read(path)
    except (ValueError, OSError) as error:  # pyarrow's errors are among these
        raise ValueError(f"{path} cannot be read: {error}") from error
    rows = zip(*(table[name].to_pylist() for name in table.column_names), strict=True)
    return [(0, table.column_names), *((number, list(map(_cell, row))) for number, row in enumerate(rows, start=1))]


def _sheet_rows(path: Path, notes: list[str]) -> Rows:
    """Return the rows of the first visible sheet of a spreadsheet that is not empty.

    Lines above the header, such as a title, which have a single cell, are left out. Each cell of a merged area has
    its value.
    """
    with installed(f"reading {path}", _EXTRA):
        from python_calamine import CalamineError, CalamineWorkbook, SheetVisibleEnum
    try:
        with CalamineWorkbook.from_path(path) as book:
            seen = [sheet.name for sheet in book.sheets_metadata if sheet.visible == SheetVisibleEnum.Visible]
            sheets = {name: book.get_sheet_by_name(name) for name in seen}
            grids = {name: sheet.to_python(skip_empty_area=False) for name, sheet in sheets.items()}
            merged = {name: sheet.merged_cell_ranges or [] for name, sheet in sheets.items()}
    except (CalamineError, OSError) as error:
        raise ValueError(f"{path} cannot be read as a spreadsheet ({error}): save it as .xlsx or .csv") from error
    filled = [name for name, grid in grids.items() if any(map(any, grid))]
    if not filled:
        return []
    name, *others = filled
    cells = [list(map(_cell, row)) for row in grids[name]]
    for (top, left), (bottom, right) in merged[name]:
        for row in range(top, min(bottom + 1, len(cells))):
            cells[row][left : right + 1] = [cells[top][left]] * len(cells[row][left : right + 1])
    if others:
        listed = ", ".join(map(repr, others))
        notes.append(f"{path}: the sheet {name!r} is read, and not {listed}: put the table first to read another one")
    rows = [(number, row) for number, row in enumerate(cells, start=1) if any(row)]
    widest = max(sum(map(bool, row)) for _, row in rows)
    while len({*filter(None, rows[0][1])}) == 1 < widest:
        rows.pop(0)
    used = [place for place in range(len(rows[0][1])) if any(row[place] for _, row in rows)]
    return [(number, [row[place] for place in used]) for number, row in rows]
