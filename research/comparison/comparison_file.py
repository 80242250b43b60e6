"""`comparison.json`: what a comparison has found so far, and what there is to find."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dulbe_peft.utils.records import Fraction, Record, read_record
from research.comparison.intervals import Difference, Measure
from research.comparison.plan import Plan, Row

COMPARISON_FILE, CSV_FILE = "comparison.json", "comparison.csv"
Mean = Annotated[float, Field(ge=-1, le=1)]


class ScalePoint(Record):
    """Accuracies at a share of what was learned: on classes that were not learned, and on those that were."""

    scale: Fraction
    unlearned: Fraction
    learned: Fraction


class Retention(Record):
    """Accuracy on classes in no stream before all tasks and after them, see `dulbe_peft.metrics.retention`."""

    before: Fraction
    after: Fraction
    scales: list[ScalePoint] = []


class Entry(Record):
    """A row on one stream, as means over the finished seeds; fractions. The page says what each is."""

    stream: str
    row: Row
    chosen: dict[str, Any]  # the row's settings of those that its method may choose from
    seeds: tuple[int, ...]
    means: dict[Measure, Mean]
    spreads: dict[Measure, float | None]
    intervals: dict[Measure, Difference]  # empty where the seeds' streams differ
    differences: dict[Measure, Difference | None]
    gain: Difference | None
    calibration_error: float
    seconds: float
    cpu_seconds: float
    curve: list[Fraction]  # accuracy after each task; empty as `intervals`
    trainable_parameters: int
    kept_bytes: int
    retention: Retention | None


class Comparison(Record):
    """What a comparison has found so far."""

    entries: list[Entry]
    scope: Plan

    def missing(self) -> list[tuple[str, Row, tuple[int, ...]]]:
        """Stream, row and seeds of what is not finished."""
        done = {(entry.stream, entry.row): entry.seeds for entry in self.entries}
        lacks = {
            (stream, row): tuple(seed for seed in self.scope.seeds if seed not in done.get((stream, row), ()))
            for stream in self.scope.streams
            for row in self.scope.rows
        }
        return [(stream, row, seeds) for (stream, row), seeds in lacks.items() if seeds]


def read_comparison(folder: Path) -> Comparison:
    """What `compare` has written into a folder."""
    path = folder / COMPARISON_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: `python -m research compare` writes it")
    return read_record(path, Comparison)
