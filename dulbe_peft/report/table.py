"""One table in every form: aligned text, Markdown, CSV, LaTeX, and HTML through `assets/report/table.html`.

A table is a list of columns and a list of rows of any kind. A column says how it shows a row to people, and which
values of the row, in full, stand in a CSV file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from dulbe_peft.utils.files import replacing, write_csv

Row = TypeVar("Row")
_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{sign: f"{{{sign}}}" for sign in "<>|"},
}
_LATEX_NUMBER = str.maketrans({"±": r"$\pm$", "→": r"$\to$", "-": "$-$"})


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table."""

    title: str
    show: Callable[[Row], str] | None  # None: the column is in CSV files alone
    number: bool = True  # right-aligned
    meaning: str = ""
    short: str = ""  # the title in a terminal
    values: Mapping[str, Callable[[Row], Any]] = field(default_factory=dict)  # CSV column -> value; None: empty
    goodness: Callable[[Row], float | None] | None = None  # the best rows of a table are bold in this column


def filled(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[Column[Row]]:
    """The columns that show something in some row."""
    return [column for column in columns if column.show and any(map(column.show, rows))]


def best(
    columns: Sequence[Column[Row]], rows: Sequence[Row], group: Callable[[Row], Any] = lambda _: None
) -> list[list[bool]]:
    """Which cells that people read are the best of their column, among the rows of the same group."""
    found = [[False] * sum(column.show is not None for column in columns) for _ in rows]
    for place, column in enumerate(column for column in columns if column.show):
        values: dict[Any, dict[int, float]] = {}
        for number, row in enumerate(rows):
            value = None if column.goodness is None else column.goodness(row)
            if value is not None:
                values.setdefault(group(row), {})[number] = value
        for own in values.values():
            for number, value in own.items():
                found[number][place] = value == max(own.values()) > min(own.values())
    return found


def shown(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[list[str]]:
    """The cells that people read."""
    return [[column.show(row) for column in columns if column.show] for row in rows]


def format_text(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> str:
    """The table with spaces between aligned columns, for a terminal."""
    lines = [[column.short or column.title for column in columns if column.show], *shown(columns, rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    numbers = [column.number for column in columns if column.show]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(cells, widths, numbers, strict=True)
        ).rstrip()
        for cells in lines
    )


def format_markdown(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    titles = [column.title for column in columns if column.show]
    marks = ["---:" if column.number else "---" for column in columns if column.show]
    lines = [
        [f"**{cell}**" if bold else cell for cell, bold in zip(cells, marked, strict=True)]
        for cells, marked in zip(shown(columns, rows), best(columns, rows), strict=True)
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, marks, *lines))


def write_table_csv(columns: Sequence[Column[Row]], rows: Sequence[Row], path: Path) -> None:
    """Write the values of the columns in full."""
    values = {name: value for column in columns for name, value in column.values.items()}
    cells = [[value(row) for value in values.values()] for row in rows]
    write_csv(path, list(values), [["" if cell is None else cell for cell in line] for line in cells])


def write_table_latex(
    columns: Sequence[Column[Row]], rows: Sequence[Row], path: Path, group: Callable[[Row], Any] = lambda _: None
) -> None:
    """Write a LaTeX `tabular` that needs no package; the best figures of each group are bold."""
    numbers = [column.number for column in columns if column.show]
    layout = "".join("r" if number else "l" for number in numbers)
    titles = " & ".join(latex_text(column.title) for column in columns if column.show)
    lines = [rf"\begin{{tabular}}{{{layout}}}", r"\hline", rf"{titles} \\", r"\hline"]
    for cells, bold in zip(shown(columns, rows), best(columns, rows, group), strict=True):
        written = [
            rf"\textbf{{{text}}}" if top else text
            for cell, number, top in zip(cells, numbers, bold, strict=True)
            for text in [cell.translate(_LATEX_NUMBER) if number else latex_text(cell)]
        ]
        lines.append(" & ".join(written) + r" \\")
    with replacing(path) as temporary:
        temporary.write_text("\n".join([*lines, r"\hline", r"\end{tabular}", ""]), encoding="utf-8")


def latex_text(text: str) -> str:
    r"""A text that LaTeX prints as it is.

    >>> print(latex_text("50% of a_b"))
    50\% of a\_b
    """
    return "".join(_LATEX.get(sign, sign) for sign in text)
