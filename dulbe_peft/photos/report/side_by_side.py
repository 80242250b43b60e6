"""Compare runs side by side: a table with one row for each classifier of each run, and the settings that differ."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from dulbe_peft.metrics.accuracy import TITLES, percent
from dulbe_peft.metrics.results import Measures, Results
from dulbe_peft.photos.report.run_folder import RunFolder
from dulbe_peft.photos.report.table import Column, format_text, tuple_columns
from dulbe_peft.utils.settings import flat_settings

# Name in `results.json` -> title on a page, with the paper's symbol, and title in a terminal.
MEASURES = {
    "last_accuracy": ("after the last task (A_last)", "accuracy"),
    "average_accuracy": ("mean over tasks (A_bar)", "mean over tasks"),
    "forgetting": ("forgetting", "forgetting"),
    "backward_transfer": ("backward transfer", "backward transfer"),
}
_LAST = "accuracy: percent of the test images classified correctly after the last task."
_MEAN = f"{_LAST}\nmean over tasks: the mean of the accuracies after each task."
_TRAINED = (
    f"{_MEAN}\nforgetting: mean drop of old tasks' accuracy from its best value."
    "\nbackward transfer: mean change of old tasks' accuracy since they were learned."
)
_LONGEST = 200  # characters of a setting's value that are shown


class RunRow(NamedTuple):
    """One classifier or baseline of one run; `measures` are its figures in `results.json`."""

    run: str
    strategy: str
    method: str
    measures: Measures


def _measure_column(name: str) -> Column[RunRow]:
    title, short = MEASURES[name]

    def show(row: RunRow) -> str:
        return percent(getattr(row.measures, name), 2) if name in row.measures.model_fields_set else ""

    return Column(title, show, short=short)


_LAST_COLUMN, _MEAN_COLUMN, *_CHANGES = map(_measure_column, MEASURES)
_RUN, _STRATEGY, _METHOD = tuple_columns("run", "strategy", "method", numbers=())
_TITLE = replace(_METHOD, show=lambda row: TITLES.get(row.method, row.method))
SUMMARY_COLUMNS = [_TITLE, _MEAN_COLUMN, _LAST_COLUMN, *_CHANGES]
RUN_COLUMNS = [_RUN, _STRATEGY, _TITLE, _LAST_COLUMN, _MEAN_COLUMN, *_CHANGES]


def format_summary(results: Results | Mapping[str, object]) -> str:
    """Return a small table of a stream's results in percent, with lines below it that explain the columns.

    `results` is what `run_stream` returned, or a record of it. If nothing was trained, the text
    classifier equals the zero-shot one, so the table has only the latter.
    """
    results = Results.of(results)
    several = len(results.class_names) > 1
    trained = several and results.trained
    columns = [replace(_TITLE, title="classifier"), *[_MEAN_COLUMN] * several, _LAST_COLUMN, *_CHANGES * trained]
    words = _TRAINED if trained else _MEAN if several else _LAST
    blocks = dict(results.rows)
    if not results.trained and "zero_shot" in blocks:
        blocks.pop("text", None)
    return f"{format_text(columns, [RunRow('', '', *row) for row in blocks.items()])}\n{words}"


def run_rows(runs: Sequence[RunFolder]) -> list[RunRow]:
    """Return the rows of the table of several runs. Runs without test data have no rows."""
    tested = [run for run in runs if run.tested]
    return [RunRow(run.name, run.strategy, method, block) for run in tested for method, block in run.results.rows]


def best_rows(rows: Sequence[RunRow]) -> list[RunRow]:
    """Return the rows with the highest accuracy after the last task, rounded as printed; several if they are equal."""
    lasts = [-1.0 if (last := row.measures.last_accuracy) is None else round(last, 4) for row in rows]
    return [row for row, last in zip(rows, lasts, strict=True) if last == max(lasts) >= 0]


def setting_differences(runs: Sequence[RunFolder]) -> list[tuple[str, ...]]:
    """Return the header and the settings that differ, each with its dotted name and its value in each run.

    If a run lacks a whole group of settings, such as the adapter, the group is one row.
    """
    settings = [
        flat_settings(run.settings)
        | {"classes": " | ".join(", ".join(task) for task in run.learned), "base_model": run.base_model}
        for run in runs
    ]
    groups = [{name.rpartition(".")[0] for name in names} for names in settings]
    rows: dict[str, list[str]] = {}
    for name in sorted(set().union(*settings)):
        group = name.rpartition(".")[0]
        if all(group in present for present in groups):
            rows[name] = ["–" if values.get(name) is None else str(values[name]) for values in settings]
        else:
            rows[group] = ["yes" if group in present else "–" for present in groups]
    different = {name: row for name, row in rows.items() if len(set(row)) > 1}
    shown = [(n, *(f"{v[:_LONGEST]} …" if len(v) > _LONGEST else v for v in row)) for n, row in different.items()]
    return [("setting", *(run.name for run in runs)), *shown]
