"""Find out which columns of a table of labels hold the paths, the labels and the splits."""

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

from dulbe_peft.data.decoding import image_suffixes
from dulbe_peft.data.names import UNLABELLED, class_key
from dulbe_peft.data.tables import read_table
from dulbe_peft.utils.terminal import counted

PATH, LABEL, SPLIT = "path", "label", "split"
GUESS, NOVELTY = "predicted", "novelty"  # columns of the tables that `suggest` and `predict` write
FILE = "SourceFile"  # the path column of exiftool's tables
KEYWORDS = {"subject", "keywords", "hierarchicalsubject", "weightedflatsubject", "lastkeywordxmp", "tagslist"}
# The names that programs give to columns, as `_key` returns them. A column named PATH or LABEL is preferred.
_PATHS = (
    *(PATH, "filename", "file", "filepath", "image", "imagepath", "imagename", "photo", "img", "imgpath"),
    *("imageid", "id", "sourcefile", "relativepath", "absolutepath"),
)
_FOLDERS = {"relativepath", "folder", "directory", "dir", "subfolder", "subdirectory", "folderpath", PATH, "filepath"}
_FOLDERS |= {"ordner", "unterordner", "verzeichnis", "dossier", "carpeta", "cartella"}
_LABELS = (LABEL, "labels", "class", "classname", "category", "target", "species", "breed", "choice")
_SPLITS = (SPLIT, "set", "subset", "isvalid")
_RANKS = {"kingdom", "phylum", "order", "family", "genus", "scientificname"}  # beside them, "class" is a rank, too
_NAMES = ("species", "scientificname", "specificepithet", "commonname", "vernacularname")  # labels of such a table
_EPITHETS = ("species", "specificepithet")  # the second part of a scientific name, if the genus stands beside it
_BOXES = {"bbox", "bboxx", "bboxleft", "bboxxmin", "xmin", "x1", "boxleft", "xcenter", "bboxwidth", "boundingbox"}
_CONFIDENCES = {"confidence", "conf", "score", "detectionconf", "detectionconfidence", "classificationconfidence"}
# How people and programs write that there is no value.
NO_VALUE = {"", "nan", "null", "none", "<na>", "#n/a", "n/a", "na", "?", "-"}
_TIMES = {"timestamp", "datetime", "datetimeoriginal", "createdate", "date", "datetaken", "capturetime", "datum"}
_TIMES |= {"aufnahmedatum", "aufnahmezeit", "zeitpunkt", "zeitstempel", "fecha", "dateheure"}
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_YES, _NO = {"1", "1.0", "true"}, {"0", "0.0", "false", ""}


@dataclass
class Table:
    """The rows of a table, each a dict from column to value, and the roles of the columns.

    Attributes:
        lines, unit: See `tables.Rectangle`.
        folder: Column of the folder in which the file of the column `paths` lies.
        genus: Column of the first part of scientific names, if `label` has only the second one.
        boxes: Whether a row is a box, so that an image may have several.
        confidence: Column that says how sure a program was of a row.
        one_label: Whether each cell is a class as it is written, also "none" and "Smith, Anna".
        notes: Sentences that report what was guessed.
    """

    path: Path
    rows: list[dict[str, str]]
    paths: str = PATH
    label: str = LABEL
    split: str | None = None
    one_hot: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()
    one_label: bool = False
    notes: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    unit: str = "line"
    folder: str | None = None
    genus: str | None = None
    boxes: bool = False
    confidence: str | None = None

    def at(self, index: int) -> str:
        """Return the place of a row in the file, such as "line 2"."""
        return f"{self.unit} {self.lines[index] if self.lines else index + 2}"

    def path_of(self, index: int) -> str:
        """Return the path of a row as it is written, with slashes between its folder and its name."""
        row = self.rows[index]
        name, folder = row[self.paths], row[self.folder] if self.folder else ""
        if not name:
            raise ValueError(f"{self.at(index)} of {self.path} has no {self.paths}")
        return f"{folder.rstrip('/' + chr(92))}/{name}" if folder and folder != "." else name

    def label_of(self, index: int) -> str:
        """Return the label of a row, or "" if it has none."""
        row = self.rows[index]
        if not self.one_hot:
            label = row[self.label]
            if not self.one_label and (label.lower() in NO_VALUE or class_key(label) in UNLABELLED):
                return ""
            return f"{row[self.genus]} {label}" if self.genus and row[self.genus] else label
        labels = [name for name in self.one_hot if row[name].lower() in _YES]
        if len(labels) > 1:
            raise ValueError(f"{self.at(index)} of {self.path} has the labels {labels}: an image must have one label")
        return "".join(labels)

    def split_of(self, index: int) -> str | None:
        """Return the split of a row, or None if the table has no column of splits."""
        if self.split is None:
            return None
        value = self.rows[index][self.split]
        if not value:
            raise ValueError(f"{self.at(index)} of {self.path} has no {self.split}")
        if _key(self.split) != "isvalid":
            return value
        return "valid" if value.lower() in _YES else "train"


