"""Runs side by side: those that differ only in their seed are one group, and a classifier of a group is one row."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dulbe_peft.metrics.accuracy import percent, result_rows
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
_YES, _UNKNOWN = "yes", "–"
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


@dataclass(frozen=True)
class MeanSpread:
    """A measure over the runs of a group, fractions; the spread is the standard deviation with n - 1."""

    mean: float
    spread: float | None

    def __str__(self) -> str:
        spread = "" if self.spread is None else f" ± {percent(self.spread, 2)}"
        return f"{percent(self.mean, 2)}{spread}"


@dataclass(frozen=True)
class GroupResult:
    """One classifier, or a baseline, in one group of runs, with the measures that are defined for it."""

    runs: tuple[str, ...]
    strategy: str
    method: str
    measures: dict[str, MeanSpread]


def _group_column(name: str) -> Column[GroupResult]:
    parts = {name: "mean", f"{name}_std": "spread"}
    values = {key: lambda row, part=part: getattr(row.measures.get(name), part, None) for key, part in parts.items()}
    return Column(f"{MEASURES[name][0]} (%)", lambda row: str(row.measures.get(name, "")), values=values)


def _text_column(title: str, show: Callable[[GroupResult], str]) -> Column[GroupResult]:
    return Column(title, show, number=False, values={title: show})


GROUP_COLUMNS = [
    Column[GroupResult](
        "runs", lambda row: ", ".join(row.runs), number=False, values={"runs": lambda row: "; ".join(row.runs)}
    ),
    Column[GroupResult]("n", lambda row: str(len(row.runs)), values={"n": lambda row: len(row.runs)}),
    _text_column("strategy", lambda row: row.strategy),
    _text_column("method", lambda row: row.method),
    *map(_group_column, MEASURES),
]


def group_runs(runs: Sequence[RunFolder]) -> list[list[RunFolder]]:
    """Runs that differ only in their seed, or in the order of the classes, as one group; in the order given."""
    groups: list[list[RunFolder]] = []
    for run in runs:
        group = next((group for group in groups if _alike(group[0], run)), [])
        if not group:
            groups.append(group)
        group.append(run)
    return groups


def _alike(one: RunFolder, other: RunFolder) -> bool:
    settings = [{**flat_settings(run.settings), "arguments.seed": None} for run in (one, other)]
    sizes = [[len(task) for task in run.learned] for run in (one, other)]
    classes = [sorted(name for task in run.learned for name in task) for run in (one, other)]
    if any(own != theirs for own, theirs in (settings, sizes, classes)):
        return False
    if one.fingerprints is None or other.fingerprints is None:
        return one.fingerprints is other.fingerprints
    # In another order of classes every task has other images, and other fingerprints.
    same_data = one.learned != other.learned or one.fingerprints["data"] == other.fingerprints["data"]
    return same_data and one.fingerprints["base_model"] == other.fingerprints["base_model"]


def group_results(groups: Sequence[Sequence[RunFolder]]) -> list[GroupResult]:
    """The rows of the table of several runs; runs without test data give none."""
    rows = []
    for group in groups:
        tested = [dict(result_rows(run.results)) for run in group if run.tested]
        for name in tested[0] if tested else ():
            blocks = [blocks[name] for blocks in tested if name in blocks]
            values: dict[str, list[Any]] = {measure: [block.get(measure) for block in blocks] for measure in MEASURES}
            measures = {
                measure: MeanSpread(statistics.fmean(own), statistics.stdev(own) if len(own) > 1 else None)
                for measure, own in values.items()
                if None not in own
            }
            rows.append(GroupResult(tuple(run.name for run in group), group[0].strategy, name, measures))
    return rows


def best_results(rows: Sequence[GroupResult]) -> list[GroupResult]:
    """The rows with the highest accuracy after the last task, as people read it; several where they are as good."""
    lasts = [round(row.measures["last_accuracy"].mean, 4) if "last_accuracy" in row.measures else -1.0 for row in rows]
    return [row for row, last in zip(rows, lasts, strict=True) if last == max(lasts) >= 0]


def setting_differences(runs: Sequence[RunFolder]) -> list[tuple[str, list[str]]]:
    """The settings that differ: dotted name, and each run's value; what a run lacks as a whole is one row."""
    settings = [
        flat_settings(run.settings)
        | {"classes": " | ".join(", ".join(task) for task in run.learned), "base_model": run.base_model or ""}
        for run in runs
    ]
    names = sorted({name for row in settings for name in row})
    owners = {owner: [_has(run, owner, row) for run, row in zip(runs, settings)] for owner in map(_owner, names)}
    rows = [(owner, has, has) for owner, has in owners.items() if owner]
    for name in names:
        values = [_UNKNOWN if row.get(name) is None else str(row[name]) for row in settings]
        rows.append((name, values, [value for value, has in zip(values, owners[_owner(name)]) if has == _YES]))
    differing = sorted((name, values) for name, values, own in rows if len(set(own)) > 1)
    return [(name, [f"{v[:_LONGEST]} …" if len(v) > _LONGEST else v for v in vs]) for name, vs in differing]


def _owner(name: str) -> str:
    """What a setting belongs to, such as the adapter or one of the classifiers."""
    return name.rpartition(".")[0]


def _has(run: RunFolder, owner: str, settings: dict[str, Any]) -> str:
    """Whether a run has what `owner` names; "–" where nobody noted it."""
    if not owner or any(_owner(name) == owner for name in settings):
        return _YES
    return "none" if owner.partition(".")[0] in run.settings else _UNKNOWN
