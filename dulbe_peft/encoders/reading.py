"""Read batches of images in worker processes, and show a progress bar."""

import os
import signal
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.data import decoding
from dulbe_peft.encoders.pixels import PixelDataset
from dulbe_peft.utils import processes

UNSHOWN = 5.0  # seconds until a pass over images shows its progress bar


def read_batches(
    images: PixelDataset, batches: list[list[int]], args: LearnerArguments, device: torch.device, title: str
) -> Iterator[Any]:
    """Yield the collated tuples of the data set for each batch of rows, and show a progress bar with `title`.

    Raises:
        ChildProcessError: If a process that reads images died.
    """
    # Not prepared by accelerate, which would keep every data set and its pixels until the process ends.
    loader: Any = DataLoader(images, batch_sampler=batches, **loader_settings(args, device, len(batches)))
    hidden = not args.progress or processes.world()[0] > 0
    # `disable=None` shows the bar only on a terminal.
    shown: dict[str, Any] = {"unit": " images", "delay": UNSHOWN, "leave": False, "disable": hidden or None}
    with tqdm(total=sum(map(len, batches)), desc=title, **shown) as bar:
        for number, batch in enumerate(_raise_plainly(loader)):
            yield batch
            bar.update(len(batches[number]))


def loader_settings(args: LearnerArguments, device: torch.device, batches: int) -> dict[str, Any]:
    """Return the arguments of a `DataLoader` that reads this many batches."""
    workers = min(args.num_workers, batches)  # more workers would have nothing to read
    processes.check_open_files(workers)
    decoding.decoding_lock()  # must be set here: the workers inherit it
    return {
        "num_workers": workers,
        "pin_memory": device.type == "cuda",
        "worker_init_fn": _leave_signals_to_the_main_process,
    }


def _leave_signals_to_the_main_process(_: int) -> None:
    """Make a worker ignore or obey signals quietly.

    A terminal or a scheduler signals every process, and an error from a worker would hide the signal.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


def _raise_plainly(batches: Iterable[object]) -> Iterator[object]:
    """Yield the batches, and raise an understandable error if a process that reads images dies."""
    try:
        yield from batches
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        raise ChildProcessError(
            f"a process that reads images died, perhaps because memory ran out ({error}): "
            "choose a smaller num_workers, or 0"
        ) from error
