"""The device that a learner works on, and torch's settings while it works: gradients, dtypes, random numbers."""

import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from torch import nn

from dulbe_peft.utils.processes import world


def choose_device(name: str) -> torch.device:
    """Return the device named "auto", "cpu" or after an accelerator type, and join the processes of a launcher."""
    for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{kind}", "").lower() == "true":
            raise ValueError(f"the launcher shards the model ({kind}), but dual-mode adapters need whole weights")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name not in ("auto", "cpu") and (accelerator is None or accelerator.type != name):
        available = "no accelerator" if accelerator is None else f"only the accelerator {accelerator.type!r}"
        raise ValueError(f"device {name!r} was requested, but this machine has {available}")
    state = PartialState(cpu=name == "cpu")
    if state.num_processes > 1:
        return state.device
    # accelerate would return the device that the first learner in this Python process chose.
    return torch.device("cpu") if name == "cpu" or accelerator is None else accelerator


def has_bfloat16(device: torch.device) -> bool:
    """Return whether the hardware multiplies bfloat16 natively: AVX512_BF16, AMX, or compute capability 8."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    query = getattr(torch.cpu, "get_capabilities", dict)  # missing in older versions of torch; then float32 is used
    capabilities: dict[str, Any] = query() if device.type == "cpu" else {}
    # The environment variable ATEN_CPU_CAPABILITY may forbid torch to use what the processor has.
    allowed = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return allowed and bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def settled_precision(requested: str, learned: str | None, trains: bool, able: bool) -> Any:
    """Choose the precision: the requested one, or the one that a learner `learned` in, or bfloat16 if that is fast.

    `able` says whether the hardware has bfloat16, and `trains` whether the model is trained. If the precision of a
    learner changes, a message says so.
    """
    if learned is None:
        return requested if requested != "auto" else "bfloat16" if able and not trains else "float32"
    precision = requested if requested != "auto" else learned if able else "float32"
    if precision != learned and world()[0] == 0:
        why = f"this machine uses {precision}" if requested == "auto" else f"{precision} was requested"
        message = f"this learner learned in {learned}, but {why}: its features differ from now on"
        print(f"dulbe-peft: {message}", file=sys.stderr)
    return precision


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode while the block runs, then restore the mode of each of its modules."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread while the block runs.

    With small products, further threads only spin and wait, which takes many times as long if the cores are busy.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context that disables autocast on the device of `tensor`, so that products keep their precision."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


_dtype_lock = threading.Lock()
_dtype: list[Any] = [0, torch.float32]  # how many threads need float32 as the default, and the default before


@contextmanager
def usual_torch() -> Iterator[None]:
    """Use torch's default settings while the block runs: gradients on, float32, tensors on the CPU, no autocast."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_float32_by_default())
        yield


@contextmanager
def _float32_by_default() -> Iterator[None]:
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


@contextmanager
def own_randomness(*entropy: int) -> Iterator[None]:
    """Seed Python, NumPy and torch while the block runs, so that a resumed task draws the same augmentations."""
    python, array = random.getstate(), np.random.get_state()
    seeds = [int(seed) for seed in np.random.SeedSequence(entropy).generate_state(3)]
    try:
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            random.seed(seeds[0])
            np.random.seed(seeds[1])
            torch.manual_seed(seeds[2])
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
