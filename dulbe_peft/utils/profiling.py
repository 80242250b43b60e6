"""Where a task's time goes, by the clock on the wall, and how much memory it takes."""

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


class Profile:
    """Seconds by phase since the last `clear`; a phase inside another counts for itself alone."""

    clock = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.waiting: dict[str, float] = defaultdict(float)  # of these, until the next batch was there
        self._phases: list[str] = []
        self._since = 0.0

    def clear(self) -> None:
        """Forget the last task's figures."""
        self.seconds.clear()
        self.waiting.clear()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the block's seconds for `name`."""
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
        """The same batches; the time until each is there counts as waiting."""
        started = time.perf_counter()
        for batch in batches:
            if self._phases:
                self.waiting[self._phases[-1]] += time.perf_counter() - started
            yield batch
            started = time.perf_counter()

    def table(self) -> str:
        """The figures as lines of text, the phases in the order they came."""
        total = sum(self.seconds.values())
        lines = [f"{'phase':<10}{'seconds':>9}{'share':>8}{'waiting for images':>20}"]
        for name, seconds in self.seconds.items():
            lines.append(f"{name:<10}{seconds:9.2f}{seconds / total:8.0%}{self.waiting[name]:20.2f}")
        return "\n".join([*lines, f"{'total':<10}{total:9.2f}"])


def forget_peak_memory(device: torch.device) -> None:
    """Begin to measure `peak_memory` anew, where that is possible: on CUDA."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int | None:
    """Most bytes in use: of tensors on a CUDA device, elsewhere of this process since it began; None where unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows has no such module
        return None
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024