def open_table(
    path: Path, path_column: str | None = None, label_column: str = LABEL, one_label: bool = False
) -> Table:
    """Read a table and find its columns; if they are ambiguous, raise a ValueError that names the flag to give."""
    read = read_table(path)
    header, rows = read.header, read.rows
    table = Table(path, rows, one_label=one_label, lines=read.lines, unit=read.unit, notes=read.notes)
    plain = {name: name.rpartition(":")[2] for name in header}  # exiftool may put a group, such as XMP:, before a name
    table.keywords = tuple(name for name in header if plain[name].lower() in KEYWORDS)
    if FILE in plain.values() and table.keywords and path_column is None and label_column in (LABEL, *table.keywords):
        table.paths = next(name for name in header if plain[name] == FILE)
        return table
    table.keywords = ()
    lower = {name.lower() for name in header}
    if {GUESS, PATH, NOVELTY} <= lower and LABEL not in lower and label_column == LABEL:
        why = f"has predictions, in the column {GUESS!r}, and no labels"
        raise ValueError(f"{path} {why}: correct the predictions, and rename the column to {LABEL!r}")
    _find_paths(table, header, path_column)
    table.split = next((name for name in header if _key(name) in _SPLITS), None)
    _find_label(table, header, None if label_column == LABEL and LABEL not in lower else label_column)
    keys = {_key(name): name for name in header}
    table.boxes = bool(_BOXES & keys.keys())
    table.confidence = next((name for key, name in keys.items() if key in _CONFIDENCES), None)
    plural = "entries" if read.unit == "entry" else f"{read.unit}s"
    for name in (table.paths, table.label, table.split):
        if name in read.absent:
            raise ValueError(
                f"{read.unit} {read.absent[name]} of {path} has no {name!r}, which other {plural} have: add it to all "
                "of them"
            )
    _check_utf8(table)
    _add_notes(table, header)
    return table


def _key(name: str) -> str:
    """Return a key by which file_name, "File Name" and FileName are equal."""
    return re.sub(r"[\s_-]+", "", name).lower()


def time_of(text: str) -> float | None:
    """Return the seconds since 1970 of a date with a time, or None for other texts.

    Dates are as ISO 8601, EXIF, Timelapse (01-May-2026 10:00:00) or German spreadsheets (01.05.2026 10:00) write them.
    A time without a zone is taken for UTC.
    """
    if match := re.fullmatch(r"(\d{4})[-:](\d\d)[-:](\d\d)[T ](\d\d:.*)", text):
        year, month, day, clock_time = match.groups()
    elif match := re.fullmatch(r"(\d\d?)(?:-([A-Za-z]{3})-|\.(\d\d?)\.)(\d{4}) +(\d\d?:.*)", text):
        day, name, month, year, clock_time = match.groups()
        month = month or str([*_MONTHS, name.lower()].index(name.lower()) + 1)  # 13 is no month
    else:
        return None
    clock_time = f"0{clock_time}" if clock_time[1] == ":" else clock_time
    try:
        time = datetime.fromisoformat(f"{year}-{month:0>2}-{day:0>2} {clock_time}")
    except ValueError:
        return None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


def clock(seconds: float) -> str:
    """Return the date and time of seconds since 1970, such as 2026-05-01 10:00:00, with a fraction if it has one."""
    return (datetime(1970, 1, 1) + timedelta(seconds=round(seconds, 2))).isoformat(sep=" ")


def times_in(columns: Mapping[str, Callable[[], Sequence[object]]]) -> list[float | None] | None:
    """Return the times of all rows by the first column of times, see `time_of`, or None if there is no such column."""
    keys = {_key(name): values for name, values in columns.items()}
    texts = [keys[key]() for key in keys if key in _TIMES]
    if {"date", "time"} <= keys.keys():  # in two columns, as older versions of Timelapse export them
        texts.append([f"{day} {hours}" for day, hours in zip(keys["date"](), keys["time"](), strict=True)])
    for values in texts:
        times = [time_of(str(value)) for value in values]
        if any(time is not None for time in times):
            return times
    return None


def _check_utf8(table: Table) -> None:
    """Raise a ValueError if a label is not UTF-8, or a path that is not UTF-8 names no file.

    `suggest --csv` writes the paths of files whose names are not UTF-8 as they are on the disk.
    """
    for index, row in enumerate(table.rows):
        for name, cell in row.items():
            is_file = name == table.paths and (table.path.parent / cell).is_file()
            if not is_file and cell.encode("utf-8", "ignore").decode() != cell:
                shown = cell.encode("utf-8", "surrogateescape").decode("cp1252", "replace")
                raise ValueError(
                    f"{table.at(index)} of {table.path} is not UTF-8 (in Windows' encoding it has {shown!r:.100}): "
                    "save the table as CSV UTF-8"
                )


