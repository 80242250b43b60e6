"""The report: one HTML page without any other file, readable in light and dark, on a wide screen and on a phone."""

from __future__ import annotations

import base64
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from dulbe_peft.metrics import accuracy
from dulbe_peft.metrics.accuracy import METHODS, result_rows
from dulbe_peft.report.changes import changes_view
from dulbe_peft.report.collect import Run, as_written, class_table, confusion, data_name, read_run
from dulbe_peft.report.figures import accuracy_figure, inline_svg, loss_figure
from dulbe_peft.report.tables import (
    MEASURES,
    Comparison,
    best,
    compare,
    differences,
    flat,
    group_runs,
    strategy_name,
    write_comparison_csv,
    write_comparison_latex,
)
from dulbe_peft.utils.files import replacing

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
    """Write a page about one run, or about several side by side.

    The page is a single file: its pictures and its style are in it, it runs no JavaScript and asks no server.

    Args:
        runs: one folder or several that `run` wrote; a run need not be finished, and may be one of version 0.1.
        output: the page; None: `report.html` in the run's folder, or in the current folder for several runs.
        csv: where to write the table of results with full figures; None: nowhere.
        latex: where to write it as a LaTeX table; None: nowhere.

    Returns:
        The page's path.

    Raises:
        FileNotFoundError: a run's folder is not there.
        ValueError: no run is given, or a folder holds no finished task.
        OSError: a file cannot be written.
    """
    folders = [runs] if isinstance(runs, (str, os.PathLike)) else list(runs)
    if not folders:
        raise ValueError("no run is given: a report needs at least one run's folder")
    read = [read_run(folder) for folder in folders]
    if output is None:
        output = read[0].folder / "report.html" if len(read) == 1 else "report.html"
    page, rows = _made(read)
    with replacing(Path(output)) as temporary:
        temporary.write_text(page, encoding="utf-8")
    if csv is not None:
        write_comparison_csv(rows, Path(csv))
    if latex is not None:
        write_comparison_latex(rows, Path(latex))
    return Path(output)


def _made(runs: Sequence[Run]) -> tuple[str, list[Comparison]]:
    """The page and the rows of the table; an error names the run that it comes from."""
    try:
        return render_report(runs), compare(group_runs(runs))
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError):
        for run in runs:
            with as_written(run.folder):
                render_report([run])
                compare(group_runs([run]))
        raise


def render_report(runs: Sequence[Run]) -> str:
    """The page's HTML.

    Args:
        runs: at least one.
    """
    groups = group_runs(runs)
    comparison = compare(groups) if len(runs) > 1 else []
    content = {
        "runs": [_view(run, f"run{number}") for number, run in enumerate(runs)],
        "comparison": comparison,
        "best": best(comparison),
        "same_classes": len({frozenset(name for task in run.learned for name in task) for run in runs}) == 1,
        "repeated": len(groups) < len(runs),
        "differences": differences(runs) if len(runs) > 1 else [],
        "measures": MEASURES,
    }
    return render_page("page.html", content)


def render_page(template: str, content: dict[str, Any]) -> str:
    """The HTML of a page from one of the templates in `assets/report`, with the style sheet in it."""
    import jinja2

    assets = Path(str(resources.files("dulbe_peft") / "assets" / "report"))
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(assets),
        autoescape=True,  # class names and paths are anybody's texts
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"percent": percent, "points": points, "mib": _mib, "count": "{:,}".format}
    style = (assets / "page.css").read_text(encoding="utf-8")
    try:
        return environment.get_template(template).render(content, style=style)
    except jinja2.TemplateError as error:
        raise ValueError(f"a figure of the page is missing: {error}") from error


def percent(fraction: float | None, digits: int = 2) -> str:
    """A fraction as people read it, in percent; empty where there is none."""
    return "" if fraction is None else accuracy.percent(fraction, digits)


def points(fraction: float | None) -> str:
    """A difference of two fractions in percentage points, with its sign; empty where there is none."""
    return "" if fraction is None else accuracy.signed(fraction, 2)


def _phase_order(name: str) -> tuple[int, str]:
    return (_PHASES.index(name) if name in _PHASES else len(_PHASES), name)


def _mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:,.0f}"


