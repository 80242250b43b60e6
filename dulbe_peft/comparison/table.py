"""The table of a comparison: a row for each method and classifier, all against one reference."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dulbe_peft.comparison.cells import answers_path, check_retention, has_settings_of, read_answers, read_cell
from dulbe_peft.comparison.plan import Cell, Plan, Row
from dulbe_peft.metrics.accuracy import calibration_error, percent, signed
from dulbe_peft.metrics.bootstrap import Difference, image_shares, paired_difference
from dulbe_peft.utils.checks import check_number, read_typed
from dulbe_peft.utils.files import read_csv, read_json, write_csv, write_json

TABLE_FILE, CSV_FILE, ADVICE_FILE = "comparison.json", "comparison.csv", "advice.json"
MEASURES = {"last": "A_last", "average": "A_bar"}
# What a column is called, and what it means to somebody who has not read the paper.
COLUMNS = {
    "method": "What trained the model: settings under a name.",
    "classifier": "What tells the classes apart. It learned from the features of the trained model.",
    "drift": "What moved the classifier's memory of old classes when the features moved. Empty: nothing did.",
    "A_bar": "After each task, the percent of test images of all classes seen by then that are named right. This is "
    "the mean over the tasks. ± is the standard deviation over the seeds.",
    "A_last": "The percent of all test images that are named right after the last task. ± as for A_bar.",
    "to the reference (95 %)": "A_last minus the reference's A_last, in percentage points, over the seeds that both "
    "have finished. The brackets hold the 95 % interval. A difference is clear where the interval leaves out zero.",
    "to the same classifier (95 %)": "The same, but to the row of the reference's method with this classifier, and "
    "with this drift where it has one. Where that method trains nothing, it is what training adds.",
    "calibration error": "How far the probability of an answer is from how often such answers are right, in "
    "percentage points. Zero is best.",
    "seconds": "To train and test the stream and to teach the classifier, as a mean over the seeds.",
    "trained": "How many parameters a task trains.",
    "kept MiB": "What method and classifier keep in memory between tasks, without the model and its adapter.",
    "still known": "Images of classes that the model never learned here: the percent that it names right by the class "
    "names, before all tasks → after them.",
}
TEXT_COLUMNS = 3  # the first ones; all others hold figures


@dataclass(frozen=True)
class Entry:
    """A row on one stream.

    Attributes:
        stream: name of the stream.
        row: method, classifier and drift.
        seeds: those that are finished.
        means: "last" and "average" -> mean over the seeds, fractions.
        spreads: the same -> standard deviation over the seeds with n - 1; None of a single seed.
        differences: the same -> difference to the reference row over the seeds that both have finished; None for the
            reference itself, or where there is no such seed.
        gain: difference in A_last to the row of the same classifier and the reference's method, in the same way; None
            for that method's own rows.
        calibration_error: expected calibration error after the last task, mean over the seeds.
        seconds: of training and testing the stream, and of teaching the classifier; mean over the seeds.
        trainable_parameters: that a task trains.
        kept_bytes: that method and classifier keep between tasks, without the model and its adapter.
        retention: accuracy on classes in no stream, "before" all tasks and "after" them, and "scales" where the stream
            asks for them, see `dulbe_peft.metrics.retention`; means over the seeds. None where not measured.
    """

    stream: str
    row: Row
    seeds: tuple[int, ...]
    means: dict[str, float]
    spreads: dict[str, float | None]
    differences: dict[str, Difference | None]
    gain: Difference | None
    calibration_error: float
    seconds: float
    trainable_parameters: int
    kept_bytes: int
    retention: dict[str, Any] | None


@dataclass(frozen=True)
class Scope:
    """What a comparison holds when all of it is finished.

    Attributes:
        streams: name -> settings.
        methods: name -> settings.
        choices: method -> setting -> values that were tried on held-back training images.
        rows: of every stream.
        seeds: of every row.
        reference: the row that all others are compared with.
    """

    streams: dict[str, dict[str, Any]]
    methods: dict[str, dict[str, Any]]
    choices: dict[str, dict[str, list[Any]]]
    rows: tuple[Row, ...]
    seeds: tuple[int, ...]
    reference: Row

    @classmethod
    def of(cls, plan: Plan) -> Scope:
        """The scope of a plan."""
        rows = tuple(row for method in plan.methods for row in plan.rows(method))
        return cls(plan.streams, plan.methods, plan.choices, rows, tuple(plan.seeds), plan.baseline)


@dataclass(frozen=True)
class Table:
    """What a comparison has found so far.

    Attributes:
        entries: of all streams.
        chosen: "stream: method" -> the settings that were chosen on held-back training images.
        scope: what there is to find.
    """

    entries: list[Entry]
    chosen: dict[str, dict[str, Any]]
    scope: Scope

    def missing(self) -> list[tuple[str, Row, tuple[int, ...]]]:
        """Stream, row and seeds of what is not finished."""
        done = {(entry.stream, entry.row): entry.seeds for entry in self.entries}
        found = []
        for stream in self.scope.streams:
            for row in self.scope.rows:
                seeds = tuple(seed for seed in self.scope.seeds if seed not in done.get((stream, row), ()))
                if seeds:
                    found.append((stream, row, seeds))
        return found


@dataclass(frozen=True)
class _Found:
    """One row of one cell, as its files tell."""

    shares: dict[str, np.ndarray]
    error: float
    cell: dict[str, Any]
    cost: dict[str, Any]


def make_table(plan: Plan, output: Path, cells: Sequence[Cell]) -> list[Entry]:
    """The rows of all streams, of what is finished."""
    found: dict[tuple[str, Row], dict[int, _Found]] = {}
    for cell in cells:
        for row in plan.rows(cell.method):
            read = _read(output / cell.folder, row, cell)
            if read is not None:
                found.setdefault((cell.stream, row), {})[cell.seed] = read
    first, entries = plan.baseline, []
    for (stream, row), by_seed in found.items():
        others = {} if row == first else found.get((stream, first), {})
        differences = {name: _difference(by_seed, others, name) for name in MEASURES}
        same = (found.get((stream, Row(first.method, row.classifier, drift)), {}) for drift in (row.drift, "none"))
        others = {} if row.method == first.method else next(filter(None, same), {})
        entries.append(_entry(stream, row, by_seed, differences, _difference(by_seed, others, "last")))
    return entries


def _read(folder: Path, row: Row, asked: Cell) -> _Found | None:
    cell = read_cell(folder)
    if cell is None or not has_settings_of(cell, asked) or not answers_path(folder, row).is_file():
        return None
    answers, names, cost = read_answers(folder, row)
    last, average = image_shares(answers, names)
    return _Found(
        {"last": last, "average": average}, calibration_error(answers[-1].probability, answers[-1].right), cell, cost
    )


def _difference(found: dict[int, _Found], other: dict[int, _Found], measure: str) -> Difference | None:
    """Of two rows, over the seeds that both have; None where there is none, or where the images are others."""
    shared = [seed for seed in found if seed in other]
    sizes = {len(side[seed].shares[measure]) for side in (found, other) for seed in shared}
    if len(sizes) != 1:  # other images in each seed cannot be paired
        return None
    own, reference = (np.stack([side[seed].shares[measure] for seed in shared]) for side in (found, other))
    return paired_difference(own, reference)


def _entry(
    stream: str,
    row: Row,
    found: dict[int, _Found],
    differences: dict[str, Difference | None],
    gain: Difference | None,
) -> Entry:
    values = {name: [float(one.shares[name].mean()) for one in found.values()] for name in MEASURES}
    cells = [one.cell for one in found.values()]
    retention = _mean_retention([one.cell.get("retention") for one in found.values()])
    return Entry(
        stream,
        row,
        tuple(found),
        {name: statistics.fmean(numbers) for name, numbers in values.items()},
        {name: statistics.stdev(n) if len(n) > 1 else None for name, n in values.items()},
        differences,
        gain,
        statistics.fmean(one.error for one in found.values()),
        statistics.fmean(one.cell["cost"]["seconds"] + one.cost["seconds"] for one in found.values()),
        cells[0]["cost"]["trainable_parameters"],
        max(one.cell["cost"]["kept_bytes"] + one.cost["nbytes"] for one in found.values()),
        retention,
    )


def _mean_retention(found: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """What `cell.json` says of classes in no stream, as a mean over the seeds; the curve where all have the same."""
    known = [entry for entry in found if entry is not None]
    if not known:
        return None
    means: dict[str, Any] = {name: statistics.fmean(entry[name] for entry in known) for name in ("before", "after")}
    curves = [entry.get("scales", []) for entry in known]
    if all([point["scale"] for point in curve] == [point["scale"] for point in curves[0]] for curve in curves):
        points = [
            {name: statistics.fmean(p[name] for p in same) for name in same[0]} for same in zip(*curves, strict=True)
        ]
        means |= {"scales": points} if points else {}
    return means


# ---------------------------------------------------------------------- for people and for files


# What each file has in every version; advice.json is written by `dulbe-peft advise`.
_MARKS = {
    TABLE_FILE: {"entries", "scope"},
    CSV_FILE: {"stream", "method", "classifier", "drift"},
    ADVICE_FILE: {"settings", "classifiers"},
}


def refuse_others(output: Path, names: Sequence[str] = (TABLE_FILE, CSV_FILE)) -> None:
    """Raise where a file that is to be written is there, and somebody else wrote it.

    Args:
        output: folder of a comparison.
        names: the files.

    Raises:
        FileExistsError: such a file; the message has its path.
    """
    for name in names:
        path = output / name
        try:
            found = (read_csv(path) or [[]])[0] if path.suffix == ".csv" else read_json(path)
            ours = not isinstance(found, str) and _MARKS[name] <= set(found)
        except (OSError, ValueError, TypeError):
            ours = not os.path.lexists(path)
        if not ours:
            raise FileExistsError(
                f"{path} was not written by a comparison, or is damaged: choose another folder or move it, nothing is "
                "replaced"
            )


def write_table(table: Table, output: Path) -> None:
    """Write `comparison.json`, with all that is known, and `comparison.csv`, a line for each row of each stream."""
    content = asdict(table)
    content["scope"]["streams"] = list(table.scope.streams.items())  # JSON would sort their names
    write_json(output / TABLE_FILE, content)
    write_table_csv(table.entries, output / CSV_FILE)


def write_table_csv(entries: Sequence[Entry], path: Path) -> None:
    """Write all figures in full, as fractions."""
    header = ["stream", "method", "classifier", "drift", "seeds"]
    header += [f"{name}{part}" for name in MEASURES for part in ("", "_std", "_difference", "_low", "_high")]
    header += ["gain", "gain_low", "gain_high", "calibration_error", "seconds", "trainable_parameters", "kept_bytes"]
    header += ["retention_before", "retention"]
    lines: list[list[Any]] = []
    for entry in entries:
        line: list[Any] = [entry.stream, *asdict(entry.row).values(), len(entry.seeds)]
        for name in MEASURES:
            found = entry.differences[name]
            line += [entry.means[name], entry.spreads[name], *(asdict(found).values() if found else [None] * 3)]
        line += asdict(entry.gain).values() if entry.gain else [None] * 3
        retention: dict[str, Any] = entry.retention or {"before": None, "after": None}
        line += [entry.calibration_error, entry.seconds, entry.trainable_parameters, entry.kept_bytes]
        lines.append(["" if cell is None else cell for cell in [*line, retention["before"], retention["after"]]])
    write_csv(path, header, lines)


def read_table(output: Path) -> Table:
    """What `write_table` wrote.

    Raises:
        FileNotFoundError: there is no table.
        ValueError: the file is not as a comparison writes it.
    """
    path = output / TABLE_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: `dulbe-peft compare` writes it")
    try:
        content = read_json(path)
        content["entries"] = [{"gain": None} | line for line in content["entries"]]  # earlier versions had no gain
        content["scope"]["streams"] = dict(content["scope"]["streams"])
        table: Table = read_typed("the table", Table, content)
        for entry in table.entries:
            if not set(MEASURES) == set(entry.means) == set(entry.spreads) == set(entry.differences):
                raise ValueError(f"each row must have {', '.join(MEASURES)}")
            for value in (*entry.means.values(), entry.calibration_error):
                check_number("a mean or an error", value, least=0, most=1)
            check_retention(entry.retention)
        return table
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not as `dulbe-peft compare` writes it: {error!r}; run it again") from error


def format_table(entries: Sequence[Entry]) -> str:
    """The table in Markdown, one for each stream; all figures in percent."""
    parts = []
    for stream in dict.fromkeys(entry.stream for entry in entries):
        own = [entry for entry in entries if entry.stream == stream]
        head = columns(own)
        marks = ["---:" if number >= TEXT_COLUMNS else "---" for number in range(len(head))]
        lines = [f"{stream}, {counted(own)}", "", _line(head), _line(marks)]
        parts.append("\n".join([*lines, *(_line(cells(entry)[: len(head)]) for entry in own)]))
    return "\n\n".join(parts)


def columns(entries: Sequence[Entry]) -> list[str]:
    """The columns that the table of these rows has: `COLUMNS`, without the last where it was not measured."""
    return list(COLUMNS) if any(entry.retention for entry in entries) else list(COLUMNS)[:-1]


def counted(entries: Sequence[Entry]) -> str:
    """How many seeds the rows have."""
    counts = sorted({len(entry.seeds) for entry in entries})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{number} seed" if counts == [1] else f"{number} seeds"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def cells(entry: Entry) -> list[str]:
    """A row of the table as people read it, one text for each of `COLUMNS`; shares in percent."""

    def figure(name: str) -> str:
        spread = entry.spreads[name]
        return percent(entry.means[name]) + ("" if spread is None else f" ± {percent(spread)}")

    away, gain = (
        "" if found is None else f"{signed(found.mean)} ({signed(found.low)} to {signed(found.high)})"
        for found in (entry.differences["last"], entry.gain)
    )
    known = entry.retention
    kept = "" if known is None else f"{percent(known['before'])} → {percent(known['after'])}"
    cost = [f"{entry.seconds:.0f}", f"{entry.trainable_parameters:,}", f"{entry.kept_bytes / 2**20:.1f}"]
    drift = "" if entry.row.drift == "none" else entry.row.drift
    names = [entry.row.method, entry.row.classifier, drift]
    return [*names, figure("average"), figure("last"), away, gain, percent(entry.calibration_error), *cost, kept]
