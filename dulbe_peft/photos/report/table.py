"""Format one table as aligned text, Markdown, LaTeX, or, through `assets/report/parts.html`, HTML.

A table is a list of columns and a list of rows of any type. Each column has a function that formats its cell of a row.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

from dulbe_peft.utils.files import output_file

Row = TypeVar("Row")
_LATEX = str.maketrans(
    {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    | {sign: f"\\{sign}" for sign in "&%$#_{}"}
    | {sign: f"{{{sign}}}" for sign in "<>|"}
)
_LATEX_NUMBER = str.maketrans({"±": r"$\pm$", "→": r"$\to$", "-": "$-$"})


@dataclass(frozen=True)
class Column(Generic[Row]):
    """A column of a table. `show` returns text; for a page, it may also return a `Share`, a float or pictures."""

    title: str
    show: Callable[[Row], Any]
    number: bool = True  # right-aligned
    wide: bool = False  # left out on a phone
    short: str = ""  # the title in a terminal
    bold: Callable[[Row], bool] | None = None  # whether a row's cell is bold


def tuple_columns(
    *titles: str, numbers: Collection[int] | None = None, wide: Collection[int] = ()
) -> list[Column[Any]]:
    """Return the columns of rows that are tuples.

    Columns at the places `numbers` are right-aligned, by default all but the first; those at the places `wide` are
    left out on a phone.
    """
    places = range(1, len(titles)) if numbers is None else numbers
    return [Column(title, itemgetter(place), place in places, place in wide) for place, title in enumerate(titles)]


def filled(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[Column[Row]]:
    """Return the columns that are not empty in every row."""
    return [column for column in columns if any(column.show(row) not in ("", None, []) for row in rows)]


def cells(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[list[tuple[Column[Row], Any, bool]]]:
    """Return (column, value, whether it is bold) for every cell, row by row."""
    return [[(col, col.show(row), col.bold is not None and col.bold(row)) for col in columns] for row in rows]


def format_text(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> str:
    """Return the table as text with aligned columns, for a terminal."""
    aligned = []
    for column in columns:
        texts = [column.short or column.title, *map(column.show, rows)]
        side, width = ">" if column.number else "<", max(map(len, texts))
        aligned.append([f"{text:{side}{width}}" for text in texts])
    return "\n".join("  ".join(line).rstrip() for line in zip(*aligned, strict=True))


def format_markdown(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> str:
    """Return the table in Markdown."""
    titles = [column.title for column in columns]
    marks = ["---:" if column.number else "---" for column in columns]
    lines = [[f"**{text}**" if bold else text for _, text, bold in row] for row in cells(columns, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (titles, marks, *lines))


def latex_text(text: str, number: bool = False) -> str:
    """Return text for LaTeX; in numbers, hyphens become minus signs."""
    return text.translate(_LATEX_NUMBER).replace("%", r"\%") if number else text.translate(_LATEX)


def write_table_latex(columns: Sequence[Column[Row]], rows: Sequence[Row], path: Path) -> None:
    """Write a LaTeX `tabular` that needs no package."""
    layout = "".join("r" if column.number else "l" for column in columns)
    titles = " & ".join(latex_text(column.title) for column in columns)
    lines = [rf"\begin{{tabular}}{{{layout}}}", r"\hline", rf"{titles} \\", r"\hline"]
    for row in cells(columns, rows):
        texts = [(latex_text(text, column.number), bold) for column, text, bold in row]
        lines.append(" & ".join(rf"\textbf{{{text}}}" if bold else text for text, bold in texts) + r" \\")
    with output_file(path) as file:
        file.write("\n".join([*lines, r"\hline", r"\end{tabular}", ""]))
