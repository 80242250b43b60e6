"""Write the report: a page about one run or learner, or about several runs side by side."""

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from dulbe_peft.classifiers.teaching import TEACHING
from dulbe_peft.metrics.results import TaskFacts
from dulbe_peft.photos.report import advice, plots, shares, side_by_side
from dulbe_peft.photos.report.html import jpeg_address, mib, percent, seconds, write_page
from dulbe_peft.photos.report.run_folder import PICTURES_FOLDER, Photograph, RunFolder, read_run
from dulbe_peft.photos.report.shares import ClassRow, Share
from dulbe_peft.photos.report.table import write_table_latex
from dulbe_peft.streams.progress import Timing
from dulbe_peft.utils.files import write_csv
from dulbe_peft.utils.settings import flat_settings

WANTED = 0.95  # share of correct predictions for which the page gives a threshold
MOST_NAMES = 12  # classes of a task that a table lists
# The names of a run's phases in `timings.json`, and their descriptions for people.
PHASES = {
    "probe": "computing gradients",
    "allocate": "choosing directions",
    "train": "training",
    "share": "choosing a share",
    "close": "encoding training images",
    "update": "encoding more images",
    "estimate": "estimating accuracy",
    "test": "testing",
    "save": "saving",
}


def write_report(
    runs: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str] | None = None,
    csv: str | os.PathLike[str] | None = None,
    latex: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a page about one run or learner, or about several runs side by side, and return its path.

    The page is a single file that needs no network. The runs may be unfinished.

    Args:
        runs: The folder of a run, of one of its tasks or of a learner, or a sequence of such folders.
        output: The page; by default `report.html` in the folder, or in the current folder for several runs.
        csv: A file for the table of results, as fractions with all digits.
        latex: A file for the table of results in LaTeX, in percent.
    """
    folders = [runs] if isinstance(runs, (str, os.PathLike)) else list(runs)
    if not folders:
        raise ValueError("a report needs the folder of at least one run, got none")
    read = [read_run(folder) for folder in folders]
    rows = side_by_side.run_rows(read)
    if output is None:
        output = read[0].folder / "report.html" if len(read) == 1 else "report.html"
    content = {
        "title": read[0].name if len(read) == 1 else f"{len(read)} runs",
        "runs": [_content(run, f"run{number}") for number, run in enumerate(read)],
        "results": rows,
        "result_columns": side_by_side.RUN_COLUMNS,
        "best": side_by_side.best_rows(rows),
        "same_classes": len({frozenset(name for task in run.learned for name in task) for run in read}) == 1,
        "differences": side_by_side.setting_differences(read),
    }
    write_page(Path(output), "page.html", content)
    if csv is not None:
        full = ((*row[:3], *(getattr(row.measures, name) for name in side_by_side.MEASURES)) for row in rows)
        write_csv(Path(csv), ["run", "strategy", "method", *side_by_side.MEASURES], full)
    if latex is not None:
        write_table_latex(side_by_side.RUN_COLUMNS, rows, Path(latex))
    return Path(output)


def _content(run: RunFolder, key: str) -> dict[str, object]:
    """Return what the template shows about a run; `key` is unique among the runs of the page."""
    losses = [record.loss for record in run.records]
    settings: dict[str, object] = {"model": run.base_model} if run.base_model else {}
    settings |= dict(sorted(flat_settings(run.settings).items()))
    learned = Counter({name: count for record in run.records for name, count in record.images.items()})
    by_class = run.results.classes.get(run.first)
    forgotten = by_class.forgetting if by_class and run.trained and run.tested else {}
    for update in run.updates:
        learned.update(update.images)
    rows = shares.class_rows(run.predictions, forgotten, learned)
    matrix = shares.confusion_matrix(run.predictions) if run.predictions else None
    content: dict[str, object] = {
        "run": run,
        "key": key,
        "model": "" if run.base_model is None else Path(run.base_model).name or run.base_model,
        "classes": sum(len(task) for task in run.learned),
        "task_rows": list(zip(run.learned, run.records, run.timings, strict=True)),
        "training": [_training(number, record) for number, record in enumerate(run.records, 1)],
        "times": _times(run.timings),
        "settings": [(name, "" if value is None else str(value)) for name, value in settings.items()],
        "loss": plots.inline_svg(plots.loss_figure(losses), f"{key}-loss") if any(losses) else "",
        "steps": advice.next_steps(run, rows, matrix),
        "trained_away": advice.trained_away(run.results),
        "earlier": [],
        "about_data": [] if advice.estimate_leads(run) else advice.about_data(run),
        "estimated": advice.estimated(run.results),
        "chosen": advice.chosen(run)[1],
        "class_rows": rows,
        "matrix": matrix,
    }
    return content | _test_content(run, key, rows) if run.tested else content


def _test_content(run: RunFolder, key: str, classes: Sequence[ClassRow]) -> dict[str, object]:
    """Return what the template shows about a run with test data."""
    methods, blocks = advice.leaderboard(run), run.results.classifiers
    tasks = [f"task {number}" for number in range(1, len(run.learned) + 1)]
    unknown = [None] * len(tasks)

    def source(shown: Photograph) -> str:
        return jpeg_address((run.folder / PICTURES_FOLDER / shown.file).read_bytes())

    pictures = defaultdict[str, list[tuple[str, str]]](list)
    for example in run.pictures.classes:
        pictures[example.true].append((source(example), f"Test image of the class {example.true}"))
    forgotten = [percent(row.forgetting, 1) for row in classes]
    precisions = [row.precision or "never predicted" for row in classes]
    content: dict[str, object] = {
        "methods": methods,
        "board": [
            (row.title, row.share or percent(row.last, 1), seconds(row.seconds), mib(row.size), row.meaning)
            for row in methods
        ],
        "leader": next(row for row in methods if run.first in row.names),
        "names_alone": next((row for row in methods if "zero_shot" in row.names), None),
        "summary": side_by_side.SUMMARY_COLUMNS,
        "rows": side_by_side.run_rows([run]),
        "tasks": tasks,
        "after_tasks": [
            (row.title, *(percent(value, 1) for value in [*row.overall, *unknown][: len(tasks)])) for row in methods
        ],
        "clearly": advice.clearly_better(run),
        "accuracy": plots.inline_svg(plots.accuracy_figure(run.results), f"{key}-accuracy") if len(tasks) > 1 else "",
        "matrices": [
            (name, [(task, *row, *unknown[len(row) :]) for task, row in zip(tasks, measures.matrix)])
            for name, measures in blocks.items()
        ],
        "source": source,
        "class_pictures": pictures,
        "class_table": [
            (row.name, row.recall, precision, pictures[row.name], row.mistaken_for, row.learned, points)
            for row, precision, points in zip(classes, precisions, forgotten, strict=True)
        ],
        "earlier": _earlier(run, blocks[run.first].matrix) if len(tasks) > 1 else [],
        "leak": leak(run),
    }
    if run.predictions:
        figure = plots.reliability_figure(shares.reliability(run.predictions))
        above = shares.above_thresholds(run.predictions)
        content |= {
            "reliability": plots.inline_svg(figure, f"{key}-reliability"),
            "thresholds": [(f"{percent(limit, 0)} %", f"{percent(part, 0)} %", share) for limit, part, share in above],
            "threshold": shares.lowest_threshold(run.predictions, WANTED),
            "wanted": WANTED,
            "more": shares.more_images(classes),
        }
    return content


def _earlier(run: RunFolder, matrix: Sequence[Sequence[float | None]]) -> list[tuple[str, str, str, str]]:
    """Return for each task its name, its classes, and its accuracy in percent after it was learned and at the end."""
    rows = []
    for place, (title, names, row) in enumerate(zip(run.task_names, run.learned, matrix, strict=False)):
        then, now = row[place : place + 1], matrix[-1][place : place + 1]
        if then and now:
            rows.append((title, shares.listed(names, MOST_NAMES), percent(then[0], 1), percent(now[0], 1)))
    return rows


def leak(run: RunFolder) -> dict[str, object] | None:
    """Return the accuracy on test images that were not learned, the accuracy on those that were, and how these match.

    If it is known only how many test images were learned, but not which ones, return this number as "number".
    """
    copies = {(copy.task, copy.position): copy.how for copy in run.pictures.copies}
    learned_rows = [row for row in run.predictions if (row.task, row.position) in copies]
    others = [row for row in run.predictions if (row.task, row.position) not in copies]
    if not learned_rows:
        learned = set(run.known.class_of())  # tells how many, but not which
        number = sum(content in learned for contents in run.known.tested.values() for content in contents)
        return {"number": number} if number else None
    how = Counter(copies[row.task, row.position] for row in learned_rows)
    return {"without": Share.of(others) if others else None, "learned": Share.of(learned_rows), "how": how}


def _training(number: int, record: TaskFacts) -> tuple[object, ...]:
    """Return a row with the losses, captures and depth that training recorded for a task."""
    loss, depth = record.loss, record.expected_depth
    ends = (f"{loss[0]:.3f}", f"{loss[-1]:.3f}") if loss else (None, None)
    captures = map(percent, (record.shared_capture, record.residual_capture))
    return (number, *ends, *captures, None if depth is None else f"{depth:.2f}")


def _times(timings: Sequence[Timing | None]) -> list[tuple[object, ...]]:
    """Return the header and one row for each task: the seconds of each phase and in total, and the peak memory."""
    spent: list[defaultdict[str, float]] = [defaultdict(float) for _ in timings]
    for phases, time in zip(spent, timings, strict=True):
        for name, value in (time.phases if time else {}).items():  # the classifiers share one column
            phases["fitting the classifiers" if name.startswith(TEACHING) else PHASES.get(name, name)] += value
    names = list(dict.fromkeys(chain(*spent)))
    rows: list[tuple[object, ...]] = [("task", *names, "total", "peak memory (MiB)")]
    for number, (phases, time) in enumerate(zip(spent, timings, strict=True), 1):
        whole, memory = (time.seconds, time.peak_memory) if time else (None, None)
        rows.append((number, *map(seconds, (*map(phases.get, names), whole)), mib(memory)))
    return rows
