"""What a stream's tests amount to: from the rows of `progress.json` to `results.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dulbe_peft.metrics.accuracy import accuracy_matrix, summarize, transfer_measures
from dulbe_peft.metrics.evaluation import BASELINES, Evaluation
from dulbe_peft.runs.progress import Row


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


def stream_results(
    progress: Mapping[str, Any],
    settings: Mapping[str, Any],
    tasks: Sequence[Sequence[str]],
    classifiers: Sequence[str],
    versions: Mapping[str, str],
    known: int = 0,
) -> dict[str, Any]:
    """What `results.json` holds, of all tasks or of those that are finished.

    Args:
        progress: `rows`, `records` and `zero_shot`, one entry for each of the tasks.
        settings: of the run: adapter, arguments, strategy.
        tasks: class names of every task.
        classifiers: their names, in the learner's order.
        versions: of the libraries.
        known: how many tasks the learner had learned before the run.
    """
    results: dict[str, Any] = {
        "configuration": {"adapter": settings["adapter"], "arguments": settings["arguments"]},
        "class_names": [list(task) for task in tasks],
        "seed": settings["arguments"]["seed"],
        "strategy": settings["strategy"],
        "tasks": progress["records"],
        "versions": dict(versions),
    }
    if known:
        results["known_tasks"] = known
    rows = progress["rows"]
    tested = [row for row in rows if "accuracy" in row]
    if not tested:
        return results
    results["classifiers"] = {}
    for name in classifiers:
        parts = [row.get("classifiers", {}).get(name, {}) for row in rows]
        if any(parts):
            results["classifiers"][name] = _summary(parts, "accuracy")
    if "bridge" in results["classifiers"]:
        results["head"] = results["classifiers"]["bridge"]
    for name in BASELINES:
        if all(f"{name}_accuracy" in row for row in tested):
            results[name] = _summary(rows, f"{name}_accuracy")
    zero_shot = progress["zero_shot"]
    measured = [value for value in zero_shot if value is not None]
    if measured:
        results["zero_shot"] = {
            "overall": zero_shot,
            "average_accuracy": sum(measured) / len(measured),
            "last_accuracy": zero_shot[-1],
        }
    results |= _ahead(rows, tasks, results["classifiers"])
    by_class = {name: class_figures(rows, name) for name in results["classifiers"]}
    if all(by_class.values()):
        results["classes"] = by_class
    return results


def _ahead(rows: Sequence[Row], tasks: Sequence[Sequence[str]], classifiers: Mapping[str, Any]) -> dict[str, Any]:
    """What tests on the tasks to come amount to; `{}` where a task was not tested with those that came then."""
    tested = [row.get("ahead", {"classes": None, "accuracy": []}) for row in rows]
    came = [[list(names) for names in tasks[step:]] for step in range(1, len(rows) + 1)]
    if len(rows) < 2 or [part["classes"] for part in tested] != came:
        return {}
    ahead = [part["accuracy"] for part in tested]
    found: dict[str, Any] = {"matrix": ahead, "classifiers": {}}
    for name, block in classifiers.items():
        matrix = [[*learned, *part] for learned, part in zip(block["matrix"], ahead, strict=True)]
        if not any(value is None for row in matrix for value in row):
            found["classifiers"][name] = transfer_measures(matrix)
    return {"ahead": found}


def class_figures(rows: Sequence[Row], classifier: str) -> dict[str, dict[str, float]]:
    """Each class's accuracy after the last task, and what it has lost since it was best.

    Returns:
        "accuracy", class -> fraction, and "forgetting", class -> best accuracy before the last task minus the one
        after it, for classes that were tested before; empty where the rows are of a version that did not count
        classes, and without "forgetting" where some are.
    """
    *earlier, last = [_class_accuracy(row, classifier) for row in rows]
    if not last:
        return {}
    figures = {"accuracy": last}
    if all(found or "accuracy" not in row for found, row in zip(earlier, rows, strict=False)):
        best = {name: max(row[name] for row in earlier if name in row) for row in earlier for name in row}
        figures["forgetting"] = {name: best[name] - last[name] for name in last if name in best}
    return figures


def _class_accuracy(row: Row, classifier: str) -> dict[str, float]:
    right = row.get("classifiers", {}).get(classifier, {}).get("right_by_class", {})
    return {name: count / row["images_by_class"][name] for name, count in right.items()}


def _summary(rows: list[Row], name: str) -> dict[str, Any]:
    """The measures of one classifier, from its part of every row; `{}` where it was not tested."""
    matrix = [row.get(f"{name}_by_task", [None] * (step + 1)) for step, row in enumerate(rows)]
    return summarize(accuracy_matrix(matrix), [row.get(name) for row in rows])
