"""Read and write observations in Camtrap DP, the exchange format of camera traps.

Reference:
    Camtrap DP 1.0, https://camtrap-dp.tdwg.org: media.csv lists the files, observations.csv what was seen on them. An
    observation is of a file (`mediaID`), or of an event: of all files of a deployment between two times.
"""

import os
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from dulbe_peft.data.columns import Table, time_of
from dulbe_peft.data.decoding import image_suffixes
from dulbe_peft.data.tables import Rectangle, read_table
from dulbe_peft.utils.terminal import counted

MEDIA, OBSERVATIONS = "media", "observations"  # the names of the tables
_SUFFIXES = (".csv", ".csv.gz", ".parquet")
_NEEDED = {MEDIA: ("mediaID", "filePath"), OBSERVATIONS: ("mediaID", "observationType", "scientificName")}
_KINDS, _HUMAN = ("human", "vehicle", "blank"), "Homo sapiens"  # types that can be classes; a name of a type
_NOT_SEEN = {"", "unclassified", "unknown"}  # values of observationType that are no class
HEADER = (  # the columns of observations.csv in version 1.0, in their order
    *("observationID", "deploymentID", "mediaID", "eventID", "eventStart", "eventEnd", "observationLevel"),
    *("observationType", "cameraSetupType", "scientificName", "count", "lifeStage", "sex", "behavior"),
    *("individualID", "individualPositionRadius", "individualPositionAngle", "individualSpeed"),
    *("bboxX", "bboxY", "bboxWidth", "bboxHeight", "classificationMethod", "classifiedBy"),
    *("classificationTimestamp", "classificationProbability", "observationTags", "observationComments"),
)
Labels = dict[str, dict[str, None]]  # mediaID -> labels


def table_in(folder: Path, name: str) -> Path | None:
    """Return the file of a table of a package, or None if there is none."""
    files = (folder / f"{name}{suffix}" for suffix in _SUFFIXES)
    return next((file for file in files if file.is_file()), None)


def is_camtrap(folder: Path) -> bool:
    """Return whether a folder holds the tables of a Camtrap DP package."""
    return table_in(folder, MEDIA) is not None and table_in(folder, OBSERVATIONS) is not None


def open_camtrap(folder: Path, machine_labels: bool = False) -> Table:
    """Return a row for each file of a package, with the columns of media.csv, `eventID`, and a label.

    The label is the scientific name, or the type of the observation if there is none, such as blank. It is what
    people observed; only with `machine_labels`, a file that nobody identified gets the label of a machine. A file
    without an observation of its own gets the label of its event. Files with several labels have none.
    """
    media, observations = _rows(folder, MEDIA), _rows(folder, OBSERVATIONS)
    _check_media(media)
    by_people, by_machine = _seen(media, observations)
    guessed = [media_id for media_id, labels in by_machine.labels.items() if labels and not by_people.labels[media_id]]
    labels_of = by_people.labels | ({each: by_machine.labels[each] for each in guessed} if machine_labels else {})
    several = [labels for labels in labels_of.values() if len(labels) > 1]
    notes = [*media.notes, *observations.notes]
    notes.append(
        f"{folder} is a Camtrap DP package: the labels are scientific names, or else the types of observations; "
        "--group deploymentID holds the photographs of a place together, and --group eventID those of an event"
    )
    if several:
        notes.append(f"{counted(len(several), 'file')} left out, with several labels such as {[*several[0]]}")
    if guessed:
        used = "used" if machine_labels else "not used: --machine-labels uses them"
        notes.append(f"the labels of {counted(len(guessed), 'file')} are only a machine's, and {used}")
    for seen in (by_people, by_machine):
        notes += seen.notes()
    if guessed and not any(labels_of.values()):
        raise ValueError(f"{folder} has only labels of a machine: --machine-labels uses them")
    if not any(labels_of.values()):
        raise ValueError(f"{folder} has no file with a label: {'; '.join(notes[1:]) or 'nothing was identified'}")
    rows = [
        row
        | {"filePath": _path_of(folder, row)}
        | {"label": next(iter(labels)) if len(labels := labels_of[row["mediaID"]]) == 1 else ""}
        for row in _with_events(media.rows, (by_people, by_machine))
    ]
    return Table(media.path, rows, paths="filePath", lines=media.lines, unit=media.unit, notes=notes)


