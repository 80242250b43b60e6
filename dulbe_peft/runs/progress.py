"""What is known of a run's finished tasks: accuracies row by row, records, times and sources.

A run's first tasks may be those that its learner had learned before. What was never tested stays empty there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dulbe_peft.metrics.accuracy import percent
from dulbe_peft.utils.files import damage, read_json
from dulbe_peft.utils.folders import LEARNER_FILE, PROGRESS_FILE, TIMINGS_FILE, CheckpointError

if TYPE_CHECKING:
    from dulbe_peft.learner import ClassIncrementalLearner

SOURCES_FILE = "sources.json"

Row = dict[str, Any]


@dataclass
class Past:
    """What was measured of the tasks that a learner has learned, one entry a task.

    Attributes:
        tasks: their class names.
        rows: what was measured after each task, `{}` where nothing was.
        zero_shot: A_t of the pristine model, None where it was not measured; may be shorter than `tasks`.
        timings: entries of `timings.json`, None where unknown; may be shorter.
        sources: where each task's data came from, None where unknown; may be shorter.
        records: what learning each task showed, see `TaskRecord`, None where unknown; may be shorter.
    """

    tasks: list[tuple[str, ...]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    zero_shot: list[float | None] = field(default_factory=list)
    timings: list[Any] = field(default_factory=list)
    sources: list[Any] = field(default_factory=list)
    records: list[Any] = field(default_factory=list)

    def of(self, tasks: Sequence[tuple[str, ...]]) -> Past:
        """What this says of a learner of these tasks: all of it where they begin with `self.tasks`, else nothing."""
        count = len(tasks)
        known = self if list(tasks[: len(self.tasks)]) == self.tasks else Past()
        return Past(
            list(tasks),
            [*known.rows, *[{}] * (count - len(known.rows))],
            padded(known.zero_shot, count),
            padded(known.timings, count),
            padded(known.sources, count),
            padded(known.records, count),
        )


def padded(values: Sequence[Any], count: int) -> list[Any]:
    """The first `count` values, with None for those that are not there."""
    return [*values[:count], *[None] * (count - len(values))]


def known_past(learner: ClassIncrementalLearner) -> Past:
    """What runs have measured of a learner's tasks; nothing where it comes from no run, or has other tasks by now."""
    return (Past() if learner.folder is None else read_past(learner.folder)).of(learner.tasks)


def read_past(folder: Path) -> Past:
    """What a run's task folder, and the run's folder around it, say of the tasks; nothing for any other folder.

    Raises:
        CheckpointError: the task folder's record does not have its form.
    """
    if not (folder / PROGRESS_FILE).is_file():
        return Past()
    tasks = read_json(folder / LEARNER_FILE)["tasks"]
    progress = read_progress(folder, len(tasks))
    timings, sources = (read_entries(folder.parent / file) for file in (TIMINGS_FILE, SOURCES_FILE))
    return Past([tuple(task) for task in tasks], **progress, timings=timings, sources=sources)


def read_entries(path: Path) -> list[Any]:
    """The entries of a file that is written after each task; none where it is not there, or no longer whole."""
    try:
        return list(read_json(path)["tasks"])
    except (OSError, ValueError, KeyError, TypeError):
        return []


