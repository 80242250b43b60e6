"""The file `comparison.json`: the plan of a comparison and its results so far."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dulbe_peft.utils.records import Fraction, Record, read_record
from research.comparison.intervals import Difference, Measure
from research.comparison.plan import Plan, Row

COMPARISON_FILE, CSV_FILE = "comparison.json", "comparison.csv"
Mean = Annotated[float, Field(ge=-1, le=1)]


class ScalePoint(Record):
    """Accuracy on classes that were not learned and on those that were, with the update scaled by `scale`."""

    scale: Fraction
    unlearned: Fraction
    learned: Fraction


class Retention(Record):
    """Zero-shot accuracy before and after all tasks on classes that are never learned; see `streams.retention`."""

    before: Fraction
    after: Fraction
    scales: list[ScalePoint] = []


class Entry(Record):
    """Results of a row on one stream: means over the finished seeds, as fractions. The page explains each figure."""

    stream: str
    row: Row
    chosen: dict[str, Any]  # the settings that were selected for the row, if its method has settings to choose from
    seeds: tuple[int, ...]
    means: dict[Measure, Mean]
    spreads: dict[Measure, float | None]
    intervals: dict[Measure, Difference]  # empty if the seeds have different numbers of test images
    differences: dict[Measure, Difference | None]
    # The same, with intervals at the levels of Holm's test over all rows of the stream.
    corrected: dict[Measure, Difference | None] = {}
    # The difference to the best row of the stream, with such intervals; None for the best row.
    behind: dict[Measure, Difference | None] = {}
    gain: Difference | None
    calibration_error: float
    seconds: float
    cpu_seconds: float
    # Accuracy on each task (inner list) after each task (outer list); empty if the seeds have different tasks.
    by_task: list[list[Fraction]] = []
    curve: list[Fraction]  # accuracy after each task; empty if the seeds have different numbers of tasks
    trainable_parameters: int
    kept_bytes: int
    passes: int | None = None  # of the vision tower, for an image that is classified
    peak_bytes: int | None = None  # the largest over the seeds
    # Epochs, batch size and rate of training, if they differ between the methods of the stream that train.
    budget: str = ""
    retention: Retention | None


class Comparison(Record):
    """Content of `comparison.json`: the results so far, and the plan.

    `gains` is, for each stream, the difference of A_last between the best row with training and the best one without.
    It is None if the two have no common seed, and a stream is absent if it has rows of one kind only.
    """

    entries: list[Entry]
    scope: Plan
    gains: dict[str, Difference | None]

    def missing(self) -> list[tuple[str, Row, tuple[int, ...]]]:
        """Return stream, row and seeds of all unfinished runs."""
        done = {(entry.stream, entry.row): entry.seeds for entry in self.entries}
        unfinished = {
            (stream, row): tuple(seed for seed in self.scope.seeds if seed not in done.get((stream, row), ()))
            for stream in self.scope.streams
            for row in self.scope.rows
        }
        return [(stream, row, seeds) for (stream, row), seeds in unfinished.items() if seeds]


def read_comparison(folder: Path) -> Comparison:
    """Read the file that `compare` has written into a folder."""
    path = folder / COMPARISON_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; `python -m research compare` writes it")
    return read_record(path, Comparison)
