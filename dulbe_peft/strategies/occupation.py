"""Occupation statistics as a strategy's memory: S, the sum of X'X over the finished tasks, for every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from dulbe_peft.strategies.base import Memory, NewTask, Strategy
from dulbe_peft.subspaces.decompositions import to_float64
from dulbe_peft.subspaces.occupation import OccupationStatistics


def occupation(task: NewTask, inputs: OccupationStatistics) -> OccupationStatistics:
    """S of all finished tasks with the one that ends, S + X'X, exact or cut to 2 K_h directions as `args` asks."""
    old = task.memory if isinstance(task.memory, OccupationStatistics) else None
    if task.args.statistics == "sketch":
        kept = OccupationStatistics(max(1, 2 * task.adapter.active_config.support_rank))
        if old:
            kept.merge(old)
        kept.merge(inputs)
        return kept
    if old:
        inputs.merge(old)  # this way round the old sums stay as they are until the task is committed
    return inputs


@dataclass(frozen=True)
class OccupationStrategy(Strategy):
    """A strategy that remembers S: the inputs of every task's images, read by the model that has learned the task."""

    remembers_inputs = True
    remembers_more = True

    def remember(self, task: NewTask, inputs: OccupationStatistics) -> Memory:
        return occupation(task, inputs)

    def remember_more(self, task: NewTask, inputs: OccupationStatistics) -> Memory:
        """S + X'X of the further images."""
        return occupation(task, inputs)

    def check_memory(self, memory: Memory | None, widths: Mapping[str, int]) -> None:
        if not memory:
            return
        if not isinstance(memory, OccupationStatistics):
            raise ValueError(f"the file holds {sorted(memory)[:3]}, expected occupation statistics")
        rows = memory.sketch_rows
        for name, matrix in memory.items():
            width = widths.get(name)
            expected = None if width is None else (min(width, rows or width), width)
            if tuple(matrix.shape) != expected:
                found = "no such layer" if expected is None else expected
                raise ValueError(f"statistics of {name!r} have shape {tuple(matrix.shape)}, the model: {found}")
        if len(memory) != len(widths):
            raise ValueError(f"statistics are of {len(memory)} layers, the model has {len(widths)}")


def occupied(memory: Memory | None, name: str) -> torch.Tensor | None:
    """S of one layer in float64, (d_in, d_in), from a sketch F as F'F; None before the first task."""
    if not isinstance(memory, OccupationStatistics) or name not in memory:
        return None
    matrix = to_float64(memory[name], f"statistic of layer {name!r}")
    return matrix if len(matrix) == matrix.shape[1] else matrix.T @ matrix
