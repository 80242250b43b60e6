"""Results as tables: a summary in the terminal, several runs side by side, as CSV and as LaTeX."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dulbe_peft.metrics.accuracy import percent, result_rows
from dulbe_peft.report.collect import Run
from dulbe_peft.utils.files import replacing, write_csv

# What `results.json` calls a measure, and what people call it.
MEASURES = {
    "last_accuracy": "after the last task",
    "average_accuracy": "mean over tasks",
    "forgetting": "forgetting",
    "backward_transfer": "backward transfer",
}
# What the terminal's table calls the measures, in plain words.
_WORDS = (
    "A_last: percent right after the last task. A_bar: the mean of it over all tasks.",
    "Forgetting: old tasks' loss since their best. Backward transfer: gain since new.",
)
_SEED = "arguments.seed"
_YES = "yes"
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{sign: f"{{{sign}}}" for sign in "<>|"},
}
_LATEX_FIGURE = str.maketrans({"±": r"$\pm$", "→": r"$\to$", "-": "$-$"})


def format_summary(results: dict[str, Any]) -> str:
    """A small table of the stream's figures in percent, and below it what A_bar, A_last and the others are."""
    blocks = result_rows(results)
    width = max(len(name) for name, _ in blocks)
    rows = [f"{'':<{width}}    A_bar   A_last  forgetting  backward transfer"]
    for name, block in blocks:
        row = f"{name:<{width}}{percent(block['average_accuracy'], 2):>9}{percent(block['last_accuracy'], 2):>9}"
        if "forgetting" in block:
            row += f"  {percent(block['forgetting'], 2):>10}  {percent(block['backward_transfer'], 2):>17}"
        rows.append(row)
    return "\n".join([*rows, *_WORDS])


@dataclass(frozen=True)
class Figure:
    """A measure over the runs of a group.

    Attributes:
        mean: over the runs, a fraction.
        spread: standard deviation over the runs, with n - 1; None of a single run.
    """

    mean: float
    spread: float | None

    def __str__(self) -> str:
        spread = "" if self.spread is None else f" ± {100 * self.spread:.2f}"
        return f"{100 * self.mean:.2f}{spread}"


@dataclass(frozen=True)
class Comparison:
    """A row of the table of several runs: one classifier, or a baseline, in one group of runs.

    Attributes:
        runs: names of the group's runs.
        strategy: what was trained.
        method: the row's name in `results.json`; for a classifier its own.
        figures: measure -> figure; measures that are not defined for this row are left out.
    """

    runs: tuple[str, ...]
    strategy: str
    method: str
    figures: dict[str, Figure]


