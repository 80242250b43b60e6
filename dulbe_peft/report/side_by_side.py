"""Runs side by side: a classifier of a run is a row; and what differs in the runs' settings."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dulbe_peft.metrics.accuracy import TITLES, percent, result_rows
from dulbe_peft.report.run_folder import RunFolder, was_trained
from dulbe_peft.report.table import Column, format_text
from dulbe_peft.utils.settings import flat_settings

# What `results.json` calls a measure, what people call it, and what the paper calls it.
MEASURES = {
    "last_accuracy": ("after the last task", "A_last"),
    "average_accuracy": ("mean over tasks", "A_bar"),
    "forgetting": ("forgetting", ""),
    "backward_transfer": ("backward transfer", ""),
}
_LAST = "A_last: percent right after the last task."
_MEAN = f"{_LAST} A_bar: the mean of it over all tasks."
_TRAINED = f"{_MEAN}\nForgetting: old tasks' loss since their best. Backward transfer: gain since new."
_LONGEST = 200  # letters of a setting's value


def _measure_column(name: str) -> Column[tuple[str, dict[str, Any]]]:
    words, short = MEASURES[name]
    title = f"{words} ({short})" if short else words
    return Column(title, lambda row: percent(row[1][name], 2) if name in row[1] else "", short=short)


# A row is a method's name and its part of `results.json`.
SUMMARY_COLUMNS = [
    Column[tuple[str, dict[str, Any]]]("method", lambda row: row[0], number=False),
    *(_measure_column(name) for name in ("average_accuracy", "last_accuracy", "forgetting", "backward_transfer")),
]


def format_summary(results: dict[str, Any]) -> str:
    """A small table of the stream's figures in percent, those that say something, and below it what they are."""
    method, mean, last, *changes = SUMMARY_COLUMNS
    columns, words = [method, last], _LAST
    if len(results["class_names"]) > 1:
        columns, words = [method, mean, last], _MEAN
        if was_trained(results["tasks"]):
            columns, words = [*columns, *changes], _TRAINED
    return f"{format_text(columns, result_rows(results))}\n{words}"


class RunRow(NamedTuple):
    """One classifier, or a baseline, of one run; `measures` is its part of `results.json`."""

    run: str
    strategy: str
    method: str
    measures: dict[str, Any]


def _text_column(title: str, show: Callable[[RunRow], str]) -> Column[RunRow]:
    return Column(title, show, number=False, values={title: show})


def _percent_column(name: str) -> Column[RunRow]:
    def show(row: RunRow) -> str:
        value = row.measures.get(name)
        return "" if value is None else percent(value, 2)

    return Column(f"{MEASURES[name][0]} (%)", show, values={name: lambda row: row.measures.get(name)})


RUN_COLUMNS = [
    _text_column("run", lambda row: row.run),
    _text_column("strategy", lambda row: row.strategy),
    Column(
        "method",
        lambda row: TITLES.get(row.method, row.method),
        number=False,
        values={"method": lambda row: row.method},
    ),
    *map(_percent_column, MEASURES),
]


def run_rows(runs: Sequence[RunFolder]) -> list[RunRow]:
    """The rows of the table of several runs; runs without test data give none."""
    return [
        RunRow(run.name, run.strategy, method, block)
        for run in runs
        if run.tested
        for method, block in result_rows(run.results)
    ]


def best_rows(rows: Sequence[RunRow]) -> list[RunRow]:
    """The rows with the highest accuracy after the last task, as people read it; several where they are as good."""
    lasts = [-1.0 if (last := row.measures.get("last_accuracy")) is None else round(last, 4) for row in rows]
    return [row for row, last in zip(rows, lasts, strict=True) if last == max(lasts) >= 0]


def setting_differences(runs: Sequence[RunFolder]) -> list[tuple[str, ...]]:
    """Titles, and the settings that differ: dotted name, each run's value; what a run lacks as a whole is one row."""
    settings = [
        flat_settings(run.settings)
        | {"classes": " | ".join(", ".join(task) for task in run.learned), "base_model": run.base_model}
        for run in runs
    ]
    owners = [{name.rpartition(".")[0] for name in own} for own in settings]
    rows: dict[str, list[str]] = {}
    for name in sorted(set().union(*settings)):
        owner = name.rpartition(".")[0]
        if all(owner in own for own in owners):
            rows[name] = ["–" if own.get(name) is None else str(own[name]) for own in settings]
        else:  # such as the adapter, where a run has none
            rows[owner] = ["yes" if owner in own else "–" for own in owners]
    different = {name: row for name, row in rows.items() if len(set(row)) > 1}
    shown = [(n, *(f"{v[:_LONGEST]} …" if len(v) > _LONGEST else v for v in row)) for n, row in different.items()]
    return [("setting", *(run.name for run in runs)), *shown]
