"""Set torch's modes, number of threads, types and random numbers while a block runs, and restore them afterwards."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode while the block runs, then restore the mode of each of its modules."""
    modes = [(module, module.training) for module in model.modules()]
    if any(training for _, training in modes):  # setting a mode takes ten times as long as reading it
        model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            if module.training != training:
                module.training = training


T = TypeVar("T")

_default_threads = threading.Lock()  # held while the number that new Python threads take is changed and set back


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread in the block, in this Python thread alone. Blocks of other Python threads may overlap.

    With small products, further threads only spin and wait, which takes many times as long if the cores are busy.
    Products round by the number.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    _use_threads(1)
    try:
        yield
    finally:
        _use_threads(before)


def _use_threads(number: int) -> None:
    """Let torch use this number of threads in this Python thread.

    `torch.set_num_threads` also sets the number that each new Python thread takes. Another thread sets that one back.
    """

    with _default_threads:
        default = _in_new_thread(torch.get_num_threads)
        torch.set_num_threads(number)
        _in_new_thread(lambda: torch.set_num_threads(default))


def _in_new_thread(call: Callable[[], T]) -> T:
    results = list[T]()
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Return a context that disables autocast on the device of `tensor`, so that products keep their precision."""
    kind = tensor.device.type
    # torch.compile of torch 2.11 cannot trace this call. All devices that it compiles for have autocast.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if available else nullcontext()


def keep_saved_activations() -> None:
    """Let `torch.compile` make graphs, from now on, in which two backward passes can follow one forward pass.

    By default the first backward pass may overwrite saved activations, so torch refuses a second one. There is no
    public setting for this.
    """
    from torch._functorch import config

    config.donated_buffer = False


keep_saved_activations._dynamo_marked_constant = True  # type: ignore[attr-defined] # runs when a graph is compiled


_dtype_lock = threading.Lock()
_dtype: list[Any] = [0, torch.float32]  # how many threads need float32 as the default, and the default before


@contextmanager
def default_torch_settings() -> Iterator[None]:
    """Use torch's default settings while the block runs: gradients on, float32, tensors on the CPU, no autocast."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(float32_by_default())
        yield


@contextmanager
def float32_by_default() -> Iterator[None]:
    """Make float32 the default dtype. All threads share the default, so the last thread to leave restores it."""
    with _dtype_lock:
        if not _dtype[0]:
            _dtype[1] = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)
        _dtype[0] += 1
    try:
        yield
    finally:
        with _dtype_lock:
            _dtype[0] -= 1
            if not _dtype[0]:
                torch.set_default_dtype(_dtype[1])


generators = threading.RLock()  # taken before the lock of a learner that is to train


@contextmanager
def seeded_randomness(*entropy: int) -> Iterator[None]:
    """Seed Python, NumPy and torch while the block runs, so that a resumed task draws the same augmentations.

    All threads share the generators, so blocks of different threads run one after the other.
    """
    seeds = [int(seed) for seed in np.random.SeedSequence(entropy).generate_state(3)]
    with generators, torch.random.fork_rng(range(torch.cuda.device_count())):
        python, array = random.getstate(), np.random.get_state()
        try:
            random.seed(seeds[0])
            np.random.seed(seeds[1])
            torch.manual_seed(seeds[2])
            yield
        finally:
            random.setstate(python)
            np.random.set_state(array)
