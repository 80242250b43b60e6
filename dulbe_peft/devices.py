"""The device that a learner works on."""

from __future__ import annotations

import os

import torch
from accelerate import PartialState


def choose_device(name: str) -> torch.device:
    """The device of a learner; joins the processes that a launcher started.

    Args:
        name: "auto", "cpu", or an accelerator's type such as "cuda".

    Raises:
        ValueError: this machine has no such device, or the launch shards the model.
    """
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
