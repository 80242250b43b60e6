"""Who does the work: processes of this machine, or several machines through an engine that joblib knows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dulbe_peft.comparison.cells import finish_cell
from dulbe_peft.comparison.plan import Cell, Row

BACKENDS = ("local", "dask", "ray")


def finish_cells(
    work: Sequence[tuple[Cell, Sequence[Row]]], output: Path, jobs: int, backend: str, address: str | None
) -> Iterator[tuple[int, str | None]]:
    """Finish cells side by side; yields the position of a cell in `work`, and None or why it failed.

    With several machines, all of them must see `output` under this path.
    """
    from joblib import Parallel, delayed

    threads = 1 if jobs > 1 or backend != "local" else None
    if backend == "local" and (jobs == 1 or len(work) == 1):
        for index, (cell, rows) in enumerate(work):
            yield index, finish_cell(cell, output, rows, threads)
        return
    with _engine(backend, jobs, address):
        calls = (delayed(_finish)(index, cell, output, rows, threads) for index, (cell, rows) in enumerate(work))
        # Ray hands out nothing before all is done.
        order = "list" if backend == "ray" else "generator_unordered"
        yield from Parallel(n_jobs=jobs, batch_size=1, return_as=order)(calls)


def _finish(index: int, *arguments: Any) -> tuple[int, str | None]:
    return index, finish_cell(*arguments)


@contextmanager
def _engine(backend: str, jobs: int, address: str | None) -> Iterator[None]:
    from joblib import parallel_config

    if backend == "local":
        with parallel_config("loky", n_jobs=jobs):
            yield
        return
    try:
        if backend == "dask":
            from distributed import Client

            where: dict[str, Any] = {"address": address} if address else {"n_workers": jobs, "threads_per_worker": 1}
            with Client(**where), parallel_config("dask", n_jobs=jobs):
                yield
            return
        import ray
        from ray.util.joblib import register_ray
    except ImportError as error:
        raise ImportError(f"--backend {backend} needs another package: pip install 'dulbe_peft[{backend}]'") from error
    running = ray.is_initialized()
    if not running:
        ray.init(address=address, num_cpus=None if address else jobs)
    register_ray()
    try:
        with parallel_config("ray", n_jobs=jobs):
            yield
    finally:
        if not running:
            ray.shutdown()


def default_jobs() -> int:
    """One cell for each core; one alone where they would share an accelerator."""
    import torch

    return 1 if torch.accelerator.is_available() else os.cpu_count() or 1
