"""One table in every form: aligned text, Markdown, CSV, LaTeX, and HTML through `assets/report/table.html`.

A table is a list of columns and a list of rows of any kind. A column says how it shows a row to people, and which
values of the row, in full, stand in a CSV file.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from dulbe_peft.utils.files import output_file, write_rows

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
    show: Callable[[Row], str]
    number: bool = True  # right-aligned
    meaning: str = ""
    short: str = ""  # the title in a terminal
    values: Mapping[str, Callable[[Row], Any]] = field(default_factory=dict)  # CSV column -> value; None: empty
    bold: Callable[[Row], bool] | None = None  # whether a row's cell is bold


def tuple_columns(*titles: str, texts: int = 1) -> list[Column[Any]]:
    """The columns of rows that are tuples: the first so many are texts, and the others numbers; None is empty."""

    def shows(place: int) -> Callable[[Any], str]:
        return lambda row: "" if row[place] is None else str(row[place])

    return [Column(title, shows(place), number=place >= texts) for place, title in enumerate(titles)]


def filled(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[Column[Row]]:
    """The columns that show something in some row."""
    return [column for column in columns if any(map(column.show, rows))]


def bold_cells(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[list[bool]]:
    """Which cells that people read are bold."""
    return [[column.bold is not None and column.bold(row) for column in columns] for row in rows]


def shown(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> list[list[str]]:
    """The cells that people read."""
    return [[column.show(row) for column in columns] for row in rows]


def format_text(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> str:
    """The table with spaces between aligned columns, for a terminal."""
    lines = [[column.short or column.title for column in columns], *shown(columns, rows)]
    aligned = []
    for column, cells in zip(columns, zip(*lines, strict=True), strict=True):
        side, width = ">" if column.number else "<", max(map(len, cells))
        aligned.append([f"{cell:{side}{width}}" for cell in cells])
    return "\n".join("  ".join(cells).rstrip() for cells in zip(*aligned, strict=True))


def format_markdown(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    titles = [column.title for column in columns]
    marks = ["---:" if column.number else "---" for column in columns]
    lines = [
        [f"**{cell}**" if bold else cell for cell, bold in zip(cells, marked, strict=True)]
        for cells, marked in zip(shown(columns, rows), bold_cells(columns, rows), strict=True)
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, marks, *lines))


def write_table_csv(columns: Sequence[Column[Row]], rows: Sequence[Row], path: Path) -> None:
    """Write the values of the columns in full."""
    values = {name: value for column in columns for name, value in column.values.items()}
    with output_file(path) as file:
        write_rows(file, list(values), ([value(row) for value in values.values()] for row in rows))  # None: empty


def write_table_latex(columns: Sequence[Column[Row]], rows: Sequence[Row], path: Path) -> None:
    """Write a LaTeX `tabular` that needs no package."""
    layout = "".join("r" if column.number else "l" for column in columns)
    titles = " & ".join(latex_text(column.title) for column in columns)
    lines = [rf"\begin{{tabular}}{{{layout}}}", r"\hline", rf"{titles} \\", r"\hline"]
    for cells, bold in zip(shown(columns, rows), bold_cells(columns, rows), strict=True):
        pairs = zip(columns, cells, strict=True)
        texts = [cell.translate(_LATEX_NUMBER) if column.number else latex_text(cell) for column, cell in pairs]
        written = [rf"\textbf{{{text}}}" if top else text for text, top in zip(texts, bold, strict=True)]
        lines.append(" & ".join(written) + r" \\")
    with output_file(path) as file:
        file.write("\n".join([*lines, r"\hline", r"\end{tabular}", ""]))


def latex_text(text: str) -> str:
    """A text that LaTeX prints as it is."""
    return "".join(_LATEX.get(sign, sign) for sign in text)
