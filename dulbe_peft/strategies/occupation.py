"""A strategy's memory of earlier tasks' layer inputs: the occupation statistics S, the sum of X'X over the tasks."""

from dataclasses import dataclass

import torch

from dulbe_peft.strategies.base import Memory, NewTask, Strategy
from dulbe_peft.subspaces.decompositions import to_float64
from dulbe_peft.subspaces.occupation import OccupationStatistics


def old_statistic(task: NewTask, name: str) -> torch.Tensor | None:
    """S of the finished tasks at one layer, (d_in, d_in) in float64; None before the first."""
    if not isinstance(task.memory, OccupationStatistics) or name not in task.memory:
        return None
    return to_float64(task.memory[name], f"statistics of layer {name!r}")


@dataclass(frozen=True)
class OccupationStrategy(Strategy):
    """Remembers S: the inputs of every task's images, read by the model that has learned the task."""

    remembers_inputs = True
    remembers_more = True

    def remember(self, task: NewTask, inputs: OccupationStatistics) -> Memory:
        """S of the finished tasks + X'X."""
        if isinstance(task.memory, OccupationStatistics):
            inputs.merge(task.memory)  # this way round the old sums stay as they are until the task is committed
        return inputs
