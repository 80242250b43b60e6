"""Who does the work: processes of this machine, or several machines through an engine that joblib knows."""

import os
import threading
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch

from dulbe_peft.utils.extras import installed

T = TypeVar("T")
BACKENDS = ("local", "dask", "ray")
_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class OncePerProcess(Generic[T]):
    """What `make` returns, made once in each process for all copies of this object, which pickle as `make` does."""

    make: Callable[[], T] = field(compare=False)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __call__(self) -> T:
        with _one_at_a_time:
            found: T = _made(self)
            return found


@lru_cache(maxsize=4)
def _made(once: OncePerProcess[Any]) -> Any:
    return once.make()


def on_engine(
    function: Callable[..., T], calls: Iterable[tuple[Any, ...]], jobs: int, backend: str, address: str | None
) -> Iterator[tuple[int, T]]:
    """Call a function with each of some arguments, side by side; yields a call's number and result when it is done."""
    if backend == "ray":
        yield from _on_ray(function, calls, jobs, address)
        return
    with installed(f"the engine {backend!r}"):
        from joblib import Parallel, delayed, parallel_config

        if backend == "dask":
            from distributed import Client
    with ExitStack() as opened:
        if backend == "dask":
            where: dict[str, Any] = {"address": address} if address else {"n_workers": jobs, "threads_per_worker": 1}
            opened.enter_context(Client(**where))
        opened.enter_context(parallel_config("loky" if backend == "local" else backend, n_jobs=jobs))
        opened.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "A worker stopped while some jobs", UserWarning)  # loky starts another
        folder = os.getcwd() if backend == "local" else None  # loky's processes are kept, and stay where they began
        work = (delayed(_numbered)(number, function, arguments, folder) for number, arguments in enumerate(calls))
        yield from Parallel(n_jobs=jobs, batch_size=1, return_as="generator_unordered")(work)


def _numbered(
    number: int, function: Callable[..., T], arguments: tuple[Any, ...], folder: str | None = None
) -> tuple[int, T]:
    if folder is not None:
        os.chdir(folder)
    return number, function(*arguments)


def _on_ray(
    function: Callable[..., T], calls: Iterable[tuple[Any, ...]], jobs: int, address: str | None
) -> Iterator[tuple[int, T]]:
    """As tasks of Ray, which repeats the one of a worker that died; joblib's backend would repeat all."""
    with installed("the engine 'ray'"):
        import ray
    running: list[Any] = []
    mine = not ray.is_initialized()
    if mine:
        ray.init(address=address, num_cpus=None if address else jobs)
    try:
        numbered = ray.remote(num_cpus=1)(_numbered)
        for number, arguments in enumerate(calls):
            if len(running) == jobs:
                done, running = ray.wait(running)
                yield ray.get(done[0])
            running.append(numbered.remote(number, function, arguments))
        while running:
            done, running = ray.wait(running)
            yield ray.get(done[0])
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    finally:
        if mine:
            ray.shutdown()


def jobs_at_once(asked: int | None, address: str | None) -> int:
    """How many of the jobs that are asked for: without a cluster's address never more than there are cores here."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not asked:
        return 1 if torch.accelerator.is_available() else cores  # several would share the accelerator
    return asked if address else min(asked, cores)
