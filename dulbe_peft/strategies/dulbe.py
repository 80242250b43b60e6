"""DuLBE: a shared mode inside the occupied directions, residual modes outside them, and a loss for the shared mode.

Reference: the DuLBE paper, "Gradient-Demand Dual-Mode Subspace Allocation" and "Routed Cross-Modal Training".
"""

from dataclasses import dataclass
from typing import Literal

import torch

from dulbe_peft.adapter.gradients import routed_loss
from dulbe_peft.strategies.base import GRADIENTS, TEACHER, Modes, NewTask, Step
from dulbe_peft.strategies.losses import bidirectional_kl
from dulbe_peft.strategies.occupation import OccupationStrategy
from dulbe_peft.subspaces.allocation import allocate_modes


@dataclass(frozen=True)
class Dulbe(OccupationStrategy):
    """DuLBE. The weight and temperatures of its structure loss are fields of the adapter's configuration."""

    # "both" is an ablation in which the structure loss also trains the residual modes.
    routing: Literal["shared", "both"] = "shared"

    name = "dulbe"
    needs = frozenset({GRADIENTS, TEACHER})

    def plan(self, task: NewTask) -> Modes:
        return allocate_modes(task.gradients, task.memory, config=task.adapter.active_config)

    def loss(self, task: NewTask, step: Step) -> torch.Tensor:
        structure_loss, weight = self.structure_loss(task, step), task.adapter.active_config.structure_weight
        if self.routing == "both" and structure_loss is not None:
            # The structure loss uses fixed text embeddings, so it has gradients for the vision tower only.
            return step.task_loss + weight * structure_loss
        return routed_loss(task.adapter, step.task_loss, structure_loss, weight, step.gradient_scale)

    def structure_loss(self, task: NewTask, step: Step) -> torch.Tensor | None:
        """Return the bidirectional KL between teacher and student over the old classes; None for the first task."""
        config = task.adapter.active_config
        if step.old_text is None or config.structure_weight == 0:
            return None
        return bidirectional_kl(
            step.logit_scale * step.features @ step.old_text.T,
            step.logit_scale * step.teacher() @ step.old_text.T,
            config.class_temperature,
            config.instance_temperature,
            reduction=task.args.kl_reduction,
        )
