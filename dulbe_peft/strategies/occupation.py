"""Strategies that remember the layer inputs of earlier tasks as occupation statistics S, the sum of X'X over tasks."""

from dataclasses import dataclass

import torch

from dulbe_peft.strategies.base import Memory, NewTask, Strategy
from dulbe_peft.subspaces.decompositions import to_float64
from dulbe_peft.subspaces.occupation import OccupationStatistics


def old_statistic(task: NewTask, name: str) -> torch.Tensor | None:
    """Return S of the finished tasks for a layer, (d_in, d_in) in float64; None before the first task is finished."""
    if not isinstance(task.memory, OccupationStatistics) or name not in task.memory:
        return None
    return to_float64(task.memory[name], f"statistics of layer {name!r}")


@dataclass(frozen=True)
class OccupationStrategy(Strategy):
    """Remembers S. The inputs of a task's images are measured with the model that has learned the task."""

    memory_kind = OccupationStatistics
    remembers_inputs = True
    remembers_more = True

    def remember(self, task: NewTask, inputs: OccupationStatistics) -> Memory:
        """Return S of the finished tasks plus X'X of this task."""
        if isinstance(task.memory, OccupationStatistics):
            inputs.merge(task.memory)  # in this direction, the old sums do not change before the task is committed
        return inputs
