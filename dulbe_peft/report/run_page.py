"""The report: a page about one run or learner, or about several runs side by side."""

import base64
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dulbe_peft.classifiers.closing import TEACHING
from dulbe_peft.metrics.evaluation import ImageResult
from dulbe_peft.report.class_map import HEIGHT, WIDTH, class_map
from dulbe_peft.report.html import mib, percent, write_page
from dulbe_peft.report.plots import accuracy_figure, inline_svg, loss_figure, reliability_figure
from dulbe_peft.report.run_folder import PICTURES_FOLDER, Photograph, RunFolder, read_known, read_run
from dulbe_peft.report.shares import (
    ClassRow,
    Share,
    class_rows,
    confusion_matrix,
    more_images,
    reliability,
    sure_answers,
    surest,
)
from dulbe_peft.report.side_by_side import RUN_COLUMNS, SUMMARY_COLUMNS, best_rows, run_rows, setting_differences
from dulbe_peft.report.table import write_table_csv, write_table_latex
from dulbe_peft.report.training_effects import effects_content
from dulbe_peft.report.verdict import clearly_better, estimated, leaderboard, next_steps
from dulbe_peft.utils.settings import flat_settings

WANTED = 0.95  # of the answers right, for which the page says a probability
# What a run calls its phases, and what they do.
PHASES = {
    "probe": "looking at gradients",
    "allocate": "choosing directions",
    "train": "training",
    "close": "reading the training images",
    "update": "reading further images",
    "estimate": "leaving images out",
    "test": "testing",
    "save": "saving",
}


