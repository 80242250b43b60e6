"""Run a whole comparison: choose settings, run the missing cells, and write the table."""

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path

from filelock import FileLock

from dulbe_peft.utils.folders import check_outside_saved, check_replaceable
from dulbe_peft.utils.records import write_record
from dulbe_peft.utils.settings import check_int
from dulbe_peft.utils.terminal import counted
from dulbe_peft.utils.workers import ENGINES, number_of_jobs, side_by_side
from research.comparison.cells import LOCK_FILE, TAKEN, finish_cell, is_done
from research.comparison.comparison_file import COMPARISON_FILE, CSV_FILE, Comparison, Entry
from research.comparison.intervals import mean_share
from research.comparison.plan import Chosen, Plan, Work, as_text
from research.comparison.summary import gains_of_training, make_entries, read_finished, read_row, write_summary_csv


class ComparisonError(ValueError):
    """Raised if some runs of a comparison failed. The other runs are finished, and the table contains them."""


def compare(
    plan: Plan,
    output: str | Path,
    jobs: int | None = None,
    backend: str = "local",
    address: str | None = None,
    log: Callable[[str], None] = print,
) -> list[Entry]:
    """Run the missing cells of a comparison, and write `comparison.json` and `comparison.csv`.

    Each stream is trained once for each method and seed. All classifiers then learn from the features that the run
    kept. A failed run does not stop the others: the table contains the finished runs, and the error gives the first
    failure. A run that another process is doing is left to it.

    Raises:
        ValueError: A finished run in `output` has other settings or images than the plan. Nothing is run or written.
        ComparisonError: Some runs failed.
    """
    if backend not in ENGINES:
        raise ValueError(f"backend must be one of {list(ENGINES)}, got {backend!r}")
    if address is not None and backend == "local":
        raise ValueError(f"address {address!r} has no effect with the backend 'local': choose dask or ray")
    if jobs is not None:
        check_int("jobs", jobs, 1)
    output = Path(output).absolute()
    check_outside_saved(output, "write a comparison")
    check_replaceable([output / COMPARISON_FILE, output / CSV_FILE], Comparison)
    run = partial(run_missing, output, number_of_jobs(jobs, address), backend, address, log)
    tried = plan.trials()
    _missing(output, [*tried, *plan.cells({})])  # refuses a changed setting before hours of trials
    failed, taken = run(tried)
    if taken:  # the choice must not depend on which of two processes tried a setting
        log(f"waiting for another process, which is trying {counted(len(taken), 'setting')}")
        failed += run(taken, wait=True)[0]
    chosen = _choose(plan, tried, output, log)
    work = plan.cells(chosen)
    _missing(output, work)
    try:
        more, taken = run(work)
        failed += more
        if taken:
            log(f"another process is doing {counted(len(taken), 'run')}: repeat the command for the whole table")
    finally:  # after an interruption, too, the table shows what is finished and what is missing
        output.mkdir(parents=True, exist_ok=True)
        with FileLock(output / LOCK_FILE):  # of two processes, the last to end has the most complete table
            finished = read_finished(output, work)
            entries = make_entries(plan, finished, chosen)
            gains = gains_of_training(plan, finished, entries)
            write_record(output / COMPARISON_FILE, Comparison(entries=entries, scope=plan, gains=gains))
            write_summary_csv(output / CSV_FILE, entries)
    if failed:
        raise ComparisonError(f"{len(failed)} of {len(tried) + len(work)} runs failed; the first one: {failed[0]}")
    return entries


def _missing(output: Path, work: Work) -> Work:
    """Return the cells that are not complete; raise a ValueError if a finished one has other settings or images."""
    return [(cell, rows) for cell, rows in work if not is_done(cell, output, rows)]


def run_missing(
    output: Path,
    jobs: int,
    backend: str,
    address: str | None,
    log: Callable[[str], None],
    work: Work,
    wait: bool = False,
) -> tuple[list[str], Work]:
    """Run the missing cells. Return a message for each cell that failed, and the cells that another process runs.

    With `wait`, wait for the other process, and run what it has not finished.
    """
    missing = _missing(output, work)
    if not missing:  # do not start an engine for nothing: it takes long
        return [], []
    log(f"{len(missing)} of {len(work)} runs are not finished; running {jobs} at once")
    threads = 1 if jobs > 1 or backend != "local" else None
    calls = [(cell, output, rows, threads, wait) for cell, rows in missing]
    done = side_by_side(finish_cell, calls, jobs, backend, address)  # all machines must share the folder `output`
    if backend == "local" and (jobs == 1 or len(calls) == 1):
        done = (finish_cell(*call) for call in calls)
    failed, taken = [], set()
    for count, (folder, problem) in enumerate(done, 1):
        if problem == TAKEN:
            taken.add(folder)
        elif problem:
            failed.append(f"{folder}: {problem}")
        ending = {None: "", TAKEN: f" skipped: {TAKEN}"}.get(problem, f" failed: {problem}")
        log(f"{count}/{len(missing)} {folder}{ending}")
    return failed, [(cell, rows) for cell, rows in missing if cell.folder in taken]


def _choose(plan: Plan, work: Work, output: Path, log: Callable[[str], None]) -> Chosen:
    """Return, for each stream and row, the settings that scored best on held-out training images."""
    chosen: Chosen = {}
    for stream, method in itertools.product(plan.streams, plan.choices):
        best_for: dict[str, list[str]] = {}
        trials = [cell for cell, _ in work if (cell.stream, cell.method) == (stream, method)]
        for row in plan.rows_of(method):
            tried = ((read_row(output / cell.folder, row, cell), cell) for cell in trials)
            scores = [(mean_share(read.shares["last"]), cell.settings) for read, cell in tried if read is not None]
            if scores:  # otherwise the row needs text and the model has no text tower, or its runs failed
                best = max(scores, key=lambda pair: pair[0])[1]
                chosen[stream, row] = {name: best[name] for name in plan.choices[method]}
                best_for.setdefault(as_text(chosen[stream, row]), []).append(row.title.removeprefix(f"{method} with "))
        for values, names in best_for.items():
            log(f"{stream}, {method}: {values} scored best on held-out training images for {'; '.join(names)}")
    return chosen
