"""The table of a comparison: one row for each method and classifier on each stream, compared with a reference."""

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np

from dulbe_peft.metrics.accuracy import calibration_error, percent, signed
from dulbe_peft.photos.report.table import Column, filled, format_markdown
from dulbe_peft.utils.files import write_csv
from dulbe_peft.utils.records import Record
from dulbe_peft.utils.settings import flat_settings
from research.comparison.cells import (
    AnswersFacts,
    CellRecord,
    answers_path,
    arguments_of,
    as_json,
    read_answers,
    read_cell,
)
from research.comparison.comparison_file import Entry, Retention, ScalePoint
from research.comparison.intervals import (
    Difference,
    Measure,
    estimated,
    holm_intervals,
    image_shares,
    mean_interval,
    mean_share,
)
from research.comparison.plan import Cell, Chosen, Plan, Row, Work, as_text

MEASURES: tuple[Measure, ...] = get_args(Measure)
Show = Callable[[float], str]
FEW = 2  # with at most this many seeds, little is known about the results of other seeds


@dataclass(frozen=True)
class CellRow:
    """One row of one cell, read from its files. `shares` is the contribution of each test image to the measures."""

    shares: dict[Measure, np.ndarray]
    curve: list[float]
    by_task: list[list[float]]  # accuracy on each task after each task
    calibration_error: float
    facts: AnswersFacts
    cell: CellRecord


Finished = dict[tuple[str, Row], dict[int, CellRow]]  # stream and row -> seed -> the row of a finished run


def read_finished(output: Path, work: Work) -> Finished:
    """Read the rows of all finished runs of `work`."""
    finished: Finished = {}
    for cell, rows in work:
        for row in rows:
            if read := read_row(output / cell.folder, row, cell):
                finished.setdefault((cell.stream, row), {})[cell.seed] = read
    return finished


def make_entries(plan: Plan, finished: Finished, chosen: Chosen | None = None) -> list[Entry]:
    """Return an entry for each stream and row that has a finished run; `chosen` is as in `Plan.cells`."""
    first, entries = plan.reference, []
    for stream, row in itertools.product(plan.streams, plan.rows):
        if (stream, row) not in finished:
            continue
        seeds = finished[stream, row]
        reference = {} if row == first else finished.get((stream, first), {})
        same = (finished.get((stream, Row(first.method, row.classifier, drift)), {}) for drift in (row.drift, "none"))
        untrained = {} if row.method == first.method else next(filter(None, same), {})
        entries.append(_entry(stream, row, (chosen or {}).get((stream, row), {}), seeds, reference, untrained))
    budgets: dict[tuple[str, Row], str] = {}
    for stream, rows in by_stream(entries).items():
        _correct({entry.row: finished[stream, entry.row] for entry in rows}, rows, first)
        trained = [entry.row for entry in rows if plan.trains(entry.row.method)]
        found = {(stream, row): _budget(list(finished[stream, row].values())) for row in trained}
        budgets |= found if len(set(found.values())) > 1 else {}
    return [entry.model_copy(update={"budget": budgets.get((entry.stream, entry.row), "")}) for entry in entries]


def _budget(runs: Sequence[CellRow]) -> str:
    """Return the epochs, the batch size and the learning rate of a row, each as one number or its range over seeds."""
    cells = [run.cell for run in runs]
    numbers = {
        "epochs": {cell.arguments["epochs"] for cell in cells},
        "batch": {cell.arguments["batch_size"] for cell in cells},
        "rate": {cell.cost.learning_rate for cell in cells} - {None},
    }
    texts = {name: [f"{end(found):.12g}" for end in (min, max)] for name, found in numbers.items() if found}
    return ", ".join(f"{name} {' to '.join(dict.fromkeys(ends))}" for name, ends in texts.items())