def files_of(folder: Path) -> dict[str, dict[str, str]]:
    """Return the rows of media.csv with the `eventID` of each file, by its path relative to the package.

    Return nothing for a folder that is no package. A package whose files nobody has observed yet has no events.
    """
    file = table_in(folder, MEDIA)
    if file is None or {*_NEEDED[MEDIA]} - {*read_table(file, empty=True).header}:
        return {}
    media = _rows(folder, MEDIA)
    _check_media(media)
    seen = _seen(media, _rows(folder, OBSERVATIONS)) if table_in(folder, OBSERVATIONS) else ()
    return {os.path.normpath(_path_of(folder, row)): row for row in _with_events(media.rows, seen)}


def _seen(media: Rectangle, observations: Rectangle) -> tuple["_Seen", "_Seen"]:
    """Return what people observed, and what machines did."""
    by_people, by_machine = _Seen(media.rows), _Seen(media.rows)
    for row in observations.rows:
        machine = row.get("classificationMethod", "").lower() == "machine"
        (by_machine if machine else by_people).add(row)
    by_people.add_events()
    by_machine.add_events()
    return by_people, by_machine


def _with_events(media: Sequence[dict[str, str]], seen: Sequence["_Seen"]) -> list[dict[str, str]]:
    """Return the rows of media.csv with an `eventID`; an ID of several deployments also has the deployment's."""
    events = [
        next((e for of in seen if (e := of.events.get(row["mediaID"]))), row.get("eventID", "")) for row in media
    ]
    places: dict[str, set[str]] = {}
    for row, event in zip(media, events, strict=True):
        places.setdefault(event, set()).add(row.get("deploymentID", ""))
    names = [
        f"{row['deploymentID']}/{event}" if event and len(places[event]) > 1 else event
        for row, event in zip(media, events, strict=True)
    ]
    return [row | {"eventID": name} for row, name in zip(media, names, strict=True)]


class _Seen:
    """What people, or machines, observed: labels and events of files by mediaID."""

    def __init__(self, media: Sequence[dict[str, str]]) -> None:
        self.labels: Labels = {row["mediaID"]: {} for row in media}
        self.events: dict[str, str] = {}  # mediaID -> eventID
        self._looked_at = set[str]()  # files with an observation of their own
        self._of_events: list[tuple[dict[str, str], str]] = []
        self._counts = Counter[str]()
        self._taken: dict[str, list[tuple[float, str]]] = {}  # deploymentID -> time and mediaID of each file
        for row in media:
            if (time := time_of(row.get("timestamp", ""))) is not None:
                self._taken.setdefault(row.get("deploymentID", ""), []).append((time, row["mediaID"]))
        for times in self._taken.values():
            times.sort()

    def add(self, row: dict[str, str]) -> None:
        """Add an observation of a file; keep one of an event for `add_events`."""
        kind, media_id = row["observationType"].lower(), row["mediaID"]
        label = row["scientificName"] or ("" if kind in _NOT_SEEN else kind)
        if row.get("observationLevel", "").lower() == "event" or not media_id:
            self._of_events.append((row, label))
        elif media_id not in self.labels:
            self._counts["elsewhere"] += 1
        else:
            self._looked_at.add(media_id)
            self._in_event(media_id, row)
            if label:
                self.labels[media_id][label] = None

    def _in_event(self, media_id: str, row: dict[str, str]) -> None:
        if event := row.get("eventID", ""):
            self.events.setdefault(media_id, event)

    def add_events(self) -> None:
        """Give the labels of events to their files that have no observation of their own."""
        labelled = set[str]()
        for row, label in self._of_events:
            start, end = time_of(row.get("eventStart", "")), time_of(row.get("eventEnd", ""))
            taken = self._taken.get(row.get("deploymentID", ""), [])
            inside = slice(0)
            if start is not None and end is not None:
                inside = slice(bisect_left(taken, (start, "")), bisect_right(taken, (end, "\U0010ffff")))
            self._counts["no file"] += not taken[inside]
            for _, media_id in taken[inside]:
                self._in_event(media_id, row)
                if label and media_id not in self._looked_at:
                    self.labels[media_id][label] = None
                    labelled.add(media_id)
        self._counts["labelled"] = len(labelled)

    def notes(self) -> list[str]:
        """Return sentences on observations of events, and on those that name no file."""
        labelled, unused, elsewhere = (self._counts[name] for name in ("labelled", "no file", "elsewhere"))
        lines = [f"{counted(labelled, 'file')} with the label of the whole event"] * bool(labelled)
        if unused:
            why = "because no file of their deployment was taken from eventStart to eventEnd"
            lines.append(f"{counted(unused, 'observation')} of events not used, {why}")
        if elsewhere:
            lines.append(f"{counted(elsewhere, 'observation')} not used, which name no file of {MEDIA}")
        return lines


