"""The table of a comparison: a row for each method and classifier on each stream, all against one reference."""

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
from research.comparison.intervals import Difference, Measure, image_shares, mean_interval, mean_share
from research.comparison.plan import Cell, Chosen, Plan, Row, Work, as_text

MEASURES: tuple[Measure, ...] = get_args(Measure)
Show = Callable[[float], str]
FEW = 2  # seeds that are too few to tell how much a further one would differ


@dataclass(frozen=True)
class CellRow:
    """One row of one cell, as its files tell; `shares` is what every test image adds to the measures."""

    shares: dict[Measure, np.ndarray]
    curve: list[float]
    calibration_error: float
    facts: AnswersFacts
    cell: CellRecord


def make_entries(plan: Plan, output: Path, work: Work, chosen: Chosen | None = None) -> list[Entry]:
    """The rows of all streams, of what is finished; `chosen` as `Plan.cells` has got it."""
    found: dict[tuple[str, Row], dict[int, CellRow]] = {}
    for cell, rows in work:
        for row in rows:
            if read := read_row(output / cell.folder, row, cell):
                found.setdefault((cell.stream, row), {})[cell.seed] = read
    first, entries = plan.reference, []
    for stream, row in itertools.product(plan.streams, plan.rows):
        if (stream, row) not in found:
            continue
        seeds = found[stream, row]
        reference = {} if row == first else found.get((stream, first), {})
        same = (found.get((stream, Row(first.method, row.classifier, drift)), {}) for drift in (row.drift, "none"))
        untrained = {} if row.method == first.method else next(filter(None, same), {})
        entries.append(_entry(stream, row, (chosen or {}).get((stream, row), {}), seeds, reference, untrained))
    return entries


def read_row(folder: Path, row: Row, cell: Cell) -> CellRow | None:
    """What a cell's files tell of a row; None where there is no answer to the cell's settings."""
    done = read_cell(folder)
    if done is None or (done.settings, done.arguments) != (as_json(cell.settings), arguments_of(cell)):
        return None
    if not answers_path(folder, row).is_file():
        return None
    answers, facts = read_answers(folder, row, done)
    shares = image_shares(answers, facts.class_names)
    curve = [float(step.right.double().mean()) for step in answers]
    return CellRow(shares, curve, calibration_error(answers[-1].probability, answers[-1].right), facts, done)


def _difference(found: dict[int, CellRow], other: dict[int, CellRow], measure: Measure) -> Difference | None:
    """Of two rows, over the seeds that both have; None where there is none, or where the images are others."""
    pairs = [(found[seed].shares[measure], other[seed].shares[measure]) for seed in found if seed in other]
    if len({len(side) for pair in pairs for side in pair}) != 1:  # other images in each seed cannot be paired
        return None
    return mean_interval(np.stack([own - reference for own, reference in pairs]))


