"""What a stream's tests amount to: from the rows of `progress.json` to `results.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dulbe_peft.evaluation import BASELINES, Evaluation
from dulbe_peft.streams.metrics import accuracy_matrix, summarize
from dulbe_peft.training import TaskRecord

PROGRESS_FILE = "progress.json"
Row = dict[str, Any]


def progress_row(tests: Sequence[Evaluation]) -> Row:
    """The row of `progress.json` after a task: accuracy over all seen test images, on each task's, and by class.

    Args:
        tests: predictions for the test images of each task, in order; none where the stream has no test data.
    """
    if not tests:
        return {}
    parts = [test.figures() for test in tests]
    images = [part["num_images"] for part in parts]

    def pooled(name: str, values: list[float]) -> Row:
        whole = sum(value * count for value, count in zip(values, images, strict=True)) / sum(images)
        return {name: whole, f"{name}_by_task": values}

    row = pooled("accuracy", [part["accuracy"] for part in parts])
    for name in BASELINES:
        if f"{name}_accuracy" in parts[0]:
            row |= pooled(f"{name}_accuracy", [part[f"{name}_accuracy"] for part in parts])
    row["images_by_class"] = {k: count for test in tests for k, count in test.images_by_class().items()}
    row["classifiers"] = {}
    for name in parts[0]["classifiers"]:
        right = {k: count for test in tests for k, count in test.right_by_class(name).items()}
        by_task = pooled("accuracy", [part["classifiers"][name] for part in parts])
        row["classifiers"][name] = by_task | {"right_by_class": right}
    return row


def new_progress(zero_shot: list[float]) -> dict[str, Any]:
    """What `progress.json` holds before the first task."""
    return {"rows": [], "tasks": [], "zero_shot": zero_shot}


def add_task(progress: dict[str, Any], row: Row, record: TaskRecord | None) -> None:
    """Put a finished task's tests and record into what `progress.json` holds."""
    progress["rows"].append(row)
    progress["tasks"].append(None if record is None else asdict(record))


def read_progress(folder: Path) -> dict[str, Any]:
    """A task folder's `progress.json`, in today's form."""
    progress: dict[str, Any] = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
    for row in progress["rows"]:
        if "accuracy" in row and "classifiers" not in row:  # version 0.1 had one classifier
            row["classifiers"] = {"bridge": {k: row[k] for k in ("accuracy", "accuracy_by_task")}}
    progress.setdefault("tasks", [None] * len(progress["rows"]))
    return progress


def stream_results(
    progress: Mapping[str, Any], identity: Mapping[str, Any], classifiers: Sequence[str], versions: Mapping[str, str]
) -> dict[str, Any]:
    """What `results.json` holds, of all tasks or of those that are finished.

    Args:
        progress: what `progress.json` holds.
        identity: what must be the same for a run to be the same run.
        classifiers: their names, in the learner's order.
        versions: of the libraries.
    """
    rows = progress["rows"]
    results: dict[str, Any] = {
        "configuration": {"adapter": identity["adapter"], "arguments": identity["arguments"]},
        "class_names": identity["classes"],
        "seed": identity["arguments"]["seed"],
        "strategy": identity["strategy"],
        "tasks": progress["tasks"],
        "versions": dict(versions),
    }
    if not all("accuracy" in row for row in rows):
        return results
    results["classifiers"] = {
        name: _summary([row["classifiers"][name] for row in rows], "accuracy") for name in classifiers
    }
    if "bridge" in results["classifiers"]:
        results["head"] = results["classifiers"]["bridge"]
    for name in BASELINES:
        if all(f"{name}_accuracy" in row for row in rows):
            results[name] = _summary(rows, f"{name}_accuracy")
    zero_shot = progress["zero_shot"][: len(rows)]  # it is known beforehand for tasks that are not learned yet
    if zero_shot:
        results["zero_shot"] = {
            "overall": zero_shot,
            "average_accuracy": sum(zero_shot) / len(zero_shot),
            "last_accuracy": zero_shot[-1],
        }
    by_class = {name: class_figures(rows, name) for name in classifiers}
    if all(by_class.values()):
        results["classes"] = by_class
    return results


def class_figures(rows: Sequence[Row], classifier: str) -> dict[str, dict[str, float]]:
    """Each class's accuracy after the last task, and what it has lost since it was best.

    Returns:
        "accuracy", class -> fraction, and "forgetting", class -> best accuracy before the last task minus the one
        after it, for classes that were tested before; empty where the rows are of a version that did not count
        classes, and without "forgetting" where some are.
    """
    counted = [_class_accuracy(row, classifier) for row in rows]
    *earlier, last = counted
    if not last:
        return {}
    figures = {"accuracy": last}
    if all(counted):
        best = {name: max(row[name] for row in earlier if name in row) for row in earlier for name in row}
        figures["forgetting"] = {name: best[name] - last[name] for name in last if name in best}
    return figures


def _class_accuracy(row: Row, classifier: str) -> dict[str, float]:
    right = row["classifiers"][classifier].get("right_by_class", {})
    return {name: count / row["images_by_class"][name] for name, count in right.items()}


def _summary(rows: list[Row], name: str) -> dict[str, Any]:
    return summarize(accuracy_matrix([row[f"{name}_by_task"] for row in rows]), [row[name] for row in rows])
