"""Results as tables: a summary in the terminal, several runs side by side, as CSV and as LaTeX."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dulbe_peft.files import replacing, write_csv
from dulbe_peft.report.collect import Run
from dulbe_peft.streams.metrics import percent, result_rows

# What `results.json` calls a measure, and what people call it.
MEASURES = {
    "last_accuracy": "after the last task",
    "average_accuracy": "mean over tasks",
    "forgetting": "forgetting",
    "backward_transfer": "backward transfer",
}
_SEED = "arguments.seed"
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{sign: f"{{{sign}}}" for sign in "<>|"},
}
_LATEX_FIGURE = str.maketrans({"±": r"$\pm$", "→": r"$\to$", "-": "$-$"})


def format_summary(results: dict[str, Any]) -> str:
    """A small table of the stream's figures in percent: A_bar, A_last, forgetting and backward transfer."""
    rows = ["                        A_bar   A_last  forgetting  backward transfer"]
    for label, block in result_rows(results):
        row = f"{label:<22}{percent(block['average_accuracy'], 2):>7}  {percent(block['last_accuracy'], 2):>7}"
        if "forgetting" in block:
            row += f"  {percent(block['forgetting'], 2):>10}  {percent(block['backward_transfer'], 2):>17}"
        rows.append(row)
    return "\n".join(rows)


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
    """A row of the table of several runs: one classifier, or zero-shot, in one group of runs.

    Attributes:
        runs: names of the group's runs.
        strategy: what was trained.
        method: the classifier's label.
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
        for label in tested[0] if tested else ():
            blocks = [blocks[label] for blocks in tested if label in blocks]
            figures = {
                measure: _figure([block[measure] for block in blocks])
                for measure in MEASURES
                if all(block.get(measure) is not None for block in blocks)
            }
            names = tuple(run.name for run in group)
            rows.append(Comparison(names, strategy_name(group[0]), label, figures))
    return rows


def _figure(values: list[float]) -> Figure:
    return Figure(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def strategy_name(run: Run) -> str:
    """What was trained; a run of version 0.1 whose task folders are gone does not say it, and it had one method."""
    return str((run.settings.get("strategy") or {}).get("name", "dulbe"))


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The settings that are not the same in all runs: dotted name, and each run's value."""
    settings = [
        flat(run.settings)
        | {"classes": " | ".join(", ".join(task) for task in run.learned), "base_model": run.base_model or ""}
        for run in runs
    ]
    names = sorted({name for row in settings for name in row})
    rows = [(name, [_text(row.get(name)) for row in settings]) for name in names]
    return [(name, [_short(value) for value in values]) for name, values in rows if len(set(values)) > 1]


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
    """Write the table with full figures, as fractions.

    Raises:
        OSError: the file cannot be written.
    """
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
    """Write the table as a LaTeX `tabular` that needs no package, in percent.

    Raises:
        OSError: the file cannot be written.
    """
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

    Raises:
        OSError: the file cannot be written.
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