def _check_media(media: Rectangle) -> None:
    """Raise a ValueError if a mediaID names two files."""
    first: dict[str, tuple[str, str]] = {}
    for row in media.rows:
        path = row["filePath"], row.get("fileName", "")
        before = first.setdefault(row["mediaID"], path)
        if before != path:
            both = " and ".join(repr("/".join(each if before[0] == path[0] else each[:1])) for each in (before, path))
            raise ValueError(f"{media.path} has the mediaID {row['mediaID']!r} for {both}: give each file its own")


def _path_of(folder: Path, media: dict[str, str]) -> str:
    """Return the path of a file: `filePath`, or, if that is a folder or a URL, a file with the name `fileName`."""
    path, name = media["filePath"], media.get("fileName", "")
    if not name or (path.lower().endswith(image_suffixes()) and "://" not in path):
        return path
    if "://" not in path:
        inside = f"{path.rstrip('/')}/{name}"
        return inside if os.path.isdir(folder / path) or os.path.lexists(folder / inside) else path
    place = media.get("deploymentID", "")
    beside = (f"{MEDIA}/{place}/{name}", f"{place}/{name}", f"{MEDIA}/{name}", name)
    return next((each for each in beside if os.path.lexists(folder / each)), path)


def header_of(folder: Path) -> Sequence[str]:
    """Return the columns of a package's observations, so that predictions can be appended to them."""
    file = table_in(folder, OBSERVATIONS)
    header = [] if file is None else read_table(file, empty=True).header
    return header if {*observation({}, "", 0, "")} <= {*header} else HEADER


def observation(media: Mapping[str, str], name: str, probability: float, by: str) -> dict[str, str]:
    """Return the columns of observations.csv that a prediction of a file fills; "" is no class."""
    kind = "human" if name == _HUMAN else name if name in _KINDS else "animal" if name else "unclassified"
    media_id, time = media.get("mediaID", ""), media.get("timestamp", "")
    return {
        "observationID": f"{media_id}-predicted",
        "deploymentID": media.get("deploymentID", ""),
        "mediaID": media_id,
        "eventStart": time,
        "eventEnd": time,
        "observationLevel": "media",
        "observationType": kind,
        "scientificName": "" if name in _KINDS else name,
        "classificationMethod": "machine",
        "classifiedBy": by,
        "classificationProbability": f"{probability:.4f}" if name else "",
    }


def media_of(folder: Path) -> dict[str, dict[str, str]]:
    """Return the rows of media.csv by the path of the file, relative to the package."""
    return {os.path.normpath(_path_of(folder, row)): row for row in _rows(folder, MEDIA).rows}


def _rows(folder: Path, name: str) -> Rectangle:
    read = read_table(table_in(folder, name) or folder / f"{name}.csv")
    missing = [column for column in _NEEDED[name] if column not in read.header]
    if missing:
        raise ValueError(f"{read.path} has no column {missing[0]!r}, which Camtrap DP 1.0 asks for")
    return read
