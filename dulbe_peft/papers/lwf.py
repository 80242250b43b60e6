"""LwF: the scores of new images for the old classes stay as they were before the task.

    loss = cross-entropy over the current classes
         - weight * mean over images of sum over old classes j of q_j log p_j            from task 2 on
    q    = softmax over old classes j of tau z_old . e_j / T,    p = the same with the feature z in training

z_old and the embeddings e_j of the old classes' names come from the model before the task.

Reference: Li and Hoiem, "Learning without Forgetting", arXiv 1606.09282, equations 2 to 4, with weight 1 and T = 2.
"""

from dataclasses import dataclass

import torch

from dulbe_peft.strategies.base import TEACHER, NewTask, Step
from dulbe_peft.strategies.lora import Lora
from dulbe_peft.utils.settings import Positive, Weight


@dataclass(frozen=True)
class Lwf(Lora):
    """Train LoRA with LwF's loss on the names of the old classes."""

    weight: Weight = 1.0
    temperature: Positive = 2.0

    name = "lwf"
    needs = frozenset({TEACHER})

    def loss(self, task: NewTask, step: Step) -> torch.Tensor:
        if step.old_text is None:
            return step.task_loss
        scores = step.logit_scale / self.temperature * step.old_text.T
        kept = (step.teacher() @ scores).softmax(dim=1)
        return step.task_loss - self.weight * (kept * (step.features @ scores).log_softmax(dim=1)).sum(dim=1).mean()
