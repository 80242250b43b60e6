"""The report: a page about one run, or about several side by side."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dulbe_peft.checkpoints.learner_file import Update
from dulbe_peft.metrics.accuracy import METHODS, result_rows
from dulbe_peft.report.confusion_matrix import class_accuracies, confusion_matrix, data_name
from dulbe_peft.report.html import write_page
from dulbe_peft.report.plots import accuracy_figure, inline_svg, loss_figure
from dulbe_peft.report.run_folder import PICTURES_FOLDER, Example, Run, read_run
from dulbe_peft.report.run_groups import (
    GROUP_COLUMNS,
    SUMMARY_COLUMNS,
    best_results,
    flat_settings,
    group_results,
    group_runs,
    setting_differences,
)
from dulbe_peft.report.table import write_table_csv, write_table_latex
from dulbe_peft.report.training_effects import effects_content

# What the first lines compare the classifier with.
_NEAREST_MEAN = "which takes an image for the class whose mean image is nearest"
_BASELINES = {
    "zero_shot": "the same model before it learned anything",
    "class_means": _NEAREST_MEAN,
    "prototype": _NEAREST_MEAN,
}
_PHASES = ("probe", "allocate", "train", "close", "test", "save")  # as they come; JSON sorts them
WORST = 10  # classes shown before the reader asks for all


def write_report(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str] | None = None,
    csv: str | os.PathLike[str] | None = None,
    latex: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a page about one run, or about several side by side; returns its path.

    The page is a single file: its pictures and its style are in it, it runs no JavaScript and asks no server. Without
    `output` it is `report.html` in the run's folder, or in the current folder for several runs. `csv` and `latex` name
    files for the table of results, as fractions in full and as LaTeX in percent. A run need not be finished.
    """
    folders = [runs] if isinstance(runs, (str, os.PathLike)) else list(runs)
    if not folders:
        raise ValueError("no run is given: a report needs at least one run's folder")
    read = [read_run(folder) for folder in folders]
    groups = group_runs(read)
    rows = group_results(groups)
    if output is None:
        output = read[0].folder / "report.html" if len(read) == 1 else "report.html"
    content = {
        "runs": [_content(run, f"run{number}") for number, run in enumerate(read)],
        "results": rows,
        "columns": GROUP_COLUMNS,
        "best": best_results(rows),
        "same_classes": len({frozenset(name for task in run.learned for name in task) for run in read}) == 1,
        "repeated": len(groups) < len(read),
        "differences": setting_differences(read),
    }
    write_page(Path(output), "page.html", content)
    if csv is not None:
        write_table_csv(GROUP_COLUMNS, rows, Path(csv))
    if latex is not None:
        write_table_latex(GROUP_COLUMNS, rows, Path(latex))
    return Path(output)


def _content(run: Run, key: str) -> dict[str, Any]:
    """What the template shows of a run; `key` is a word that no other run of the page has."""
    phases = {name for time in run.timings for name in (time or {}).get("phases", {})}
    losses = [record.get("loss", []) for record in run.records]
    content: dict[str, Any] = {
        "run": run,
        "model": "" if run.base_model is None else Path(run.base_model).name or run.base_model,
        "data": data_name(run.predictions),
        "classes": sum(len(task) for task in run.learned),
        "task_rows": list(zip(run.learned, run.records, [time or {} for time in run.timings], strict=True)),
        "captured": any(record.get("shared_capture") is not None for record in run.records),
        "phases": [*(name for name in _PHASES if name in phases), *sorted(phases.difference(_PHASES))],
        "settings": sorted(flat_settings(run.settings).items()),
        "mistakes": [_picture(run, example) for example in run.examples.mistakes],
        "hits": [_picture(run, example) for example in run.examples.hits],
        "depth_known": any(record.get("expected_depth") is not None for record in run.records),
        "loss": inline_svg(loss_figure(losses), f"{key}-loss") if any(losses) else "",
        "updates": [_update(entry) for entry in run.updates if entry.images or entry.forgotten],
        **effects_content(run, key),
    }
    return content | _test_content(run, key) if run.tested else content


def _test_content(run: Run, key: str) -> dict[str, Any]:
    """What the template shows of a run with test data."""
    results, rows = run.results, result_rows(run.results)
    blocks, by_class = results["classifiers"], results.get("classes", {})
    accuracy = blocks[run.first]["last_accuracy"]
    classes = class_accuracies(run.predictions, by_class.get(run.first, {}).get("forgetting", {}))
    worst = [row for row in classes if row.accuracy < 1][:WORST]
    columns, counts = confusion_matrix(run.predictions, [row.name for row in worst])
    accuracies = {name: by_class[name]["accuracy"] for name in blocks if name in by_class}
    first = accuracies.get(run.first, {})
    return {
        "accuracy": accuracy,
        "baselines": [
            (f"{name}, {_BASELINES[name]}", block["last_accuracy"], accuracy - block["last_accuracy"])
            for name, block in rows
            if name in _BASELINES and name != run.first and None not in (accuracy, block["last_accuracy"])
        ],
        "rows": rows,
        "summary": SUMMARY_COLUMNS,
        "methods": [(name, METHODS[name]) for name, _ in rows if name in METHODS],
        "chart": inline_svg(accuracy_figure(results), f"{key}-accuracy"),
        "matrices": [(name, block["matrix"]) for name, block in blocks.items()],
        "class_rows": classes,
        "worst": WORST,
        "confusion_columns": columns,
        "confusion": list(zip(worst, counts, strict=True)),
        "class_accuracies": accuracies if len(accuracies) > 1 else {},
        "classes_by_first": sorted(first, key=first.__getitem__),
    }


def _update(entry: Update) -> str:
    """What the learner took in or lost without training, in words."""
    after = f"after task {entry.after}"
    if entry.forgotten:
        return f"{after}, a class of task {entry.forgotten} was forgotten"
    images = entry.images
    listed = ", ".join(f"{name} ({count})" for name, count in list(images.items())[:WORST])
    more = f" and {len(images) - WORST} more classes" if len(images) > WORST else ""
    total = sum(images.values())
    return f"{after}, {total:,} further image{'s' * (total != 1)} of known classes: {listed}{more}"


def _picture(run: Run, example: Example) -> dict[str, Any]:
    data = base64.b64encode((run.folder / PICTURES_FOLDER / example.file).read_bytes()).decode()
    return {"example": example, "source": f"data:image/jpeg;base64,{data}", "place": Path(example.image).name}