def _view(run: Run, key: str) -> dict[str, Any]:
    """What the template shows of a run.

    Args:
        key: a word that no other run of the page has.
    """
    view: dict[str, Any] = {
        "run": run,
        "key": key,
        "model": "" if run.base_model is None else Path(run.base_model).name or run.base_model,
        "data": data_name(run.predictions),
        "classes": sum(len(task) for task in run.learned),
        "strategy": strategy_name(run),
        "task_rows": _task_rows(run),
        "captured": any(record.get("shared_capture") is not None for record in run.records),
        "phases": sorted({name for task in run.timings for name in (task or {}).get("phases", {})}, key=_phase_order),
        "settings": sorted(flat(run.settings).items()),
        "examples": {kind: [_example(entry) for entry in rows] for kind, rows in run.examples.items()},
        "loss": "",
        "tested": run.tested,
        "updates": [_update(entry) for entry in run.updates if entry["images"] or entry["forgotten"]],
        **changes_view(run, key),
    }
    losses = [record.get("loss") or [] for record in run.records]
    if any(losses):
        view["loss"] = inline_svg(loss_figure(losses), f"{key}-loss")
    return view | _tested(run, key) if run.tested else view


def _tested(run: Run, key: str) -> dict[str, Any]:
    """What the template shows of a run with test data."""
    results = run.results
    blocks = results["classifiers"]
    accuracy = blocks[run.first]["last_accuracy"]
    lost = results.get("classes", {}).get(run.first, {}).get("forgetting", {})
    classes = class_table(run.predictions, lost)
    worst = [entry["name"] for entry in classes if entry["accuracy"] < 1][:WORST]
    images = {entry["name"]: entry["images"] for entry in classes}
    columns, counts = confusion(run.predictions, worst)
    return {
        "first": run.first,
        "accuracy": accuracy,
        "baselines": [
            (f"{name}, {_BASELINES[name]}", block["last_accuracy"], accuracy - block["last_accuracy"])
            for name, block in result_rows(results)
            if name in _BASELINES and name != run.first and None not in (accuracy, block["last_accuracy"])
        ],
        "rows": result_rows(results),
        "methods": [(name, METHODS[name]) for name, _ in result_rows(results) if name in METHODS],
        "chart": inline_svg(accuracy_figure(results), f"{key}-accuracy"),
        "matrices": [(name, block["matrix"]) for name, block in blocks.items()],
        "class_table": classes,
        "worst": WORST,
        "confusion_columns": columns,
        "confusion": [(name, images[name], row) for name, row in zip(worst, counts)],
        "per_classifier": _per_classifier(run),
    }


def _per_classifier(run: Run) -> list[tuple[str, list[float | None]]]:
    """Each class's accuracy with every classifier, the worst of the first one first; empty of a single one."""
    figures = run.results.get("classes", {})
    if len(figures) < 2:
        return []
    first = figures[run.first]["accuracy"]
    names = sorted(first, key=first.__getitem__)
    return [(name, [figures[rule]["accuracy"].get(name) for rule in run.results["classifiers"]]) for name in names]


def _task_rows(run: Run) -> list[dict[str, Any]]:
    """One row a task: what was learned from, and what learning showed."""
    rows = []
    for number, (names, record, timing) in enumerate(zip(run.learned, run.records, run.timings), 1):
        images, loss = record.get("images") or {}, record.get("loss") or []
        counts = sorted(images.values())
        rows.append(
            {
                "number": number,
                "names": names,
                "images": sum(counts) if counts else None,
                "least": counts[0] if counts else None,
                "most": counts[-1] if counts else None,
                "first_loss": loss[0] if loss else None,
                "last_loss": loss[-1] if loss else None,
                "shared": record.get("shared_capture"),
                "residual": record.get("residual_capture"),
                "depth": record.get("expected_depth"),
                "seconds": (timing or {}).get("seconds"),
                "phases": (timing or {}).get("phases", {}),
                "memory": (timing or {}).get("peak_memory"),
            }
        )
    return rows


def _update(entry: dict[str, Any]) -> str:
    """What the learner took in or lost without training, in words."""
    after = f"after task {entry['after']}"
    if entry["forgotten"]:
        return f"{after}, a class of task {entry['forgotten']} was forgotten"
    images = entry["images"]
    listed = ", ".join(f"{name} ({count})" for name, count in list(images.items())[:WORST])
    more = f" and {len(images) - WORST} more classes" if len(images) > WORST else ""
    total = sum(images.values())
    return f"{after}, {total:,} further image{'s' * (total != 1)} of known classes: {listed}{more}"


def _example(entry: dict[str, Any]) -> dict[str, Any]:
    data = base64.b64encode(entry["jpeg"]).decode()
    return {**entry, "source": f"data:image/jpeg;base64,{data}", "place": Path(entry["image"]).name}