def _entry(
    stream: str,
    row: Row,
    chosen: dict[str, Any],
    seeds: dict[int, CellRow],
    reference: dict[int, CellRow],
    untrained: dict[int, CellRow],
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
        differences={name: _difference(seeds, reference, name) for name in MEASURES},
        gain=_difference(seeds, untrained, "last"),
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
    same = len({tuple(point.scale for point in one.scales) for one in found}) == 1
    points = (
        [_means(points, *ScalePoint.model_fields) for points in zip(*(one.scales for one in found))] if same else []
    )
    return Retention.model_validate({**_means(found, "before", "after"), "scales": points})


def _means(records: Sequence[Record], *names: str) -> dict[str, Any]:
    return {name: statistics.fmean(getattr(one, name) for one in records) for name in names}


# ---------------------------------------------------------------------- the columns


def _around(mean: float | None, found: Difference | None, show: Show = percent, end: Show = signed) -> str:
    """A mean and its interval, in percent."""
    if mean is None:
        return ""
    return show(mean) + ("" if found is None else f" ({end(found.low)} to {end(found.high)})")


def _share(measure: Measure, entry: Entry) -> str:
    def clamped(value: float) -> str:
        return percent(min(max(value, 0.0), 1.0))

    return _around(entry.means.get(measure), entry.intervals.get(measure), end=clamped)


def _forgetting(entry: Entry) -> str:
    several = len(entry.curve) > 1
    return _around(entry.means.get("forgetting") if several else None, entry.intervals.get("forgetting"))


def _difference_to(found: Difference | None) -> str:
    return "" if found is None else _around(found.mean, found, signed)


def _retention(found: Retention | None) -> str:
    return "" if found is None else f"{percent(found.before)} → {percent(found.after)}"


def _clearly_better(measure: Measure, entry: Entry) -> bool:
    """What bold means everywhere: better than the reference, over more than `FEW` seeds, beyond the interval."""
    found = entry.differences.get(measure)
    better = found is not None and (found.high < 0 if measure == "forgetting" else found.low > 0)
    return better and len(entry.seeds) > FEW


# The page says what each is.
COLUMNS: list[Column[Entry]] = [
    Column("stream", attrgetter("stream"), number=False),
    Column("method", attrgetter("row.method"), number=False),
    Column("classifier", attrgetter("row.classifier"), number=False),
    Column("drift", lambda entry: "" if entry.row.drift == "none" else entry.row.drift, number=False),
    Column("chosen", lambda entry: as_text(entry.chosen), number=False),
    Column("seeds", lambda entry: f"{len(entry.seeds)}, few" if len(entry.seeds) <= FEW else ""),
    Column("A_last", partial(_share, "last"), bold=partial(_clearly_better, "last")),
    Column("A_bar", partial(_share, "average"), bold=partial(_clearly_better, "average")),
    Column("forgetting", _forgetting, bold=partial(_clearly_better, "forgetting")),
    Column("to the reference (95 %)", lambda entry: _difference_to(entry.differences["last"])),
    Column("to the same classifier (95 %)", lambda entry: _difference_to(entry.gain)),
    Column("calibration error", lambda entry: percent(entry.calibration_error)),
    Column("seconds", lambda entry: f"{entry.seconds:.0f}"),
    Column("CPU seconds", lambda entry: f"{entry.cpu_seconds:.0f}"),
    Column("trained", lambda entry: f"{entry.trainable_parameters:,}"),
    Column("kept MiB", lambda entry: f"{entry.kept_bytes / 2**20:.1f}"),
    Column("still known", lambda entry: _retention(entry.retention)),
]
# The columns of the CSV file, and where in an entry each stands.
_FIGURES = {
    "": "means.{}",
    "_std": "spreads.{}",
    "_from": "intervals.{}.low",
    "_to": "intervals.{}.high",
    "_difference": "differences.{}.mean",
    "_low": "differences.{}.low",
    "_high": "differences.{}.high",
}
_CSV = {"stream": "stream", "method": "row.method", "classifier": "row.classifier", "drift": "row.drift"}
_CSV |= {"chosen": "chosen", "seeds": "seeds"}
_CSV |= {f"{name}{end}": place.format(name) for name in MEASURES for end, place in _FIGURES.items()}
_CSV |= {"gain": "gain.mean", "gain_low": "gain.low", "gain_high": "gain.high"}
_CSV |= {name: name for name in ("calibration_error", "seconds", "cpu_seconds", "trainable_parameters", "kept_bytes")}
_CSV |= {"retention_before": "retention.before", "retention": "retention.after"}


def write_summary_csv(path: Path, entries: Sequence[Entry]) -> None:
    """Write the table with its figures in full."""
    texts = ({"chosen": as_text(entry.chosen), "seeds": len(entry.seeds)} for entry in entries)
    full = [flat_settings(entry.model_dump() | text) for entry, text in zip(entries, texts)]
    write_csv(path, list(_CSV), ([row.get(place) for place in _CSV.values()] for row in full), "surrogateescape")


def by_stream(entries: Sequence[Entry]) -> dict[str, list[Entry]]:
    """The rows of each stream, the best first; the streams as they are."""
    found: dict[str, list[Entry]] = {entry.stream: [] for entry in entries}
    for entry in sorted(entries, key=lambda entry: -entry.means["last"]):
        found[entry.stream].append(entry)
    return found


def format_summary(entries: Sequence[Entry]) -> str:
    """The table in Markdown, one for each stream; all shares in percent."""
    return "\n\n".join(
        f"{stream}, {count_seeds(own)}\n\n{format_markdown(filled(COLUMNS, own)[1:], own)}"
        for stream, own in by_stream(entries).items()
    )


def count_seeds(entries: Sequence[Entry]) -> str:
    """How many seeds the rows have, in words."""
    counts = sorted({len(entry.seeds) for entry in entries})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{number} seed" if counts == [1] else f"{number} seeds"
