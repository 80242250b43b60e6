"""Parallel calls with joblib's backends: processes on this machine, a Dask cluster, or Ray."""

import os
import threading
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, Generic, TypeVar

import torch

from dulbe_peft.utils.extras import installed

T = TypeVar("T")
ENGINES = ("local", "dask", "ray")
_making = threading.Lock()


@dataclass(frozen=True)
class OncePerProcess(Generic[T]):
    """Calls `make` once per process and gives the result to all copies of this object. The result is not pickled."""

    make: Callable[[], T] = field(compare=False)
    key: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __call__(self) -> T:
        with _making:
            result: T = _made(self)
            return result


@lru_cache(maxsize=4)
def _made(once: OncePerProcess[object]) -> Any:
    return once.make()


def side_by_side(
    function: Callable[..., T], calls: Iterable[tuple[object, ...]], jobs: int, engine: str, address: str | None
) -> Iterator[T]:
    """Call a function with each tuple of arguments, in single-threaded workers; yields the results as they arrive.

    If a worker dies, Dask repeats its call; the other engines raise a `ChildProcessError`.
    """
    with installed(f"the engine {engine!r}"):
        from joblib import Parallel, delayed

        died = _deaths(engine)
    work = (delayed(function)(*arguments) for arguments in calls)
    with ExitStack() as stack:
        try:
            _start(stack, jobs, engine, address)
            if engine != "ray":
                yield from Parallel(batch_size=1, return_as="generator_unordered")(work)
                return
            with Parallel(batch_size=1) as pool:  # Ray only returns lists, so each list has one call per worker
                while part := list(islice(work, jobs)):
                    yield from pool(part)
        except died as error:
            raise ChildProcessError(f"a worker died, perhaps out of memory: choose fewer jobs ({error})") from error


def _deaths(engine: str) -> tuple[type[Exception], ...]:
    """Import an engine and return the errors that it raises if a worker has died."""
    if engine == "dask":
        from distributed.scheduler import KilledWorker

        return (KilledWorker,)
    if engine == "ray":
        from ray.exceptions import RayActorError, WorkerCrashedError

        return RayActorError, WorkerCrashedError
    return (BrokenProcessPool,)


def _start(stack: ExitStack, jobs: int, engine: str, address: str | None) -> None:
    """Let joblib use an engine until the stack is closed, on a running cluster or with workers on this machine."""
    from joblib import parallel_config

    if engine == "local":
        from joblib.externals.loky import get_reusable_executor

        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "A worker stopped while some jobs", UserWarning)  # a new worker starts
        # Otherwise idle workers live on for minutes, with their models in memory and in the folder they started in.
        stack.callback(lambda: get_reusable_executor().shutdown(kill_workers=True))
        stack.enter_context(parallel_config("loky", n_jobs=jobs, inner_max_num_threads=1))
        return
    if engine == "dask":
        from distributed import Client

        stack.enter_context(Client(address) if address else Client(n_workers=jobs, threads_per_worker=1))
    else:
        import ray
        from ray.util.joblib import register_ray

        register_ray()
        if not ray.is_initialized():
            ray.init(address=address, num_cpus=None if address else jobs)
            stack.callback(ray.shutdown)
    stack.enter_context(parallel_config(engine, n_jobs=jobs))


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def number_of_jobs(requested: int | None, address: str | None) -> int:
    """Return the number of parallel jobs: as many as requested, but on this machine at most one per core."""
    cores = available_cores()
    if not requested:
        return 1 if torch.accelerator.is_available() else cores  # several jobs would share the accelerator
    return requested if address else min(requested, cores)