def _correct(seeds: dict[Row, dict[int, CellRow]], entries: Sequence[Entry], reference: Row) -> None:
    """Set `corrected` and `behind` of all rows of a stream."""
    for measure in MEASURES:
        sign = -1 if measure == "forgetting" else 1
        best = max(entries, key=lambda entry: sign * entry.means[measure]).row
        for field, other in (("corrected", reference), ("behind", best)):
            found = {
                entry.row: _paired(seeds[entry.row], seeds.get(other, {}), measure)
                for entry in entries
                if entry.row != other
            }
            known = {row: estimated(values) for row, values in found.items() if values is not None}
            intervals = dict(zip(known, holm_intervals(list(known.values())), strict=True))
            for entry in entries:
                getattr(entry, field)[measure] = intervals.get(entry.row)


def gains_of_training(plan: Plan, finished: Finished, entries: Sequence[Entry]) -> dict[str, Difference | None]:
    """Return `Comparison.gains`."""
    gains: dict[str, Difference | None] = {}
    for stream, rows in by_stream(entries).items():
        if best := best_rows(plan, rows):
            with_training, without = (finished[stream, entry.row] for entry in best)
            gains[stream] = _difference(with_training, without, "last")
    return gains


def best_rows(plan: Plan, entries: Sequence[Entry]) -> tuple[Entry, Entry] | None:
    """Return the best row with training and the best one without, or None if there is only one kind."""
    kinds = [[entry for entry in entries if plan.trains(entry.row.method) == trains] for trains in (True, False)]
    if not all(kinds):
        return None
    with_training, without = (max(kind, key=lambda entry: entry.means["last"]) for kind in kinds)
    return with_training, without


def read_row(folder: Path, row: Row, cell: Cell) -> CellRow | None:
    """Read a row from the files of a cell; return None if there are no answers for the cell's settings."""
    done = read_cell(folder)
    if done is None or (done.settings, done.arguments) != (as_json(cell.settings), arguments_of(cell)):
        return None
    if not answers_path(folder, row).is_file():
        return None
    answers, facts = read_answers(folder, row, done)
    shares = image_shares(answers, facts.class_names)
    curve = [float(step.right.double().mean()) for step in answers]
    by_task = [
        [float(step.right[step.task == number].double().mean()) for number in step.task.unique().tolist()]
        for step in answers
    ]
    return CellRow(shares, curve, by_task, calibration_error(answers[-1].probability, answers[-1].right), facts, done)


def _difference(row: dict[int, CellRow], other: dict[int, CellRow], measure: Measure) -> Difference | None:
    """Return the difference of two rows over their common seeds; None if there are none or the test images differ."""
    values = _paired(row, other, measure)
    return None if values is None else mean_interval(values)


def _paired(row: dict[int, CellRow], other: dict[int, CellRow], measure: Measure) -> np.ndarray | None:
    """Return the differences of two rows, (common seeds, images), or None as in `_difference`."""
    pairs = [(row[seed].shares[measure], other[seed].shares[measure]) for seed in row if seed in other]
    if len({len(side) for pair in pairs for side in pair}) != 1:  # only equal sets of images can be paired
        return None
    return np.stack([shares - reference for shares, reference in pairs])


def _entry(
    stream: str,
    row: Row,
    chosen: dict[str, Any],
    seeds: dict[int, CellRow],
    reference: dict[int, CellRow],
    untrained: dict[int, CellRow],
) -> Entry:
    runs = list(seeds.values())
    shares = {name: [run.shares[name] for run in runs] for name in MEASURES}
    values = {name: [mean_share(by_image) for by_image in by_run] for name, by_run in shares.items()}
    same = len({len(by_image) for by_image in shares["last"]}) == 1
    curves = [run.curve for run in runs]
    return Entry(
        stream=stream,
        row=row,
        chosen=chosen,
        seeds=tuple(seeds),
        means={name: statistics.fmean(numbers) for name, numbers in values.items()},
        spreads={name: statistics.stdev(n) if len(n) > 1 else None for name, n in values.items()},
        intervals={name: mean_interval(np.stack(by_run)) for name, by_run in shares.items()} if same else {},
        differences={name: _difference(seeds, reference, name) for name in MEASURES},
        gain=_difference(seeds, untrained, "last"),
        calibration_error=statistics.fmean(run.calibration_error for run in runs),
        seconds=statistics.fmean(run.cell.cost.seconds + run.facts.seconds for run in runs),
        cpu_seconds=statistics.fmean(run.cell.cost.cpu_seconds + run.facts.cpu_seconds for run in runs),
        curve=[statistics.fmean(step) for step in zip(*curves)] if len(set(map(len, curves))) == 1 else [],
        by_task=_mean_matrix([run.by_task for run in runs]),
        trainable_parameters=runs[0].cell.cost.trainable_parameters,
        kept_bytes=max(run.cell.cost.kept_bytes + run.facts.nbytes for run in runs),
        passes=runs[0].cell.cost.passes,
        peak_bytes=max((run.cell.cost.peak_bytes for run in runs if run.cell.cost.peak_bytes), default=None),
        retention=_mean_retention([run.cell.retention for run in runs if run.cell.retention]),
    )