def group_runs(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs that differ only in their seed, or in the order of the classes, as one group; in the order given."""
    groups: list[list[Run]] = []
    for run in runs:
        group = next((group for group in groups if _alike(group[0], run)), None)
        if group is None:
            groups.append([run])
        else:
            group.append(run)
    return groups


def _alike(one: Run, other: Run) -> bool:
    settings = [{**flat(run.settings), _SEED: None} for run in (one, other)]
    sizes = [[len(task) for task in run.learned] for run in (one, other)]
    classes = [sorted(name for task in run.learned for name in task) for run in (one, other)]
    if settings[0] != settings[1] or sizes[0] != sizes[1] or classes[0] != classes[1]:
        return False
    if one.fingerprints is None or other.fingerprints is None:
        return one.fingerprints is other.fingerprints
    # In another order of classes every task has other images, and other fingerprints.
    same_data = one.learned != other.learned or one.fingerprints["data"] == other.fingerprints["data"]
    return same_data and one.fingerprints["base_model"] == other.fingerprints["base_model"]


def compare(groups: Sequence[Sequence[Run]]) -> list[Comparison]:
    """The rows of the table of several runs; runs without test data give none."""
    rows = []
    for group in groups:
        tested = [dict(result_rows(run.results)) for run in group if run.tested]
        for name in tested[0] if tested else ():
            blocks = [blocks[name] for blocks in tested if name in blocks]
            figures = {
                measure: _figure([block[measure] for block in blocks])
                for measure in MEASURES
                if all(block.get(measure) is not None for block in blocks)
            }
            rows.append(Comparison(tuple(run.name for run in group), strategy_name(group[0]), name, figures))
    return rows


def best(rows: Sequence[Comparison]) -> list[Comparison]:
    """The rows with the highest accuracy after the last task, as people read it; several where they are as good."""
    shown = [round(row.figures["last_accuracy"].mean, 4) if "last_accuracy" in row.figures else -1.0 for row in rows]
    return [row for row, value in zip(rows, shown, strict=True) if value == max(shown) >= 0]


def _figure(values: list[float]) -> Figure:
    return Figure(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def strategy_name(run: Run) -> str:
    """What was trained; a run of version 0.1 whose task folders are gone does not say it, and it had one method."""
    return str((run.settings.get("strategy") or {}).get("name", "dulbe"))


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The settings that are not the same in all runs: dotted name, and each run's value.

    What a run lacks as a whole, such as an adapter, is one row. Its settings are compared among the runs that have it.
    """
    settings = [
        flat(run.settings)
        | {"classes": " | ".join(", ".join(task) for task in run.learned), "base_model": run.base_model or ""}
        for run in runs
    ]
    names = sorted({name for row in settings for name in row})
    owners = {owner: [_has(run, owner, row) for run, row in zip(runs, settings)] for owner in map(_owner, names)}
    rows = [(owner, has, has) for owner, has in owners.items() if owner]
    for name in names:
        values = [_text(row.get(name)) for row in settings]
        own = [value for value, has in zip(values, owners[_owner(name)]) if has == _YES]
        rows.append((name, values, own))
    return sorted((name, [_short(value) for value in values]) for name, values, own in rows if len(set(own)) > 1)


def _owner(name: str) -> str:
    """What a setting belongs to, such as the adapter or one of the classifiers."""
    return name.rpartition(".")[0]


def _has(run: Run, owner: str, settings: dict[str, Any]) -> str:
    """Whether a run has what `owner` names; "–" where nobody noted it."""
    if not owner or any(_owner(name) == owner for name in settings):
        return _YES
    return "none" if owner.partition(".")[0] in run.settings else _text(None)


def flat(settings: Any, path: str = "") -> dict[str, Any]:
    """Nested settings as dotted names.

    >>> flat({"adapter": {"shared_rank": 1}, "seed": 0})
    {'adapter.shared_rank': 1, 'seed': 0}
    """
    if not isinstance(settings, dict):
        return {path: settings}
    return {
        name: value
        for key in settings
        for name, value in flat(settings[key], f"{path}.{key}" if path else str(key)).items()
    }


def _text(value: Any) -> str:
    return "–" if value is None else str(value)


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]} …"


# ---------------------------------------------------------------------- files


def write_comparison_csv(rows: Sequence[Comparison], path: Path) -> None:
    """Write the table with full figures, as fractions."""
    header = ["runs", "n", "strategy", "method"]
    header += [f"{measure}{part}" for measure in MEASURES for part in ("", "_std")]
    lines = []
    for row in rows:
        cells: list[Any] = ["; ".join(row.runs), len(row.runs), row.strategy, row.method]
        for measure in MEASURES:
            figure = row.figures.get(measure)
            cells += ["", ""] if figure is None else [figure.mean, "" if figure.spread is None else figure.spread]
        lines.append(cells)
    write_csv(path, header, lines)


def write_comparison_latex(rows: Sequence[Comparison], path: Path) -> None:
    """Write the table as a LaTeX `tabular` that needs no package, in percent."""
    titles = ["runs", "strategy", "method", *(f"{title} (%)" for title in MEASURES.values())]
    figures = [[str(row.figures[m]) if m in row.figures else "" for m in MEASURES] for row in rows]
    names = [[", ".join(row.runs), row.strategy, row.method] for row in rows]
    write_latex(path, titles, [own + numbers for own, numbers in zip(names, figures, strict=True)], 3)


def write_latex(path: Path, titles: Sequence[str], rows: Sequence[Sequence[str]], texts: int) -> None:
    """Write a LaTeX `tabular` that needs no package.

    Args:
        path: the file.
        titles: of the columns.
        rows: a cell for each column.
        texts: how many columns, from the left, hold texts; all others hold figures.
    """
    layout = "l" * texts + "r" * (len(titles) - texts)
    lines = [rf"\begin{{tabular}}{{{layout}}}", r"\hline", " & ".join(map(latex_text, titles)) + r" \\", r"\hline"]
    for row in rows:
        cells = [*map(latex_text, row[:texts]), *(figure.translate(_LATEX_FIGURE) for figure in row[texts:])]
        lines.append(" & ".join(cells) + r" \\")
    lines += [r"\hline", r"\end{tabular}", ""]
    with replacing(path) as temporary:
        temporary.write_text("\n".join(lines), encoding="utf-8")


def latex_text(text: str) -> str:
    r"""A text that LaTeX prints as it is.

    >>> print(latex_text("50% of a_b"))
    50\% of a\_b
    """
    return "".join(_LATEX.get(sign, sign) for sign in text)
