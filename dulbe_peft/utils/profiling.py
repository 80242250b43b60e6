"""Measure the wall-clock time of each phase of a task, and the peak memory."""

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


class Profile:
    """Seconds by phase since the last `clear`. Time in a nested phase is not counted for the outer phase."""

    clock = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.waiting: dict[str, float] = defaultdict(float)  # the part of `seconds` spent waiting for batches
        self._phases: list[str] = []
        self._since = 0.0

    def clear(self) -> None:
        """Discard the figures of the last task."""
        self.seconds.clear()
        self.waiting.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block for the phase `name`."""
        self._switch()
        self._phases.append(name)
        try:
            yield
        finally:
            self._switch()
            self._phases.pop()

    def _switch(self) -> None:
        now = self.clock()
        if self._phases:
            self.seconds[self._phases[-1]] += now - self._since
        self._since = now

    def batches(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches, and count the time until each one arrives as waiting."""
        started = time.perf_counter()
        for batch in batches:
            if self._phases:
                self.waiting[self._phases[-1]] += time.perf_counter() - started
            yield batch
            started = time.perf_counter()

    def table(self) -> str:
        """Return the figures as a table in plain text, with the phases in the order in which they began."""
        total = sum(self.seconds.values())
        lines = [f"{'phase':<10}{'seconds':>9}{'share':>8}{'waiting for images':>20}"]
        for name, seconds in self.seconds.items():
            lines.append(f"{name:<10}{seconds:9.2f}{seconds / total:8.0%}{self.waiting[name]:20.2f}")
        return "\n".join([*lines, f"{'total':<10}{total:9.2f}"])


def forget_peak_memory(device: torch.device) -> None:
    """Restart the measurement of `peak_memory`. This is only possible on CUDA devices."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes in use: by tensors on a CUDA device, otherwise by this process since its start.

    The result is None if the operating system does not say.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows has no such module
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