def _mean_matrix(seeds: Sequence[list[list[float]]]) -> list[list[float]]:
    """Return the mean of triangular matrices over the seeds, or nothing if they have different shapes."""
    if len({tuple(map(len, matrix)) for matrix in seeds}) != 1:
        return []
    return [[statistics.fmean(values) for values in zip(*rows, strict=True)] for rows in zip(*seeds, strict=True)]


def _mean_retention(seeds: Sequence[Retention]) -> Retention | None:
    """Return the mean over the seeds, including the scales if all seeds have the same ones."""
    if not seeds:
        return None
    same = len({tuple(point.scale for point in seed.scales) for seed in seeds}) == 1
    points = (
        [_means(points, *ScalePoint.model_fields) for points in zip(*(seed.scales for seed in seeds))] if same else []
    )
    return Retention.model_validate({**_means(seeds, "before", "after"), "scales": points})


def _means(records: Sequence[Record], *names: str) -> dict[str, Any]:
    return {name: statistics.fmean(getattr(record, name) for record in records) for name in names}


# ---------------------------------------------------------------------- the columns


def _with_interval(mean: float | None, interval: Difference | None, show: Show = percent, end: Show = signed) -> str:
    """Format a mean and its interval in percent."""
    if mean is None:
        return ""
    return show(mean) + ("" if interval is None else f" ({end(interval.low)} to {end(interval.high)})")


def _share(measure: Measure, entry: Entry) -> str:
    def clamped(value: float) -> str:
        return percent(min(max(value, 0.0), 1.0))

    return _with_interval(entry.means.get(measure), entry.intervals.get(measure), end=clamped)


def _forgetting(entry: Entry) -> str:
    several = len(entry.curve) > 1
    return _with_interval(entry.means.get("forgetting") if several else None, entry.intervals.get("forgetting"))


def _format_difference(difference: Difference | None) -> str:
    return "" if difference is None else _with_interval(difference.mean, difference, signed)


def _format_interval(difference: Difference | None) -> str:
    return "" if difference is None else f"{signed(difference.low)} to {signed(difference.high)}"


def _retention(retention: Retention | None) -> str:
    return "" if retention is None else f"{percent(retention.before)} → {percent(retention.after)}"


def _clearly_better(measure: Measure, entry: Entry) -> bool:
    """Return whether a figure is bold: clearly better than the reference, with more than `FEW` seeds."""
    difference = entry.differences.get(measure)
    better = difference is not None and (difference.high < 0 if measure == "forgetting" else difference.low > 0)
    return better and len(entry.seeds) > FEW


