"""A measured cell of a frontier: a small JSON file that can be kept with the project, without its run.

A run of a comparison is large and names folders of one machine. The file has the accuracies alone, and what they
depend on: the settings without folders, and fingerprints of the images and of the model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dulbe_peft.photos.runs.run_settings import ModelSettings
from dulbe_peft.strategies.registry import make_strategy
from dulbe_peft.utils.records import Fraction, Record, read_record, write_record
from research.comparison.cells import (
    CellRecord,
    arguments_of,
    as_json,
    cached_model_fingerprint,
    images_fingerprint,
    read_answers,
)
from research.comparison.intervals import image_shares, mean_share
from research.comparison.plan import Cell, Row

TEXT = "text"
PLACES = ("model", "data", "device")  # settings that belong to a machine; fingerprints stand for the first two


class Point(Record):
    """Accuracies with a share of the finished update: on classes that are never learned, and on the learned ones.

    `learned` has the accuracy of each classifier on all learned classes after the last task. With a part of the
    update, only the names of the classes (`text`) are measured, because the other classifiers fit the whole update.
    """

    share: Fraction
    unlearned: Fraction
    learned: dict[str, Fraction]


class Measured(Record):
    """Content of a cell's file: the accuracies of a stream, a method with its settings, and a seed."""

    stream: str
    method: str
    point: dict[str, Any]  # the values of the settings that the method varies
    seed: int
    settings: dict[str, Any]
    arguments: dict[str, Any]
    images: list[str | None]  # fingerprints of the training, the test, and the never learned images
    model: str
    cpu_seconds: float
    finished: str
    points: list[Point]  # in ascending order of the share; the first one is the model before training

    @property
    def trains(self) -> bool:
        return make_strategy(self.settings.get("strategy", ModelSettings.strategy)).adapts


def measured(cell: Cell, point: dict[str, Any], done: CellRecord, folder: Path, rows: Sequence[Row]) -> Measured:
    """Return the accuracies of a finished run in `folder`."""
    if done.retention is None:
        raise ValueError(f"the run in {folder} did not measure classes that are never learned")
    whole = {}
    for row in rows:
        if row.classifier != TEXT:
            answers, facts = read_answers(folder, row, done)
            whole[title_of(row)] = mean_share(image_shares(answers, facts.class_names)["last"])
    points = [
        Point(share=p.scale, unlearned=p.unlearned, learned={TEXT: p.learned} | (whole if p.scale == 1 else {}))
        for p in done.retention.scales
    ]
    return Measured(**expected(cell, point), cpu_seconds=done.cost.cpu_seconds, finished=done.finished, points=points)


def expected(cell: Cell, point: dict[str, Any]) -> dict[str, Any]:
    """Return what a cell's file must say of its settings, images and model."""
    return {
        "stream": cell.stream,
        "method": cell.method,
        "point": as_json(point),
        "seed": cell.seed,
        "settings": as_json({key: value for key, value in cell.settings.items() if key not in PLACES})
        | {"retention_scales": list(cell.retention[1:])},
        "arguments": {key: value for key, value in arguments_of(cell).items() if key not in PLACES},
        "images": images_fingerprint(cell),
        "model": cached_model_fingerprint(cell.settings["model"]),
    }


def read_measured(path: Path, cell: Cell, point: dict[str, Any], rows: Sequence[Row]) -> Measured | None:
    """Read a cell's file, or return None if there is none or it lacks a classifier.

    Raises:
        ValueError: It was measured with other settings, on other images, or with another model.
    """
    if not path.is_file():
        return None
    found = read_record(path, Measured)
    for name, required in expected(cell, point).items():
        before = getattr(found, name)
        if isinstance(required, dict):
            keys = [key for key in sorted({*before, *required}) if before.get(key) != required.get(key)]
            before, required = ({key: values.get(key) for key in keys} for values in (before, required))
        if before != required:
            raise ValueError(
                f"{path} was measured with {name} = {before!r:.300}, now it is {required!r:.300}: remove the file, or "
                "use another folder of cells"
            )
    return found if {title_of(row) for row in rows} <= {TEXT, *found.points[-1].learned} else None


def read_all(folder: Path) -> list[Measured]:
    """Read all files of cells below a folder, without comparing them with anything."""
    return [read_record(path, Measured) for path in sorted(folder.rglob("*.json"))]


def write_measured(path: Path, record: Measured) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, record)


def title_of(row: Row) -> str:
    """Return a classifier's name in a frontier: with its drift correction, unless that is the default."""
    return row.classifier + ("" if row.drift in ("auto", "none") else f", drift {row.drift}")