def _find_paths(table: Table, header: list[str], requested: str | None) -> None:
    """Find the column with the paths and, if these are only names of files, the column with their folders."""
    named = [name for name in header if (requested is None and _key(name) in _PATHS) or name == requested]
    files = [name for name in (named or header) if _like_images(row[name] for row in table.rows)]
    if requested is None and not named and len(files) == 1:
        named = files  # a colleague's table may call it "Foto"
    elif requested is None and len(named) > 1:
        # A path such as CamA/1.jpg may stand beside its last part.
        whole = [name for name in files if all(row[name].endswith(row[part]) for row in table.rows for part in files)]
        exact = [name for name in named if name.lower() == PATH and (name in files or not files)]
        named = exact or whole[:1] or files or named
    table.paths = _only(table, header, named, "path")
    names = [row[table.paths] for row in table.rows]
    if not any("/" in name or "\\" in name for name in names):
        folders = [name for name in header if _key(name) in _FOLDERS and name != table.paths]
        folders = [name for name in folders if not _like_images(row[name] for row in table.rows)]
        table.folder = next((name for name in folders if any(row[name] for row in table.rows)), None)


def _like_images(cells: Iterable[str]) -> bool:
    """Return whether most cells that are not empty look like names of images; there may be videos among them."""
    looks = [cell.lower().endswith(image_suffixes()) for cell in cells if cell]
    return sum(looks) > len(looks) / 2


def _find_label(table: Table, header: list[str], requested: str | None) -> None:
    """Find the column with the labels, or the columns that have 1 for the class of a row and 0 for the others."""
    keys = {_key(name): name for name in header}
    others = [name for name in header if name not in (table.paths, table.split, table.folder)]
    known, taxa = keys.keys() & {*_LABELS}, "class" in keys and len(_RANKS & keys.keys()) > 1
    if requested is None and not known and len(others) > 1 and _is_one_hot(table.rows, others):
        if "" in others:
            place = header.index("") + 1
            raise ValueError(f"{table.path} has a column of labels without a name: column {place} of line 1")
        table.one_hot = tuple(others)
        return
    if requested is None and not known and len(others) == 1:
        table.label = others[0]
        return
    candidates = [name for name in header if name != table.paths and (name == requested or requested is None)]
    if requested is None:
        candidates = [name for name in candidates if _key(name) in _LABELS and not (taxa and _key(name) == "class")]
        if taxa and not any(_key(name) in ("label", "labels") for name in candidates):
            candidates = [keys[key] for key in _NAMES if key in keys][:1] or candidates
        candidates = [name for name in candidates if name.lower() == LABEL] or candidates
    table.label = _only(table, header, candidates, "label")
    epithets = _key(table.label) in _EPITHETS and not any(" " in row[table.label] for row in table.rows)
    if epithets and taxa and requested is None and "scientificname" in keys:
        table.label = keys["scientificname"]
    elif epithets and "genus" in keys:
        table.genus = keys["genus"]


def _only(table: Table, header: list[str], matches: Collection[str], role: str) -> str:
    """Return the only match; raise a ValueError that names the flag with which to choose one if there is not one."""
    if len(matches) > 1:
        both = " and ".join(map(repr, matches))
        raise ValueError(f"{table.path} has the columns {both}: choose the one with the {role}s by --{role}-column")
    others = [name for name in header if name not in (table.paths, table.folder, table.split)]
    if not matches and role == "label" and table.paths in header and others:
        values = {name: {row[name] for row in table.rows} for name in others}
        listed = [f"{name!r} ({counted(len(of), 'value')}, such as {max(of)!r:.40})" for name, of in values.items()]
        raise ValueError(
            f"{table.path} has the paths in {table.paths!r}, but it does not say which column has the labels: choose "
            f"{' or '.join(listed[:6])} by --label-column"
        )
    if not matches:
        known = (
            f"{PATH},{LABEL} and maybe {SPLIT}, or {FILE},Subject as `exiftool -csv -r -Subject PHOTOS` prints them"
        )
        raise ValueError(
            f"{table.path} has the columns {header}, expected {known}; choose the one with the {role}s by "
            f"--{role}-column"
        )
    return next(iter(matches))


def _is_one_hot(rows: list[dict[str, str]], columns: list[str]) -> bool:
    return all(row[name].lower() in _YES | _NO for row in rows for name in columns)


def _add_notes(table: Table, header: list[str]) -> None:
    """Add notes that say which columns were chosen and which are ignored."""
    label = f"the columns {', '.join(table.one_hot[:3])}, ..." if table.one_hot else f"the column {table.label!r}"
    label = label if table.genus is None else f"the columns {table.genus!r} and {table.label!r}"
    paths = f"the column {table.paths!r}" if table.folder is None else f"{table.folder!r} and {table.paths!r}"
    split = "" if table.split in (None, SPLIT) else f", the split from {table.split!r}"
    used = {table.paths, table.label, table.split, table.folder, table.genus, *table.one_hot}
    others = [name for name in header if _key(name) in _NAMES and name not in used]
    choose = f"; --label-column {others[-1]} takes them from there" if others else ""
    if (table.paths, table.label) != (PATH, LABEL) or table.one_hot or split or table.folder:
        table.notes.append(f"{table.path}: the paths are read from {paths}, the labels from {label}{split}{choose}")
    unread = [name for name in header if name not in used]
    if unread:
        table.notes.append(f"{table.path}: further columns, which --group can name: {', '.join(map(repr, unread))}")
