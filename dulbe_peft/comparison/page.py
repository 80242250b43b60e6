"""A comparison as one HTML page, in the style of the report on runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dulbe_peft.comparison.figures import (
    MOST,
    compared,
    forest_figure,
    grouping,
    image_counts,
    important_rows,
    streams_figure,
)
from dulbe_peft.comparison.plan import Row
from dulbe_peft.comparison.table import (
    COLUMNS,
    TABLE_FILE,
    TEXT_COLUMNS,
    Entry,
    Table,
    cells,
    columns,
    counted,
    read_table,
    write_table_csv,
)
from dulbe_peft.metrics.accuracy import percent, signed
from dulbe_peft.report.figures import inline_svg
from dulbe_peft.report.page import render_page
from dulbe_peft.report.tables import flat, write_latex
from dulbe_peft.utils.files import replacing


def is_comparison(folder: str | os.PathLike[str]) -> bool:
    """Whether `dulbe-peft compare` has written its table into a folder."""
    return (Path(folder) / TABLE_FILE).is_file()


def write_comparison_page(
    folder: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    csv: str | os.PathLike[str] | None = None,
    latex: str | os.PathLike[str] | None = None,
) -> Path:
    """Write a page about a comparison, finished or not: a single file, as `write_report` makes it.

    Args:
        folder: where `compare` has written.
        output: the page; None: `report.html` in the folder.
        csv: where to write the table with full figures; None: nowhere.
        latex: where to write it as a LaTeX table; None: nowhere.

    Returns:
        The page's path.

    Raises:
        FileNotFoundError: the folder has no table of a comparison.
        ValueError: the table is not as `compare` writes it.
        OSError: a file cannot be written.
    """
    folder = Path(folder)
    output = folder / "report.html" if output is None else Path(output)
    table = read_table(folder)
    page = render_page("comparison.html", _view(table, folder.resolve().name))
    with replacing(output) as temporary:
        temporary.write_text(page, encoding="utf-8")
    if csv is not None:
        write_table_csv(table.entries, Path(csv))
    if latex is not None:
        titles, rows = columns(table.entries), [[entry.stream, *cells(entry)] for entry in table.entries]
        titles = ["stream", *titles]
        write_latex(Path(latex), titles, [row[: len(titles)] for row in rows], 1 + TEXT_COLUMNS)
    return output


def _view(table: Table, name: str) -> dict[str, Any]:
    """What the template shows."""
    scope, entries = table.scope, table.entries
    rows = important_rows(table)
    tested = {entry.stream for entry in entries}
    drawn = len(tested) > 1
    chosen = [
        (f"{stream}: {method}", _listed(table.chosen[f"{stream}: {method}"]), _listed(tried))
        for stream in scope.streams
        for method, tried in scope.choices.items()
        if f"{stream}: {method}" in table.chosen
    ]
    return {
        "name": name,
        "streams": [_stream(table, stream, number) for number, stream in enumerate(scope.streams)],
        "rows": len(scope.rows),
        "seeds": scope.seeds,
        "reference": scope.reference.title,
        "missing": _missing(table),
        "map": inline_svg(streams_figure(table, rows), "map") if drawn else "",
        "counts": image_counts(scope.streams),
        "shown": [row.title for row in rows],
        "several": grouping(table) if len(rows) < len(scope.rows) else "",
        "columns": [(column, COLUMNS[column]) for column in columns(entries)],
        "texts": TEXT_COLUMNS,
        "chosen": chosen,
        "settings": [(key, _listed(flat(values))) for key, values in (*scope.streams.items(), *scope.methods.items())],
    }


def _stream(table: Table, stream: str, number: int) -> dict[str, Any]:
    """What the template shows of a stream; `number` tells its picture from the others."""
    entries, reference = [entry for entry in table.entries if entry.stream == stream], table.scope.reference
    rows = compared(entries)
    return {
        "name": stream,
        "lead": lead(entries, reference),
        "seeds": counted(entries) if entries else "",
        "forest": inline_svg(forest_figure(rows), f"forest{number}") if rows else "",
        "most": MOST,
        "more": max(len(rows) - MOST, 0),
        "columns": columns(entries),
        "rows": [
            {"cells": cells(entry)[: len(columns(entries))], "reference": entry.row == reference} for entry in entries
        ],
    }


def lead(entries: Sequence[Entry], reference: Row) -> str:
    """Which row is best on a stream, and whether the test images and seeds tell it from the reference.

    Args:
        entries: of one stream.
        reference: the row that all others are compared with.
    """
    if not entries:
        return "Nothing is finished yet."
    first = next((entry for entry in entries if entry.row == reference), None)
    top = max(entry.means["last"] for entry in entries)
    if first is not None and first.means["last"] == top:
        others = compared(entries)
        worse = sum(found is not None and found.high < 0 for found in (entry.differences["last"] for entry in others))
        return (
            f"No row is better than the reference, {reference.title}. It names {percent(top)} % of the test images "
            f"right after the last task. {_number(worse)} of the {len(others)} others "
            f"{'is' if worse == 1 else 'are'} clearly worse."
        )
    best, *equal = [entry for entry in entries if entry.means["last"] == top]
    words = f"{best.row.title} names most test images right after the last task: {percent(top)} %."
    if equal:
        words += f" {_number(len(equal))} other{' has' if len(equal) == 1 else 's have'} the same accuracy."
    found = best.differences["last"]
    if found is None or first is None:
        return (
            f"{words} No seed is finished for both this row and the reference, {reference.title}. So nothing says "
            "which is better."
        )
    kind = "better" if found.mean > 0 else "worse"
    judgement = f"clearly {kind} than" if found.clear else "not distinguishable from"
    zero = "leaves out" if found.clear else "holds"
    return (
        f"{words} It is {judgement} the reference, {reference.title}, which has {percent(first.means['last'])} %: the "
        f"difference is {signed(found.mean)} percentage points, and its 95 % interval, {signed(found.low)} to "
        f"{signed(found.high)}, {zero} zero."
    )


def _number(number: int) -> str:
    return {0: "None", 1: "One"}.get(number, str(number))


def _missing(table: Table) -> list[dict[str, Any]]:
    """What is not finished, the rows of a method together where they lack the same seeds."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
    for stream, row, seeds in table.missing():
        drift = "" if row.drift == "none" else f" (drift {row.drift})"
        groups.setdefault((stream, row.method, seeds), []).append(row.classifier + drift)
    found = []
    for (stream, method, seeds), names in groups.items():
        whole = len(names) == sum(row.method == method for row in table.scope.rows)
        classifiers = "all" if whole else ", ".join(names)
        found.append({"stream": stream, "method": method, "classifiers": classifiers, "seeds": seeds})
    return found


def _listed(settings: dict[str, Any]) -> str:
    return "; ".join(
        f"{name} = {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for name, value in sorted(settings.items())
    )
