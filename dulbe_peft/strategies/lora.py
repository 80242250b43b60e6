"""Plain LoRA, in the two ways in which it is used on a stream of tasks.

    lora           one pair (A, B) for all tasks; each task continues to train it
    merged_lora    a new pair for each task, merged into the weight when the task ends

Here P = A' and dW = B P'; both factors are trained.

Reference: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685, section 4.1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dulbe_peft.strategies.base import Modes, NewTask, Strategy


def uniform_bases(task: NewTask, bound: Callable[[str, int], float]) -> dict[str, torch.Tensor]:
    """Return layer name -> A', (d_in, r_S + r_R), uniform between -b and b with b = `bound(name, d_in)`."""
    generator, bases = task.generator(), {}
    for name, layer in task.layers.items():
        uniform = torch.rand(layer.in_features, task.rank(name), generator=generator)
        bases[name] = bound(name, layer.in_features) * (2 * uniform - 1)
    return bases


def kaiming_bases(task: NewTask) -> dict[str, torch.Tensor]:
    """Return layer name -> A', uniform between -1 / sqrt(d_in) and 1 / sqrt(d_in), as PEFT initialises LoRA's A."""
    return uniform_bases(task, lambda _, width: 1 / math.sqrt(width))


@dataclass(frozen=True)
class MergedLora(Strategy):
    """LoRA with a new pair for each task, merged when the task ends."""

    name = "merged_lora"
    trains_bases = True
    orthonormal = False

    def plan(self, task: NewTask) -> Modes | None:
        return task.modes(kaiming_bases(task))


@dataclass(frozen=True)
class Lora(MergedLora):
    """LoRA with one pair for all tasks."""

    name = "lora"
    folds = False

    def plan(self, task: NewTask) -> Modes | None:
        return None if task.index else super().plan(task)
