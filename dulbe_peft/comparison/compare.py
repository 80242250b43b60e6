"""A whole comparison: choose settings, run what is missing, write the table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dulbe_peft.comparison.cells import is_done, read_answers
from dulbe_peft.comparison.engine import BACKENDS, default_jobs, finish_cells
from dulbe_peft.comparison.plan import Cell, Plan, Row
from dulbe_peft.comparison.table import Entry, Scope, Table, make_table, refuse_others, write_table
from dulbe_peft.metrics.bootstrap import image_shares
from dulbe_peft.runs.setup import check_run_folder
from dulbe_peft.utils.checks import check_int
from dulbe_peft.utils.folders import check_outside_learners

Work = list[tuple[Cell, list[Row]]]


class ComparisonError(ValueError):
    """Some runs of a comparison failed; the others are finished and in the table."""


def compare(
    plan: Plan,
    output: str | Path,
    jobs: int | None = None,
    backend: str = "local",
    address: str | None = None,
    say: Callable[[str], None] = print,
) -> list[Entry]:
    """Run what is missing of a comparison, and write `comparison.json` and `comparison.csv`.

    Every stream is trained once for each method and seed, in a folder of its own. Every classifier then learns from
    the features that the run kept. So a classifier that is added later costs no training, and a comparison that was
    stopped goes on where it was.

    Args:
        plan: what `read_plan` returned.
        output: folder for everything.
        jobs: how many runs at once; None: one for each core, or one alone on an accelerator.
        backend: "local", "dask" or "ray".
        address: of a scheduler of dask or ray.
        say: told what is done.

    Returns:
        The rows of the table.

    Raises:
        ComparisonError: runs failed; the message has the first reason of each method.
        ValueError: a folder holds a run with other settings.
        FileExistsError: a file of somebody's lies where the table is to be written.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {list(BACKENDS)}, got {backend!r}")
    if jobs is not None:
        check_int("jobs", jobs, 1)
    output = Path(output).absolute()
    check_outside_learners(output, "write a comparison")
    refuse_others(output)
    for data in (*(settings["data"] for settings in plan.streams.values()), *plan.retentions.values()):
        check_run_folder(data, str(output))
    how = (output, jobs or default_jobs(), backend, address)
    chosen = _choose(plan, *how, say)
    cells = plan.cells(chosen)
    try:
        failed = _finish([(cell, plan.rows(cell.method)) for cell in cells], *how, say)
    finally:  # also of a comparison that is interrupted, a table says what is finished and what is missing
        entries = make_table(plan, output, cells)
        output.mkdir(parents=True, exist_ok=True)
        values = {f"{stream}: {method}": values for (stream, method), values in chosen.items()}
        write_table(Table(entries, values, Scope.of(plan)), output)
    if failed:
        raise ComparisonError(f"{len(failed)} of {len(cells)} runs failed; the first: {failed[0]}")
    return entries


def _finish(
    work: Work, output: Path, jobs: int, backend: str, address: str | None, say: Callable[[str], None]
) -> list[str]:
    """Finish what is missing; returns what failed, and why."""
    missing = [(cell, rows) for cell, rows in work if not is_done(cell, output, rows)]
    if missing:
        say(f"{len(missing)} of {len(work)} runs are to be finished, {jobs} at once")
    failed = []
    for count, (index, problem) in enumerate(finish_cells(missing, output, jobs, backend, address), 1):
        cell = missing[index][0]
        say(f"{count}/{len(missing)} {cell.folder}" + (f" failed: {problem}" if problem else ""))
        if problem:
            failed.append(f"{cell.folder}: {problem}")
    return failed


def _choose(
    plan: Plan, output: Path, jobs: int, backend: str, address: str | None, say: Callable[[str], None]
) -> dict[tuple[str, str], dict[str, Any]]:
    """The best settings of every method that has a choice, for each stream, on held-back training images."""
    trials = {(stream, method): plan.trials(stream, method) for stream in plan.streams for method in plan.choices}
    work = [(cell, [_judge(plan, cell.method)]) for tried in trials.values() for _, cell in tried]
    failed = _finish(work, output, jobs, backend, address, say)
    if failed:
        raise ComparisonError(f"{len(failed)} runs that choose settings failed; the first: {failed[0]}")
    chosen = {}
    for (stream, method), tried in trials.items():
        figures = [_accuracy(output, cell, _judge(plan, method)) for _, cell in tried]
        best = figures.index(max(figures))
        chosen[stream, method] = tried[best][0]
        listed = ", ".join(f"{values}: {100 * figure:.1f}" for (values, _), figure in zip(tried, figures, strict=True))
        say(f"{stream}, {method}: {tried[best][0]} is best on held-back training images ({listed})")
    return chosen


def _judge(plan: Plan, method: str) -> Row:
    """The row that settings are chosen by: the reference's classifier where the method has it."""
    rows = plan.rows(method)
    return next((row for row in reversed(rows) if row.classifier == plan.baseline.classifier), rows[-1])


def _accuracy(output: Path, cell: Cell, row: Row) -> float:
    answers, names, _ = read_answers(output / cell.folder, row)
    return float(image_shares(answers, names)[0].mean())