def read_progress(folder: Path, count: int) -> dict[str, Any]:
    """What a task folder says: `rows`, `records`, one for each of its `count` tasks, and `zero_shot`, at most as many.

    Raises:
        CheckpointError: the file does not have this form.
    """
    path = folder / PROGRESS_FILE
    try:
        saved = read_json(path)
        rows, zero_shot = saved["rows"], saved["zero_shot"]
        if len(rows) != count:
            raise ValueError(f"it has {len(rows)} rows for {count} tasks")
        for step, row in enumerate(rows):
            if "accuracy" in row and "classifiers" not in row:  # version 0.1 had one classifier
                row["classifiers"] = {"bridge": {key: row[key] for key in ("accuracy", "accuracy_by_task")}}
            _check_row(row, step)
        # Earlier versions measured the whole stream in advance; the stream's later tasks may be others now.
        zero_shot = [None if value is None else float(value) for value in zero_shot[:count]]
        if not all(value is None or 0 <= value <= 1 for value in zero_shot):
            raise ValueError(f"zero_shot must hold fractions or null, got {zero_shot!r:.100}")
        records = padded(saved.get("records") or [], count)
        if not all(record is None or isinstance(record, dict) for record in records):
            raise ValueError(f"records must be objects or null, got {records!r:.100}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(damage(path, error)) from error
    return {"rows": rows, "records": records, "zero_shot": zero_shot}


def written(past: Past) -> dict[str, Any]:
    """What `progress.json` holds."""
    return {"rows": past.rows, "records": past.records, "zero_shot": past.zero_shot}


def _check_row(row: Row, step: int) -> None:
    """Raise unless each list by task has a number or null for every task up to `step`, and all figures fit."""
    for name, value in _by_task(row):
        if len(value) != step + 1 or not all(v is None or 0 <= float(v) <= 1 for v in value):
            raise ValueError(f"{name} of row {step} must be {step + 1} fractions or null, got {value!r:.100}")
    images = row.get("images_by_class", {})
    for part in (row, *row.get("classifiers", {}).values()):
        right = part.get("right_by_class", {})
        for name in [name for name in part if name.endswith("accuracy")]:
            tasks = [value for value in part[f"{name}_by_task"] if value is not None]
            if not min(tasks) - 1e-6 <= part[name] <= max(tasks) + 1e-6:
                raise ValueError(f"{name} of row {step} is {part[name]!r:.100}, and of its tasks {tasks!r:.100}")
        if not all(0 <= count <= images[name] and images[name] > 0 for name, count in right.items()):
            raise ValueError(f"row {step} has more right answers than images: {right!r:.100} of {images!r:.100}")


def _by_task(row: Row) -> list[tuple[str, list[Any]]]:
    found = []
    for name, value in row.items():
        if isinstance(value, dict):
            found += _by_task(value)
        elif name.endswith("_by_task"):
            found.append((name, value))
    return found


def spread(row: Row, tested: Sequence[int], count: int) -> Row:
    """A row with its lists by task as long as there are tasks, None where a task was not tested.

    Args:
        row: what was measured; its lists by task have one entry for each of `tested`.
        tested: the places of the tested tasks.
        count: how many tasks there are.
    """
    if len(tested) == count:
        return row

    def placed(values: list[Any]) -> list[Any]:
        whole: list[Any] = [None] * count
        for place, value in zip(tested, values, strict=True):
            whole[place] = value
        return whole

    def each(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: each(key, inner) for key, inner in value.items()}
        return placed(value) if name.endswith("_by_task") else value

    spread_row: Row = each("", row)
    return spread_row


def _tested_alone(row: Row) -> str:
    """Which tasks the figures of a row are of, where some have no test images; else nothing."""
    tested = [str(task) for task, value in enumerate(row["accuracy_by_task"], 1) if value is not None]
    if len(tested) == len(row["accuracy_by_task"]):
        return ""
    return f", tested on the images of task{'s' * (len(tested) > 1)} {', '.join(tested)} only"


def line(row: Row, number: int, total: int, classes: int) -> str:
    """What is said after task `number` of `total`. The numbers by task are the first classifier's."""
    text = f"task {number}/{total}: {classes} classes"
    if "accuracy" in row:
        text += _tested_alone(row)
        if "text_accuracy" in row and "text" not in row["classifiers"]:
            text += f", text {percent(row['text_accuracy'], 2)} %"
        text += "".join(f", {name} {percent(part['accuracy'], 2)} %" for name, part in row["classifiers"].items())
        text += f", by task [{' '.join(percent(value, 2) for value in row['accuracy_by_task'])}]"
    return text