# comparison.html explains each column.
COLUMNS: list[Column[Entry]] = [
    Column("stream", attrgetter("stream"), number=False),
    Column("method", attrgetter("row.method"), number=False),
    Column("classifier", attrgetter("row.classifier"), number=False),
    Column("drift", lambda entry: "" if entry.row.drift == "none" else entry.row.drift, number=False),
    Column("chosen", lambda entry: as_text(entry.chosen).replace("=", " = "), number=False),
    Column("budget", attrgetter("budget"), number=False),
    Column("seeds", lambda entry: f"{len(entry.seeds)}, few" if len(entry.seeds) <= FEW else ""),
    Column("A_last", partial(_share, "last"), bold=partial(_clearly_better, "last")),
    Column("A_bar", partial(_share, "average"), bold=partial(_clearly_better, "average")),
    Column("forgetting", _forgetting, bold=partial(_clearly_better, "forgetting")),
    Column("vs. reference (95 %)", lambda entry: _format_difference(entry.differences["last"])),
    Column("corrected (Holm)", lambda entry: _format_interval(entry.corrected.get("last"))),
    Column("vs. same classifier (95 %)", lambda entry: _format_difference(entry.gain)),
    Column("calibration error", lambda entry: percent(entry.calibration_error)),
    Column("CPU s", lambda entry: f"{entry.cpu_seconds:.0f}"),
    Column("trained", lambda entry: f"{entry.trainable_parameters:,}"),
    Column("kept MiB", lambda entry: f"{entry.kept_bytes / 2**20:.1f}"),
    Column("passes an image", lambda entry: "" if entry.passes is None else str(entry.passes)),
    Column("peak MiB", lambda entry: "" if entry.peak_bytes is None else f"{entry.peak_bytes / 2**20:,.0f}"),
    Column("still known", lambda entry: _retention(entry.retention)),
]
COSTS = ("budget", "CPU s", "trained", "kept MiB", "passes an image", "peak MiB")  # a table of their own on the page
# Columns of the CSV file -> the path of each value in an entry.
_FIGURES = {
    "": "means.{}",
    "_std": "spreads.{}",
    "_from": "intervals.{}.low",
    "_to": "intervals.{}.high",
    "_difference": "differences.{}.mean",
    "_low": "differences.{}.low",
    "_high": "differences.{}.high",
    "_holm_low": "corrected.{}.low",
    "_holm_high": "corrected.{}.high",
}
_CSV = {"stream": "stream", "method": "row.method", "classifier": "row.classifier", "drift": "row.drift"}
_CSV |= {"chosen": "chosen", "seeds": "seeds"}
_CSV |= {f"{name}{end}": place.format(name) for name in MEASURES for end, place in _FIGURES.items()}
_CSV |= {"gain": "gain.mean", "gain_low": "gain.low", "gain_high": "gain.high"}
_CSV |= {name: name for name in ("calibration_error", "seconds", "cpu_seconds", "trainable_parameters", "kept_bytes")}
_CSV |= {name: name for name in ("passes", "peak_bytes", "budget")}
_CSV |= {"retention_before": "retention.before", "retention": "retention.after"}


def write_summary_csv(path: Path, entries: Sequence[Entry]) -> None:
    """Write the table as CSV, with all digits."""
    texts = ({"chosen": as_text(entry.chosen), "seeds": len(entry.seeds)} for entry in entries)
    full = [flat_settings(entry.model_dump() | text) for entry, text in zip(entries, texts)]
    write_csv(path, list(_CSV), ([row.get(place) for place in _CSV.values()] for row in full))


def by_stream(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """Return the entries of each stream, the best first. The streams keep their order."""
    streams: dict[str, list[Entry]] = {entry.stream: [] for entry in entries}
    for entry in sorted(entries, key=lambda entry: -entry.means["last"]):
        streams[entry.stream].append(entry)
    return streams


def format_summary(entries: Sequence[Entry]) -> str:
    """Return a Markdown table for each stream, with all accuracies in percent."""
    return "\n\n".join(
        f"{stream}, {count_seeds(rows)}\n\n{format_markdown(filled(COLUMNS, rows)[1:], rows)}"
        for stream, rows in by_stream(entries).items()
    )


def count_seeds(entries: Sequence[Entry]) -> str:
    """Return the number of seeds of the rows, in words."""
    counts = sorted({len(entry.seeds) for entry in entries})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{number} seed" if counts == [1] else f"{number} seeds"
