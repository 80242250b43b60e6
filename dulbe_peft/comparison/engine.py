"""The runs of a comparison, side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from dulbe_peft.comparison.cells import finish_cell
from dulbe_peft.comparison.plan import Cell, Row
from dulbe_peft.utils.engines import on_engine


def finish_cells(
    work: Sequence[tuple[Cell, Sequence[Row]]], output: Path, jobs: int, backend: str, address: str | None
) -> Iterator[tuple[int, str | None]]:
    """Finish cells side by side; yields the position of a cell in `work`, and None or why it failed.

    With several machines, all of them must see `output` under this path.
    """
    threads = 1 if jobs > 1 or backend != "local" else None
    calls = [(cell, output, rows, threads) for cell, rows in work]
    if backend == "local" and (jobs == 1 or len(work) == 1):
        yield from ((index, finish_cell(*call)) for index, call in enumerate(calls))
    else:
        yield from on_engine(finish_cell, calls, jobs, backend, address)
