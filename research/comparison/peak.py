"""Measure the largest memory that a process uses while a block runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Callable[[], int | None]]:
    """Yield a function that returns the peak since the block began, in bytes.

    On a GPU, it is the memory that PyTorch allocated there. On a CPU, it is the memory of the process, with its model,
    images and libraries, which Linux alone can measure from a given moment; elsewhere the function returns None.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield lambda: torch.cuda.max_memory_allocated(device)
        return
    try:
        _CLEAR.write_text("5", encoding="ascii")  # sets the peak to what the process uses now
    except OSError:
        yield lambda: None
        return
    yield _peak_of_process


def _peak_of_process() -> int | None:
    lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
    peaks = [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return peaks[0] if peaks else None