def write_report(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str] | None = None,
    csv: str | os.PathLike[str] | None = None,
    latex: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a page about one run or learner, or about several runs side by side; returns its path.

    The page is a single file that asks no server. Without `output` it is `report.html` in the run's folder, or in the
    current folder for several runs. `csv` and `latex` name files for the table of results, as fractions in full and
    as LaTeX in percent. A run need not be finished.
    """
    folders = [runs] if isinstance(runs, (str, os.PathLike)) else list(runs)
    if not folders:
        raise ValueError("a report needs the folder of at least one run, got none")
    read = [read_run(folder) for folder in folders]
    rows = run_rows(read)
    if output is None:
        output = read[0].folder / "report.html" if len(read) == 1 else "report.html"
    content = {
        "runs": [_content(run, f"run{number}") for number, run in enumerate(read)],
        "results": rows,
        "result_columns": RUN_COLUMNS,
        "best": best_rows(rows),
        "same_classes": len({frozenset(name for task in run.learned for name in task) for run in read}) == 1,
        "differences": setting_differences(read),
    }
    write_page(Path(output), "page.html", content)
    if csv is not None:
        write_table_csv(RUN_COLUMNS, rows, Path(csv))
    if latex is not None:
        write_table_latex(RUN_COLUMNS, rows, Path(latex))
    return Path(output)


def _content(run: RunFolder, key: str) -> dict[str, Any]:
    """What the template shows of a run; `key` is a word that no other run of the page has."""
    times = [_phases(time) for time in run.timings]
    losses, settings = [record.get("loss", []) for record in run.records], flat_settings(run.settings)
    learned = Counter({name: count for record in run.records for name, count in record.get("images", {}).items()})
    by_class = run.results.get("classes", {})
    forgotten = by_class.get(run.first, {}).get("forgetting", {}) if run.trained and run.tested else {}
    for update in run.updates:
        learned.update(update.images)
    rows = class_rows(run.predictions, forgotten, learned)
    matrix = confusion_matrix(run.predictions) if run.predictions else None
    content: dict[str, Any] = {
        "run": run,
        "key": key,
        "model": "" if run.base_model is None else Path(run.base_model).name or run.base_model,
        "classes": sum(len(task) for task in run.learned),
        "task_rows": list(zip(run.learned, run.records, times, strict=True)),
        "captured": any(record.get("shared_capture") is not None for record in run.records),
        "training": [_training(number, record) for number, record in enumerate(run.records, 1)],
        "times": _times(times),
        "settings": [*([("model", run.base_model)] if run.base_model else []), *sorted(settings.items())],
        "loss": inline_svg(loss_figure(losses), f"{key}-loss") if any(losses) else "",
        "steps": next_steps(run, rows, matrix),
        "estimated": None if run.tested else estimated(run.results),
        "map": None if run.learner is None else class_map(run.learner),
        "map_size": (WIDTH, HEIGHT),
        "class_rows": rows,
        "matrix": matrix,
        "pictures": _pictures(run),
        **effects_content(run, key),
    }
    return content | _test_content(run, key, rows) if run.tested else content


def _test_content(run: RunFolder, key: str, classes: Sequence[ClassRow]) -> dict[str, Any]:
    """What the template shows of a run with test data."""
    methods, blocks, tasks = leaderboard(run), run.results["classifiers"], len(run.learned)
    unknown = [None] * tasks
    content: dict[str, Any] = {
        "methods": methods,
        "leader": next(row for row in methods if run.first in row.names),
        "names_alone": next((row for row in methods if "zero_shot" in row.names), None),
        "summary": SUMMARY_COLUMNS,
        "rows": run_rows([run]),
        "after_tasks": [
            ("right (%) after", *(f"task {number}" for number in range(1, tasks + 1))),
            *(
                (row.title, *(percent(value, 1) for value in [*row.block["overall"], *unknown][:tasks]))
                for row in methods
            ),
        ],
        "clearly": (clearly_better(run) or ("",))[0],
        "chart": inline_svg(accuracy_figure(run.results), f"{key}-accuracy") if tasks > 1 else "",
        "matrices": [(name, block["matrix"]) for name, block in blocks.items()] if run.trained else [],
    }
    if run.predictions:
        figure = reliability_figure(reliability(run.predictions))
        content |= {"sure": sure_answers(run.predictions), "reliability": inline_svg(figure, f"{key}-reliability")}
        content |= {"surest": surest(run.predictions, WANTED), "wanted": WANTED, "more": more_images(classes)}
        content["leak"] = leak(run)
    return content


def leak(run: RunFolder) -> dict[str, Any] | None:
    """The share that is right without the test images that were learned, too, that of those, and how they match."""
    copies = {(copy.task, copy.position): copy.how for copy in run.pictures.copies}
    parts: dict[bool, list[ImageResult]] = {True: [], False: []}
    for row in run.predictions:
        parts[(row.task, row.position) in copies].append(row)
    if not parts[True]:
        known = read_known(run.learner)  # says how many there are, and not which
        learned = set(known.class_of())
        noted = sum(content in learned for contents in known.tested.values() for content in contents)
        return {"noted": noted} if noted else None
    how = Counter(copies[row.task, row.position] for row in parts[True])
    return {"without": Share.of(parts[False]) if parts[False] else None, "of": Share.of(parts[True]), "how": how}


def _training(number: int, record: dict[str, Any]) -> tuple[Any, ...]:
    """What training showed of a task."""
    loss, depth = record.get("loss"), record.get("expected_depth")
    ends = (f"{loss[0]:.3f}", f"{loss[-1]:.3f}") if loss else (None, None)
    captures = (percent(record.get(name)) for name in ("shared_capture", "residual_capture"))
    return (number, *ends, *captures, None if depth is None else f"{depth:.2f}")


def _times(times: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Titles, and the seconds of each task by what was done, all of them, and its memory."""
    phases = list(dict.fromkeys(name for time in times for name in time["phases"]))
    rows = []
    for number, time in enumerate(times, 1):
        seconds = [*(time["phases"].get(name) for name in phases), time.get("seconds")]
        shown = [None if value is None else f"{value:.1f}" for value in seconds]
        rows.append((number, *shown, mib(time.get("peak_memory"))))
    return [("task", *phases, "all", "peak memory (MiB)"), *rows]


def _phases(time: dict[str, Any] | None) -> dict[str, Any]:
    """A task's times, by what was done; all classifiers that were taught are one row."""
    phases: Counter[str] = Counter()
    for name, seconds in (time or {}).get("phases", {}).items():
        name = "teaching the classifiers" if name.startswith(TEACHING) else PHASES.get(name, name)
        phases[name] += seconds
    return {**(time or {}), "phases": dict(phases)}


def _pictures(run: RunFolder) -> dict[str, Any]:
    """The pictures of mistakes, and those of each class by its name."""

    def picture(shown: Photograph) -> dict[str, Any]:
        data = base64.b64encode((run.folder / PICTURES_FOLDER / shown.file).read_bytes()).decode()
        near = getattr(shown, "nearest", None)
        return {
            "example": shown,
            "source": f"data:image/jpeg;base64,{data}",
            "place": Path(shown.image).name,
            "nearest": picture(near) if near else None,
        }

    of_class: dict[str, list[dict[str, Any]]] = {}
    for example in run.pictures.classes:
        of_class.setdefault(example.true, []).append(picture(example))
    return {"mistakes": [picture(example) for example in run.pictures.mistakes], "classes": of_class}
