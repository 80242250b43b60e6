"""Choose the device and the precision that a learner works with."""

import os
import sys
from typing import Any

import torch
from accelerate import PartialState

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
    capabilities: dict[str, object] = query() if device.type == "cpu" else {}
    # The environment variable ATEN_CPU_CAPABILITY may forbid torch to use what the processor has.
    allowed = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return allowed and bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def choose_precision(requested: str, learned: str | None, trains: bool, able: bool) -> Any:
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
