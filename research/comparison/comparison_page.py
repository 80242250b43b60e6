"""Write a comparison as a single HTML page, in the style of the report on runs."""

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dulbe_peft.metrics.accuracy import percent, signed
from dulbe_peft.photos.report.html import write_page
from dulbe_peft.photos.report.plots import inline_svg
from dulbe_peft.photos.report.table import filled
from dulbe_peft.utils.settings import flat_settings
from dulbe_peft.utils.templates import render
from research.comparison import comparison_plots as plots
from research.comparison.comparison_file import Comparison, Entry, read_comparison
from research.comparison.intervals import Difference
from research.comparison.latex import DEFAULT, write_paper_table
from research.comparison.plan import Plan, Row
from research.comparison.ranks import ranked
from research.comparison.summary import COLUMNS, COSTS, FEW, best_rows, by_stream, count_seeds, write_summary_csv

HERE = Path(__file__).parent  # the templates


def write_comparison_page(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    csv: str | os.PathLike[str] | None = None,
    latex: str | os.PathLike[str] | None = None,
    columns: Sequence[str] = (),
) -> Path:
    """Write the page of a comparison, finished or not, and its table as CSV or LaTeX if asked.

    `columns` are those of the LaTeX table; none stands for `latex.DEFAULT`.
    """
    folder = Path(folder)
    output = folder / "report.html" if output is None else Path(output)
    comparison = read_comparison(folder)
    write_page(output, "comparison.html", _content(comparison, folder.resolve().name), HERE)
    if csv is not None:
        write_summary_csv(Path(csv), comparison.entries)
    if latex is not None:
        write_paper_table(comparison, Path(latex), columns or DEFAULT)
    return output


def _content(comparison: Comparison, name: str) -> dict[str, Any]:
    scope, entries = comparison.scope, comparison.entries
    rows, ranks = plots.important_rows(comparison), ranked(entries)
    owners = (*scope.streams.items(), *scope.methods.items())
    streams = by_stream(entries)
    return {
        "name": name,
        "scope": scope,
        "few": FEW,
        "row_columns": [column for column in COLUMNS[1:] if column.title not in COSTS],
        "cost_columns": [*COLUMNS[1:4], *(column for column in COLUMNS if column.title in COSTS)],
        "streams": [
            _stream(stream, number, streams.get(stream, []), scope, rows, comparison.gains.get(stream))
            for number, stream in enumerate(scope.streams)
        ],
        "missing": _missing(comparison),
        "map": inline_svg(plots.streams_figure(comparison, rows), "map") if len(streams) > 1 else "",
        "counts": plots.image_counts(scope.streams),
        "shown": [row.title for row in rows],
        "several": plots.best_of_each(comparison) if len(rows) < len(scope.rows) else "",
        "titles": [column.title for column in filled(COLUMNS, entries)],
        "ranks": ranks,
        "ranked_rows": [
            (row.title, f"{mean:.2f}", None if p is None else f"{p:.3g}")
            for row, mean, p in (ranks.rows if ranks else ())
        ],
        "choices": [(method, _listed(values)) for method, values in scope.choices.items()],
        "settings": [(owner, _listed(flat_settings(values))) for owner, values in owners],
    }


def _stream(
    stream: str, number: int, entries: list[Entry], scope: Plan, rows: Sequence[Row], gain: Difference | None
) -> dict[str, Any]:
    """Return what the template shows of a stream; `number` distinguishes its pictures from those of other streams."""
    reference = scope.reference
    curves = any(len(entry.curve) > 1 and entry.row in rows for entry in entries)
    others = plots.with_difference(entries)
    return {
        "name": stream,
        "advice": advice(best_rows(scope, entries), gain),
        "lead": lead(entries, reference),
        "seeds": count_seeds(entries) if entries else "",
        "forest": inline_svg(plots.forest_figure(others), f"forest{number}") if others else "",
        "curves": inline_svg(plots.curves_figure(entries, rows), f"curves{number}") if curves else "",
        "cost": inline_svg(plots.cost_figure(entries), f"cost{number}") if len(entries) > 1 else "",
        "drawn": (min(len(others), plots.MOST_DRAWN), len(others)),
        "entries": entries,
        "reference": next((place for place, entry in enumerate(entries) if entry.row == reference), None),
    }


def advice(best: tuple[Entry, Entry] | None, gain: Difference | None) -> str:
    """Return a sentence that says whether to train on a stream, or "" if only one kind of method is finished.

    `best` are the best row with training and the best one without, and `gain` is their difference.
    """
    if best is None:
        return ""
    shares = [f"{entry.row.title} ({percent(entry.means['last'])} %)" for entry in best]
    compared = f"the best row with training is {shares[0]}, and the best without is {shares[1]}"
    if gain is None:
        missing = "no seed with the same test images is finished for both"
        return f"Whether training pays is not known: {compared}, and {missing}."
    interval = f"with a 95 % interval of {signed(gain.low)} to {signed(gain.high)}"
    compared += f". The difference over their common seeds is {signed(gain.mean)} points, {interval}"
    if not gain.clear:
        return f"Training makes no clear difference: {compared}."
    return f"{'Train' if gain.mean > 0 else 'Do not train'}: {compared}."


def lead(entries: Sequence[Entry], reference: Row) -> str:
    """Return which row is best on a stream, and whether it is clearly better or worse than the reference."""
    top = max((entry.means["last"] for entry in entries), default=0.0)
    differences = [entry.differences["last"] for entry in entries]
    return render(
        "lead.txt",
        HERE,
        reference=reference.title,
        first=next((entry for entry in entries if entry.row == reference), None),
        best=[entry for entry in entries if entry.means["last"] == top],
        top=top,
        few=FEW,
        others=len(entries) - differences.count(None),
        worse=sum(difference is not None and difference.high < 0 for difference in differences),
        percent=percent,
        signed=signed,
    ).strip()


def _missing(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the unfinished runs. Rows of a method that lack the same seeds are listed together."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for stream, row, seeds in comparison.missing():
        drift = "" if row.drift == "none" else f" (drift {row.drift})"
        groups.setdefault((stream, row.method, seeds), []).append(row.classifier + drift)
    rows = Counter(row.method for row in comparison.scope.rows)
    return [
        (stream, method, "all" if len(names) == rows[method] else ", ".join(names), ", ".join(map(str, seeds)))
        for (stream, method, seeds), names in groups.items()
    ]


def _listed(settings: dict[str, Any]) -> str:
    return "; ".join(
        f"{name} = {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in sorted(settings.items())
    )
