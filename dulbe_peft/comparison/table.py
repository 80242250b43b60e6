"""The table of a comparison: a row for each method and classifier, all against one reference."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dulbe_peft.comparison.cells import answers_path, read_answers, read_cell
from dulbe_peft.comparison.plan import Cell, Plan, Row
from dulbe_peft.comparison.statistics import Difference, calibration_error, image_shares, paired_difference
from dulbe_peft.files import write_csv, write_json
from dulbe_peft.streams.metrics import percent

TABLE_FILE, CSV_FILE = "comparison.json", "comparison.csv"
MEASURES = {"last": "A_last", "average": "A_bar"}


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
        calibration_error: expected calibration error after the last task, mean over the seeds.
        seconds: of training and testing the stream, and of teaching the classifier; mean over the seeds.
        trainable_parameters: that a task trains.
        kept_bytes: that method and classifier keep between tasks, without the model and its adapter.
        retention: accuracy on classes in no stream, before all tasks and after them; None where not measured.
    """

    stream: str
    row: Row
    seeds: tuple[int, ...]
    means: dict[str, float]
    spreads: dict[str, float | None]
    differences: dict[str, Difference | None]
    calibration_error: float
    seconds: float
    trainable_parameters: int
    kept_bytes: int
    retention: dict[str, float] | None


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
            read = _read(output / cell.folder, row)
            if read is not None:
                found.setdefault((cell.stream, row), {})[cell.seed] = read
    first = plan.reference or next(iter(plan.rows(next(iter(plan.methods)))))
    entries = []
    for (stream, row), by_seed in found.items():
        other = None if row == first else found.get((stream, first))
        entries.append(_entry(stream, row, by_seed, other or {}))
    return entries


def _read(folder: Path, row: Row) -> _Found | None:
    cell = read_cell(folder)
    if cell is None or not answers_path(folder, row).is_file():
        return None
    answers, names, cost = read_answers(folder, row)
    last, average = image_shares(answers, names)
    return _Found({"last": last, "average": average}, calibration_error(answers[-1]), cell, cost)


def _entry(stream: str, row: Row, found: dict[int, _Found], other: dict[int, _Found]) -> Entry:
    shared = [seed for seed in found if seed in other]
    values = {name: [float(one.shares[name].mean()) for one in found.values()] for name in MEASURES}
    differences: dict[str, Difference | None] = dict.fromkeys(MEASURES)
    for name in MEASURES if shared else ():
        own, reference = (np.stack([side[seed].shares[name] for seed in shared]) for side in (found, other))
        differences[name] = paired_difference(own, reference)
    cells = [one.cell for one in found.values()]
    kept = [one.cell.get("retention") for one in found.values()]
    known = [entry for entry in kept if entry is not None]
    retention = {k: statistics.fmean(entry[k] for entry in known) for k in ("before", "after")} if known else None
    return Entry(
        stream,
        row,
        tuple(found),
        {name: statistics.fmean(numbers) for name, numbers in values.items()},
        {name: statistics.stdev(n) if len(n) > 1 else None for name, n in values.items()},
        differences,
        statistics.fmean(one.error for one in found.values()),
        statistics.fmean(one.cell["cost"]["seconds"] + one.cost["seconds"] for one in found.values()),
        cells[0]["cost"]["trainable_parameters"],
        max(one.cell["cost"]["kept_bytes"] + one.cost["nbytes"] for one in found.values()),
        retention,
    )


# ---------------------------------------------------------------------- for people and for files


def write_table(entries: Sequence[Entry], output: Path, chosen: dict[str, Any]) -> None:
    """Write `comparison.json`, with all figures, and `comparison.csv`, a line for each row of each stream."""
    rows = [{**asdict(entry), "row": asdict(entry.row)} for entry in entries]
    write_json(output / TABLE_FILE, {"rows": rows, "chosen": chosen})
    header = ["stream", "method", "classifier", "drift", "seeds"]
    header += [f"{name}{part}" for name in MEASURES for part in ("", "_std", "_difference", "_low", "_high")]
    header += ["calibration_error", "seconds", "trainable_parameters", "kept_bytes", "retention_before", "retention"]
    lines: list[list[Any]] = []
    for entry in entries:
        line: list[Any] = [entry.stream, *asdict(entry.row).values(), len(entry.seeds)]
        for name in MEASURES:
            found = entry.differences[name]
            line += [entry.means[name], entry.spreads[name], *(asdict(found).values() if found else [None] * 3)]
        retention: dict[str, Any] = entry.retention or {"before": None, "after": None}
        line += [entry.calibration_error, entry.seconds, entry.trainable_parameters, entry.kept_bytes]
        lines.append(["" if cell is None else cell for cell in [*line, retention["before"], retention["after"]]])
    write_csv(output / CSV_FILE, header, lines)


def read_table(output: Path) -> tuple[list[Entry], dict[str, Any]]:
    """The rows that `write_table` wrote, and what was chosen.

    Raises:
        FileNotFoundError: there is no table.
        ValueError: the file is not as a comparison writes it.
    """
    path = output / TABLE_FILE
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: `dulbe-peft compare` writes it")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        rows = []
        for line in content["rows"]:
            differences = {k: None if v is None else Difference(**v) for k, v in line["differences"].items()}
            read = {"row": Row(**line["row"]), "differences": differences, "seeds": tuple(line["seeds"])}
            rows.append(Entry(**{**line, **read}))
        return rows, dict(content["chosen"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path} is not as a comparison writes it: {error!r}") from error


def format_table(entries: Sequence[Entry]) -> str:
    """The table in Markdown, one for each stream; all figures in percent."""
    parts = []
    for stream in dict.fromkeys(entry.stream for entry in entries):
        own = [entry for entry in entries if entry.stream == stream]
        retention = any(entry.retention for entry in own)
        head = ["method", "classifier", "drift", "A_bar", "A_last", "to the reference (95 %)", "calibration error"]
        head += ["seconds", "trained", "kept MiB", *(["still known"] if retention else [])]
        lines = [f"{stream}, {_counted(own)}", "", _line(head), _line(["---"] * 3 + ["---:"] * (len(head) - 3))]
        lines += [_line(_cells(entry, retention)) for entry in own]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _counted(entries: Sequence[Entry]) -> str:
    counts = sorted({len(entry.seeds) for entry in entries})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{number} seed" if counts == [1] else f"{number} seeds"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cells(entry: Entry, retention: bool) -> list[str]:
    def figure(name: str) -> str:
        spread = entry.spreads[name]
        return percent(entry.means[name]) + ("" if spread is None else f" ± {percent(spread)}")

    found = entry.differences["last"]
    away = "" if found is None else f"{_signed(found.mean)} ({_signed(found.low)} to {_signed(found.high)})"
    known = entry.retention or {}
    kept = [f"{percent(known.get('before'))} → {percent(known.get('after'))}"] if retention else []
    cost = [f"{entry.seconds:.0f}", f"{entry.trainable_parameters:,}", f"{entry.kept_bytes / 2**20:.1f}"]
    drift = "" if entry.row.drift == "none" else entry.row.drift
    names = [entry.row.method, entry.row.classifier, drift]
    return [*names, figure("average"), figure("last"), away, percent(entry.calibration_error), *cost, *kept]


def _signed(value: float) -> str:
    return ("+" if round(100 * value, 1) > 0 else "") + percent(value)
