"""Write a comparison as a table for a paper: LaTeX with the package booktabs."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from dulbe_peft.metrics.accuracy import percent
from dulbe_peft.photos.report.table import Column, filled, latex_text
from dulbe_peft.utils.files import output_file
from dulbe_peft.utils.specs import closest
from research.comparison.comparison_file import Comparison, Entry
from research.comparison.intervals import Measure
from research.comparison.summary import COLUMNS, by_stream

_MEASURES: dict[str, Measure] = {"A_last": "last", "A_bar": "average", "forgetting": "forgetting"}
_TITLES = {"A_last": r"$A_\mathrm{last}$", "A_bar": r"$\bar{A}$"}
NAMES = [column.title for column in COLUMNS]
DEFAULT = ("method", "classifier", "drift", "seeds", "A_last", "A_bar", "forgetting", "vs. reference (95 %)")
NOTE = r"""% In percent: the mean over the seeds $\pm$ their standard deviation. Differences are in percentage points,
% with 95 % intervals over seeds and test images. Bold: the best row of a stream. $^\dagger$: not clearly worse
% than the best row (the interval of the paired difference, at the level of Holm's test over all rows, includes zero).
% The best row was chosen on the same images, which makes it look a little better than it is.
% Needs \usepackage{booktabs}.
"""


def check_columns(columns: Sequence[str]) -> None:
    """Raise a ValueError that lists all columns if one does not exist."""
    for name in columns:
        if name not in NAMES:
            raise ValueError(f"there is no column {name!r}{closest(name, NAMES)}")


def write_paper_table(comparison: Comparison, path: Path, columns: Sequence[str] = DEFAULT) -> None:
    """Write the rows of a comparison, the best first, with a group of lines for each stream.

    Raises:
        ValueError: A column does not exist; the message lists all columns.
    """
    check_columns(columns)
    known = {column.title: column for column in COLUMNS}
    known["seeds"] = replace(known["seeds"], show=lambda entry: str(len(entry.seeds)))
    streams = by_stream(comparison.entries)
    kept = filled([known[name] for name in columns if name != "stream"], comparison.entries)
    titles = [_TITLES.get(column.title) or latex_text(column.title[:1].upper() + column.title[1:]) for column in kept]
    layout = "".join("r" if column.number else "l" for column in kept)
    lines = [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", " & ".join(titles) + r" \\"]
    for stream, entries in streams.items():
        lines.append(r"\midrule")
        if len(streams) > 1:
            lines.append(rf"\multicolumn{{{len(kept)}}}{{l}}{{\emph{{{latex_text(stream)}}}}} \\")
        shows = [_shown(column, entries) for column in kept]
        lines += [" & ".join(show(entry) for show in shows) + r" \\" for entry in entries]
    with output_file(path) as file:
        file.write(NOTE + "\n".join([*lines, r"\bottomrule", r"\end{tabular}", ""]))


def _shown(column: Column[Entry], entries: Sequence[Entry]) -> Callable[[Entry], str]:
    """Return a function that formats the column's cell of an entry, given all entries of its stream."""
    measure = _MEASURES.get(column.title)
    if measure is None:
        return lambda entry: latex_text(column.show(entry), column.number)
    best = (min if measure == "forgetting" else max)(entry.means[measure] for entry in entries)
    return partial(_figure, measure, best)


def _figure(measure: Measure, best: float, entry: Entry) -> str:
    mean, spread = entry.means[measure], entry.spreads[measure]
    text = percent(mean) if measure != "forgetting" or len(entry.curve) > 1 else ""
    if not text:
        return ""
    text += "" if spread is None else rf" $\pm$ {percent(spread)}"
    if mean == best:
        return rf"\textbf{{{text}}}"
    behind = entry.behind.get(measure)
    return text if behind is None or behind.clear else rf"{text}$^\dagger$"
