"""Plain LoRA, in the three ways it is used on a stream of tasks.

    lora           one pair (A, B) for all tasks, trained on from task to task
    merged_lora    a new pair each task, merged into the weight when the task ends
    first_session  one pair, trained on the first task alone; later tasks teach the classifiers

Here P = A' and dW = B P'; both factors are trained.

Reference: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", arXiv 2106.09685, section 4.1. SLCA's base
learns so at a small rate; with LoRA as in its successor SLCA++, arXiv 2408.08295. Panos et al., "First Session
Adaptation: A Strong Replay-Free Baseline for Class-Incremental Learning", arXiv 2303.13199.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dulbe_peft.strategies.base import Modes, NewTask, Strategy


def uniform_bases(task: NewTask, bound: Callable[[str, int], float]) -> dict[str, torch.Tensor]:
    """Layer name -> A', (d_in, r_S + r_R), uniform within `bound(name, d_in)` of 0."""
    generator, bases = task.generator(), {}
    for name, layer in task.layers.items():
        uniform = torch.rand(layer.in_features, task.rank(name), generator=generator)
        bases[name] = bound(name, layer.in_features) * (2 * uniform - 1)
    return bases


def kaiming_bases(task: NewTask) -> dict[str, torch.Tensor]:
    """Layer name -> A', uniform within 1 / sqrt(d_in) of 0, as PEFT starts LoRA's A."""
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


@dataclass(frozen=True)
class Slca(Lora):
    """LoRA for all tasks, read through SLCA's classifier, which is aligned anew after each task."""

    name = "slca"
    classifiers = ("slca",)


@dataclass(frozen=True)
class FirstSession(Lora):
    """LoRA on the first task, both towers frozen afterwards."""

    name = "first_session"
    classifiers = ("lda",)

    def epochs(self, task: NewTask) -> int:
        return 0 if task.index else task.args.epochs
