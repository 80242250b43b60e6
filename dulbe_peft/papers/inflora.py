"""InfLoRA: frozen bases along directions that the new task's inputs use and earlier tasks' inputs do not.

Before a task, with C = X'X of the new task's images at a layer and Z a basis of the layer's free directions:

    A_t = U_r' / sqrt(3)                      U_r: top r left singular vectors of Z Z' C
    W_t = W_0 + sum over i <= t of B_i A_i    B_t trained from 0, all else frozen

After the task, C is recomputed with the trained model. DualGPM then occupies the directions of highest energy until
they hold a share eps_t of the sum of squared singular values of C; t counts from 0, and T is the number of tasks:

    eps_t = energy + (final_energy - energy) t / T

After the first task, one direction fewer is occupied, as in the authors' code.

The left singular vectors of Z Z' C are the eigenvectors of Z Z' C C Z Z', so the energy matrix is K = C C. Layers
that read the same tensor share C, A and the memory.

Reference: Liang and Li, "InfLoRA: Interference-Free Low-Rank Adaptation for Continual Learning", arXiv 2404.00228.
"""

import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le

from dulbe_peft.papers.projection_memory import ProjectionMemoryStrategy, Subspace, gpm, top_directions
from dulbe_peft.strategies.base import INPUTS, Memory, Modes, NewTask
from dulbe_peft.subspaces.decompositions import to_float64
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.utils.records import Fraction

TASKS = 10  # T if it is not known


@dataclass(frozen=True)
class InfLora(ProjectionMemoryStrategy):
    """Take bases from the new task's inputs, outside the directions that DualGPM keeps for earlier tasks."""

    energy: Annotated[float, Gt(0), Le(1)] = 0.95  # called lamb in the published code, which uses 0.95 to 0.98
    final_energy: Fraction = 1.0  # called lame in the published code; with 1, no direction is free after T tasks
    tasks: Annotated[int, Ge(1)] | Literal["auto"] = "auto"  # T; auto: of the stream of `run`, or 10 without a stream

    name = "inflora"
    needs = frozenset({INPUTS})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.energy > self.final_energy:
            raise ValueError(f"energy must be at most final_energy = {self.final_energy}, got {self.energy}")

    def threshold(self, task: NewTask) -> float:
        """Return eps_t of a task."""
        total = (task.planned or TASKS) if self.tasks == "auto" else self.tasks
        return self.energy + (self.final_energy - self.energy) * min(1.0, task.index / total)

    def plan(self, task: NewTask) -> Modes:
        bases: dict[str, torch.Tensor] = {}
        short = {}  # layer -> number of free directions, if fewer than the rank
        for names, old, energy in self._occupied_and_used(task, task.inputs):
            rank = max(map(task.rank, names))
            if old.free < rank:
                short[names[0]] = old.free
            directions = top_directions(old, energy, rank, f"inputs of layer {names[0]!r}")
            bases.update(dict.fromkeys(names, directions / math.sqrt(3)))
        if short:
            layer = min(short, key=lambda name: short[name])
            warnings.warn(
                f"inflora: in task {task.index + 1}, {len(short)} inputs of layers have fewer free directions than "
                f"the rank asks for (layer {layer!r}: {short[layer]} of {task.rank(layer)}), so little or nothing is "
                "trained there: set a lower energy or final_energy, or tasks=N for a stream of N tasks",
                stacklevel=2,
            )
        return task.modes(bases)

    def remember(self, task: NewTask, inputs: OccupationStatistics) -> Memory:
        share, after = self.threshold(task), {}
        kept = bool(task.memory)
        for names, old, energy in self._occupied_and_used(task, inputs):
            after[names] = gpm(old, energy, share, f"inputs of layer {names[0]!r}", dual=True, one_less=not kept)
        return self.to_memory(after)

    def _occupied_and_used(
        self, task: NewTask, inputs: OccupationStatistics
    ) -> Iterator[tuple[tuple[str, ...], Subspace, torch.Tensor]]:
        """Yield each group of layers that share an input, with its occupied subspace and K = C C in float64."""
        kept = self.from_memory(task.memory)
        for names in inputs.groups:
            moment = to_float64(inputs[names[0]], f"inputs of layer {names[0]!r}")
            yield names, kept.get(names[0]) or Subspace(torch.zeros(len(moment), 0)), moment @ moment
