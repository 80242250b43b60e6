"""Read and write observations in Camtrap DP, the exchange format of camera traps.

Reference:
    Camtrap DP 1.0, https://camtrap-dp.tdwg.org: media.csv lists the files, observations.csv what was seen on them.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from dulbe_peft.data.columns import Table, csv_lines
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


def open_camtrap(folder: Path) -> Table:
    """Return a row for each file of a package, with the columns of media.csv and a label.

    The label is the scientific name, or the type of the observation if there is none, such as blank. Files with
    several labels, or only with observations of a whole event, have no label.
    """
    media = _rows(folder, MEDIA)
    seen: dict[str, dict[str, None]] = {row["mediaID"]: {} for row in media}
    elsewhere = 0
    for row in _rows(folder, OBSERVATIONS):
        kind = row["observationType"].lower()
        label = row["scientificName"] or ("" if kind in _NOT_SEEN else row["observationType"])
        if row["mediaID"] not in seen:
            elsewhere += 1
        elif label:
            seen[row["mediaID"]][label] = None
    several = [labels for labels in seen.values() if len(labels) > 1]
    table = Table(folder / OBSERVATIONS, [], paths="filePath", label="label")
    for row in media:
        labels = seen[row["mediaID"]]
        table.rows.append(row | {"label": next(iter(labels)) if len(labels) == 1 else ""})
    table.notes.append(
        f"{folder} is a Camtrap DP package: the labels are scientific names, or else the types of observations; "
        "--group deploymentID holds the photographs of a place together"
    )
    if several:
        table.notes.append(f"{counted(len(several), 'file')} left out, with several labels such as {[*several[0]]}")
    if elsewhere:
        table.notes.append(f"{counted(elsewhere, 'observation')} not used, which name no file of {MEDIA}")
    return table


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
    missing = [column for column in _NEEDED[name] if column not in header]
    if missing:
        raise ValueError(f"{folder / name} has no column {missing[0]!r}, which Camtrap DP 1.0 asks for")
    for number, row in enumerate(rows, start=2):
        if len(row) != len(header):
            raise ValueError(f"line {number} of {folder / name} has {len(row)} cells, expected {len(header)}")
    return [dict(zip(header, row, strict=True)) for row in rows]
