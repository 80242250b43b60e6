"""The table of a comparison: a row for each method and classifier on each stream, all against one reference."""

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np

from dulbe_peft.comparison.cells import AnswersFacts, CellRecord, answers_path, as_json, read_answers, read_cell
from dulbe_peft.comparison.comparison_file import Entry, Retention
from dulbe_peft.comparison.intervals import Difference, Measure, image_shares, mean_interval, mean_share
from dulbe_peft.comparison.plan import Cell, Chosen, Plan, Row, as_text
from dulbe_peft.metrics.accuracy import calibration_error, percent, signed
from dulbe_peft.report.table import Column, filled, format_markdown

MEASURES: tuple[Measure, ...] = get_args(Measure)
FEW = 2  # seeds that are too few to tell how much a further one would differ


@dataclass(frozen=True)
class _CellRow:
    """One row of one cell, as its files tell; `shares` is what every test image adds to the measures."""

    shares: dict[Measure, np.ndarray]
    curve: list[float]
    calibration_error: float
    facts: AnswersFacts
    cell: CellRecord


def make_entries(
    plan: Plan, output: Path, work: Sequence[tuple[Cell, list[Row]]], chosen: Chosen | None = None
) -> list[Entry]:
    """The rows of all streams, of what is finished; `chosen` as `Plan.cells` has got it."""
    found: dict[tuple[str, Row], dict[int, _CellRow]] = {}
    for cell, rows in work:
        for row in rows:
            if read := _read(output / cell.folder, row, cell):
                found.setdefault((cell.stream, row), {})[cell.seed] = read
    first, entries = plan.baseline, []
    for stream, row in itertools.product(plan.streams, plan.all_rows):
        if (stream, row) not in found:
            continue
        seeds = found[stream, row]
        reference = {} if row == first else found.get((stream, first), {})
        same = (found.get((stream, Row(first.method, row.classifier, drift)), {}) for drift in (row.drift, "none"))
        untrained = {} if row.method == first.method else next(filter(None, same), {})
        differences = {name: _difference(seeds, reference, name) for name in MEASURES}
        values = (chosen or {}).get((stream, row), {})
        entries.append(_entry(stream, row, values, seeds, differences, _difference(seeds, untrained, "last")))
    return entries


def _read(folder: Path, row: Row, cell: Cell) -> _CellRow | None:
    done = read_cell(folder)
    if done is None or done.settings != as_json(cell.settings) or not answers_path(folder, row).is_file():
        return None
    answers, facts = read_answers(folder, row, done)
    shares = image_shares(answers, facts.class_names)
    curve = [float(step.right.double().mean()) for step in answers]
    return _CellRow(shares, curve, calibration_error(answers[-1].probability, answers[-1].right), facts, done)


def _difference(found: dict[int, _CellRow], other: dict[int, _CellRow], measure: Measure) -> Difference | None:
    """Of two rows, over the seeds that both have; None where there is none, or where the images are others."""
    pairs = [(found[seed].shares[measure], other[seed].shares[measure]) for seed in found if seed in other]
    if len({len(side) for pair in pairs for side in pair}) != 1:  # other images in each seed cannot be paired
        return None
    return mean_interval(np.stack([own - reference for own, reference in pairs]))


def _entry(
    stream: str,
    row: Row,
    chosen: dict[str, Any],
    seeds: dict[int, _CellRow],
    differences: dict[Measure, Difference | None],
    gain: Difference | None,
) -> Entry:
    found = list(seeds.values())
    shares = {name: [one.shares[name] for one in found] for name in MEASURES}
    values = {name: [mean_share(one) for one in own] for name, own in shares.items()}
    same = len({len(one) for one in shares["last"]}) == 1
    curves = [one.curve for one in found]
    return Entry(
        stream=stream,
        row=row,
        chosen=chosen,
        seeds=tuple(seeds),
        means={name: statistics.fmean(numbers) for name, numbers in values.items()},
        spreads={name: statistics.stdev(n) if len(n) > 1 else None for name, n in values.items()},
        intervals={name: mean_interval(np.stack(own)) for name, own in shares.items()} if same else {},
        differences=differences,
        gain=gain,
        calibration_error=statistics.fmean(one.calibration_error for one in found),
        seconds=statistics.fmean(one.cell.cost.seconds + one.facts.seconds for one in found),
        cpu_seconds=statistics.fmean(one.cell.cost.cpu_seconds + one.facts.cpu_seconds for one in found),
        curve=[statistics.fmean(step) for step in zip(*curves)] if len(set(map(len, curves))) == 1 else [],
        trainable_parameters=found[0].cell.cost.trainable_parameters,
        kept_bytes=max(one.cell.cost.kept_bytes + one.facts.nbytes for one in found),
        retention=_mean_retention([one.cell.retention for one in found if one.cell.retention]),
    )


