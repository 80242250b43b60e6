"""The device that a learner works on, and torch's own settings while it works: gradients, types, random numbers."""

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
    """The device of a learner, "auto", "cpu" or an accelerator's type; joins the processes that a launcher started."""
    for kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        if os.environ.get(f"ACCELERATE_USE_{kind}", "").lower() == "true":
            raise ValueError(f"the launch shards the model ({kind}): dual-mode adapters need whole weights")
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name not in ("auto", "cpu") and (found is None or found.type != name):
        kind = "none" if found is None else found.type
        raise ValueError(f"device {name!r} was asked for, the accelerator of this machine is: {kind}")
    state = PartialState(cpu=name == "cpu")
    if state.num_processes > 1:
        return state.device
    # accelerate's own device is that of the first learner in this Python process.
    return torch.device("cpu") if name == "cpu" or found is None else found


def has_bfloat16(device: torch.device) -> bool:
    """Whether products of bfloat16 are the hardware's own: AVX512_BF16, AMX, or compute capability 8."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    say = getattr(torch.cpu, "get_capabilities", dict)  # an older torch does not say, and float32 is right anywhere
    known: dict[str, Any] = say() if device.type == "cpu" else {}
    # ATEN_CPU_CAPABILITY, a variable of torch's own, may keep the process from what the processor has.
    allowed = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return allowed and bool(known.get("avx512_bf16") or known.get("amx_bf16"))


def settled_precision(asked: str, learned: str | None, trains: bool, able: bool) -> Any:
    """What is asked for, else what a learner `learned` in, else bfloat16 where that is fast; a change is said."""
    if learned is None:
        return asked if asked != "auto" else "bfloat16" if able and not trains else "float32"
    found = asked if asked != "auto" else learned if able else "float32"
    if found != learned and world()[0] == 0:
        why = "is what there is here" if asked == "auto" else "is asked for"
        said = f"this learner learned in {learned}, and {found} {why}: its features are others from here on"
        print(f"dulbe-peft: {said}", file=sys.stderr)
    return found


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """A model in evaluation mode; afterwards each of its modules is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


@contextmanager
def one_thread() -> Iterator[None]:
    """Small products in one thread: several spin while they wait, many times as long where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """A context in which an enclosing autocast does not turn products on `tensor`'s device into half precision."""
    kind = tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


_dtype_lock = threading.Lock()
_dtype: list[Any] = [0, torch.float32]  # how many threads need float32 as default type, and what it was before them


@contextmanager
def usual_torch() -> Iterator[None]:
    """torch as a program finds it that has set nothing: gradients are on, tensors are float32, on the CPU, uncast."""
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
    """The default type is one for all threads, so the last one that leaves puts it back."""
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
    """Seed Python, numpy and torch while the block runs, so that a resumed task augments its images alike."""
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
