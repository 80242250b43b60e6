"""`comparison.json`: what a comparison has found so far, and what there is to find."""

from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, PlainSerializer

from dulbe_peft.comparison.intervals import Difference, Measure
from dulbe_peft.comparison.plan import Plan, Row
from dulbe_peft.utils.records import Fraction, Record, read_record

COMPARISON_FILE, CSV_FILE = "comparison.json", "comparison.csv"
Mean = Annotated[float, Field(ge=-1, le=1)]
# The streams stand in the order of the plan; as a JSON object they would be sorted by their names.
Streams = Annotated[
    dict[str, dict[str, Any]], BeforeValidator(dict), PlainSerializer(lambda streams: list(streams.items()))
]


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
    """A row on one stream, as means over the finished seeds; fractions. `COLUMNS` of the summary says what each is."""

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


class Scope(Record):
    """What a comparison holds when all of it is finished: every row with every seed on every stream."""

    streams: Streams
    methods: dict[str, dict[str, Any]]
    choices: dict[str, dict[str, list[Any]]]
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    reference: Row

    @classmethod
    def of(cls, plan: Plan) -> Self:
        return cls(
            streams=plan.streams,
            methods=plan.methods,
            choices=plan.choices,
            rows=tuple(plan.all_rows),
            seeds=tuple(plan.seeds),
            reference=plan.baseline,
        )


class Comparison(Record):
    """What a comparison has found so far."""

    entries: list[Entry]
    scope: Scope

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
        raise FileNotFoundError(f"{path} does not exist: `dulbe-peft compare` writes it")
    return read_record(path, Comparison)