def _mean_retention(found: Sequence[Retention]) -> Retention | None:
    """The mean over the seeds, with the curve over the scales where all have the same scales."""
    if not found:
        return None
    curves = [[vars(point) for point in one.scales] for one in found]
    if len({tuple(point["scale"] for point in curve) for curve in curves}) > 1:
        curves = []
    points = [{name: statistics.fmean(p[name] for p in same) for name in same[0]} for same in zip(*curves)]
    ends: Any = {name: statistics.fmean(getattr(one, name) for one in found) for name in ("before", "after")}
    return Retention.model_validate({**ends, "scales": points})


# ---------------------------------------------------------------------- the columns


def _value(path: str) -> Callable[[Entry], Any]:
    """What an entry has at a dotted path; None where a part of the way is None."""

    def value(entry: Entry) -> Any:
        found: Any = entry
        for name in path.split("."):
            found = found.get(name) if isinstance(found, dict) else getattr(found, name, None)
        return found

    return value


def _share(name: Measure) -> Callable[[Entry], str]:
    """How a measure is shown: its mean and interval, in percent."""

    def show(entry: Entry) -> str:
        found = entry.intervals.get(name)
        if found is None:
            return percent(entry.means[name]) if name in entry.means else ""
        return f"{percent(entry.means[name])} ({percent(max(found.low, 0))} to {percent(min(found.high, 1))})"

    return show


def _forgetting(entry: Entry) -> str:
    found, mean = entry.intervals.get("forgetting"), entry.means.get("forgetting")
    if mean is None or len(entry.curve) < 2:
        return ""
    return percent(mean) + ("" if found is None else _ends(found))


def _ends(found: Difference) -> str:
    return f" ({signed(found.low)} to {signed(found.high)})"


def _interval(found: Difference | None) -> str:
    return "" if found is None else signed(found.mean) + _ends(found)


def _column(
    title: str,
    meaning: str,
    show: Callable[[Entry], str] | None = None,
    measure: Measure | None = None,
    number: bool = True,
    values: Mapping[str, str | Callable[[Entry], Any]] | None = None,
) -> Column[Entry]:
    """A column, bold by its `measure`; `values` are what an entry has in the CSV file, by a dotted path or a function.

    Without `show` it shows the first of them.
    """
    found = {name: _value(value) if isinstance(value, str) else value for name, value in (values or {}).items()}
    bold = None if measure is None else partial(_clearly_better, measure)
    return Column(title, show or next(iter(found.values())), number, meaning, values=found, bold=bold)


def _clearly_better(measure: Measure, entry: Entry) -> bool:
    """What bold means everywhere: better than the reference, over more than `FEW` seeds, beyond the interval."""
    found = entry.differences.get(measure)
    better = found is not None and (found.high < 0 if measure == "forgetting" else found.low > 0)
    return better and len(entry.seeds) > FEW


