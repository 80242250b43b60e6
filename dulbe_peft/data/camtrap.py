"""Read and write observations in Camtrap DP, the exchange format of camera traps.

Reference:
    Camtrap DP 1.0, https://camtrap-dp.tdwg.org: media.csv lists the files, observations.csv what was seen on them.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from dulbe_peft.data.columns import Table
from dulbe_peft.data.tables import csv_lines
from dulbe_peft.utils.terminal import counted

MEDIA, OBSERVATIONS = "media.csv", "observations.csv"
_NEEDED = {MEDIA: ("mediaID", "filePath"), OBSERVATIONS: ("mediaID", "observationType", "scientificName")}
_KINDS, _HUMAN = ("human", "vehicle", "blank"), "Homo sapiens"  # types that can be classes; a name of a type
_NOT_SEEN = {"", "unclassified", "unknown"}  # values of observationType that are no class
HEADER = (  # the columns of observations.csv that predictions fill
    *("observationID", "deploymentID", "mediaID", "eventStart", "eventEnd", "observationLevel", "observationType"),
    *("scientificName", "classificationMethod", "classifiedBy", "classificationProbability"),
)


def is_camtrap(path: Path) -> bool:
    """Return whether a file is the table of observations of a Camtrap DP package."""
    return path.name == OBSERVATIONS and path.is_file() and path.with_name(MEDIA).is_file()


def open_camtrap(folder: Path, machine_labels: bool = False) -> Table:
    """Return a row for each file of a package, with the columns of media.csv and a label.

    The label is the scientific name, or the type of the observation if there is none, such as blank. It is what
    people observed; only with `machine_labels`, a file that nobody identified gets the label of a machine. Files with
    several labels, or only with observations of a whole event, have no label.
    """
    media = _rows(folder, MEDIA)
    _check_media(folder, media)
    by_people: dict[str, dict[str, None]] = {row["mediaID"]: {} for row in media}
    by_machine: dict[str, dict[str, None]] = {row["mediaID"]: {} for row in media}
    elsewhere = 0
    for row in _rows(folder, OBSERVATIONS):
        kind = row["observationType"].lower()
        label = row["scientificName"] or ("" if kind in _NOT_SEEN else kind)
        seen = by_machine if row.get("classificationMethod", "").lower() == "machine" else by_people
        if row["mediaID"] not in seen:
            elsewhere += 1
        elif label:
            seen[row["mediaID"]][label] = None
    guessed = [media_id for media_id, labels in by_machine.items() if labels and not by_people[media_id]]
    labels_of = by_people | ({media_id: by_machine[media_id] for media_id in guessed} if machine_labels else {})
    several = [labels for labels in labels_of.values() if len(labels) > 1]
    if guessed and not any(labels_of.values()):
        raise ValueError(f"{folder} has only labels of a machine: --machine-labels uses them")
    table = Table(folder / OBSERVATIONS, [], paths="filePath", label="label")
    for row in media:
        labels = labels_of[row["mediaID"]]
        table.rows.append(row | {"label": next(iter(labels)) if len(labels) == 1 else ""})
    table.notes.append(
        f"{folder} is a Camtrap DP package: the labels are scientific names, or else the types of observations; "
        "--group deploymentID holds the photographs of a place together"
    )
    if several:
        table.notes.append(f"{counted(len(several), 'file')} left out, with several labels such as {[*several[0]]}")
    if guessed:
        used = "used" if machine_labels else "not used: --machine-labels uses them"
        table.notes.append(f"the labels of {counted(len(guessed), 'file')} are only a machine's, and {used}")
    if elsewhere:
        table.notes.append(f"{counted(elsewhere, 'observation')} not used, which name no file of {MEDIA}")
    return table


def _check_media(folder: Path, media: Sequence[dict[str, str]]) -> None:
    """Raise a ValueError if a mediaID names two files."""
    first: dict[str, str] = {}
    for row in media:
        path = first.setdefault(row["mediaID"], row["filePath"])
        if path != row["filePath"]:
            both = f"{path!r} and {row['filePath']!r}"
            raise ValueError(f"{folder / MEDIA} has the mediaID {row['mediaID']!r} for {both}: give each file its own")


def observation(media: dict[str, str], name: str, probability: float, by: str) -> Sequence[str]:
    """Return the row of observations.csv, in the order of `HEADER`, for the prediction of a file; "" is no class."""
    kind = "human" if name == _HUMAN else name if name in _KINDS else "animal" if name else "unclassified"
    return (
        *(f"{media['mediaID']}-predicted", media.get("deploymentID", ""), media["mediaID"]),
        *(media.get("timestamp", ""), media.get("timestamp", ""), "media", kind),
        *("" if name in _KINDS else name, "machine", by, f"{probability:.4f}" if name else ""),
    )


def media_of(folder: Path) -> dict[str, dict[str, str]]:
    """Return the rows of media.csv by the path of the file, relative to the package."""
    return {os.path.normpath(row["filePath"]): row for row in _rows(folder, MEDIA)}


def _rows(folder: Path, name: str) -> list[dict[str, str]]:
    header, *rows = csv_lines(folder / name) or [[]]
    if repeated := next((column for column in header if column and header.count(column) > 1), None):
        raise ValueError(f"{folder / name} has the column {repeated!r} twice: remove one of them")
    missing = [column for column in _NEEDED[name] if column not in header]
    if missing:
        raise ValueError(f"{folder / name} has no column {missing[0]!r}, which Camtrap DP 1.0 asks for")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise ValueError(f"line {number} of {folder / name} has {len(row)} cells, expected {len(header)}")
    return [dict(zip(header, row, strict=True)) for row in rows]