_FIGURES = {
    "": "means.{}",
    "_std": "spreads.{}",
    "_from": "intervals.{}.low",
    "_to": "intervals.{}.high",
    "_difference": "differences.{}.mean",
    "_low": "differences.{}.low",
    "_high": "differences.{}.high",
}
COLUMNS: list[Column[Entry]] = [
    _column("stream", "", number=False, values={"stream": "stream"}),
    _column("method", "What trained the model: settings under a name.", number=False, values={"method": "row.method"}),
    _column(
        "classifier",
        "What tells the classes apart. It learned from the features of the trained model.",
        number=False,
        values={"classifier": "row.classifier"},
    ),
    _column(
        "drift",
        "What moved the classifier's memory of old classes when the features moved. Empty: nothing did.",
        lambda entry: "" if entry.row.drift == "none" else entry.row.drift,
        number=False,
        values={"drift": "row.drift"},
    ),
    _column(
        "chosen",
        "The settings with which the row is best on held-back training images, of those that its method has tried.",
        number=False,
        values={"chosen": lambda entry: as_text(entry.chosen)},
    ),
    _column(
        "seeds",
        "Of rows with two seeds or one: they say little of how a further seed would turn out, and nothing in such a "
        "row is bold.",
        lambda entry: f"{len(entry.seeds)}, few" if len(entry.seeds) <= FEW else "",
        values={"seeds": lambda entry: len(entry.seeds)},
    ),
    _column(
        "A_last",
        "The percent of all test images that are named right after the last task, with its 95 % interval. Bold in "
        "every column: clearly better than the reference, for the interval of the difference leaves out zero.",
        _share("last"),
        "last",
        values={f"{name}{end}": path.format(name) for name in MEASURES for end, path in _FIGURES.items()},
    ),
    _column(
        "A_bar",
        "After each task, the percent of test images of all classes seen by then that are named right. This is the "
        "mean over the tasks.",
        _share("average"),
        "average",
    ),
    _column(
        "forgetting",
        "What the earlier tasks have lost since each was known best, in percentage points, as a mean. Zero is best.",
        _forgetting,
        "forgetting",
    ),
    _column(
        "to the reference (95 %)",
        "A_last minus the reference's A_last, in percentage points, over the seeds that both have finished. The "
        "brackets hold the 95 % interval. A difference is clear where the interval leaves out zero.",
        lambda entry: _interval(entry.differences["last"]),
    ),
    _column(
        "to the same classifier (95 %)",
        "The same, but to the row of the reference's method with this classifier, and with this drift where it has "
        "one. Where that method trains nothing, it is what training adds.",
        lambda entry: _interval(entry.gain),
        values={"gain": "gain.mean", "gain_low": "gain.low", "gain_high": "gain.high"},
    ),
    _column(
        "calibration error",
        "How far the probability of an answer is from how often such answers are right, in percentage points. Zero "
        "is best.",
        lambda entry: percent(entry.calibration_error),
        values={"calibration_error": "calibration_error"},
    ),
    _column(
        "seconds",
        "To train and test the stream and to teach the classifier by the clock, as a mean over the seeds.",
        lambda entry: f"{entry.seconds:.0f}",
        values={"seconds": "seconds"},
    ),
    _column(
        "CPU seconds",
        "The same, but the seconds that the run's own process computed, which others on the machine do not change.",
        lambda entry: f"{entry.cpu_seconds:.0f}",
        values={"cpu_seconds": "cpu_seconds"},
    ),
    _column(
        "trained",
        "How many parameters a task trains.",
        lambda entry: f"{entry.trainable_parameters:,}",
        values={"trainable_parameters": "trainable_parameters"},
    ),
    _column(
        "kept MiB",
        "What method and classifier keep in memory between tasks, without the model and its adapter.",
        lambda entry: f"{entry.kept_bytes / 2**20:.1f}",
        values={"kept_bytes": "kept_bytes"},
    ),
    _column(
        "still known",
        "Images of classes that the model never learned here: the percent that it names right by the class names, "
        "before all tasks → after them.",
        lambda entry: "" if (r := entry.retention) is None else f"{percent(r.before)} → {percent(r.after)}",
        values={"retention_before": "retention.before", "retention": "retention.after"},
    ),
]


def ordered(entries: Sequence[Entry]) -> list[Entry]:
    """The rows, the best of each stream first; the streams as they are."""
    place = {stream: number for number, stream in enumerate(dict.fromkeys(entry.stream for entry in entries))}
    return sorted(entries, key=lambda entry: (place[entry.stream], -entry.means["last"]))


def format_summary(entries: Sequence[Entry]) -> str:
    """The table in Markdown, one for each stream; all shares in percent."""
    parts = []
    for stream in dict.fromkeys(entry.stream for entry in entries):
        own = ordered([entry for entry in entries if entry.stream == stream])
        parts.append(f"{stream}, {count_seeds(own)}\n\n{format_markdown(filled(COLUMNS, own)[1:], own)}")
    return "\n\n".join(parts)


def count_seeds(entries: Sequence[Entry]) -> str:
    """How many seeds the rows have, in words."""
    counts = sorted({len(entry.seeds) for entry in entries})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{number} seed" if counts == [1] else f"{number} seeds"
