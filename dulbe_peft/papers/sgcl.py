"""SGCL: soft targets and distillation follow the similarity between the names of the classes.

    s_k  = softmax over all seen classes k of softness * e_y . e_k                    y: the image's class
    t_j  = tau z_old . e_j + m if j is the old class nearest to y, else - m           m = max over old j of e_y . e_j
    loss = cross-entropy over the current classes
         + soft_weight * KL(s || softmax over all seen classes k of tau z . e_k)
         + distillation * T^2 KL(softmax(t / T) || softmax over old classes j of tau z . e_j / T)    from task 2 on

z_old is the feature of the model before the task. The embeddings e in s and m are those at the start of the task.

Reference: Yu et al., "Exploiting the Semantic Knowledge of Pre-trained Text-Encoders for Continual Learning", arXiv
2408.01076, and the authors' public code, which is the source of the weights, the softness 13 and the temperature 4.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from dulbe_peft.strategies.base import TEACHER, NewTask, Step
from dulbe_peft.strategies.lora import Lora
from dulbe_peft.utils.settings import Positive, Weight

START = "start_text"


def guided(logits: torch.Tensor, target_text: torch.Tensor, old_text: torch.Tensor) -> torch.Tensor:
    """Return t, (n, old classes): the teacher's logits plus m at the old class nearest to the target, else minus m."""
    near, place = (target_text @ old_text.T).max(dim=1, keepdim=True)
    return logits - near + 2 * near * F.one_hot(place[:, 0], len(old_text))


@dataclass(frozen=True)
class Sgcl(Lora):
    """Train LoRA with SGCL's losses, without stored images."""

    soft_weight: Weight = 0.5
    softness: Positive = 13.0
    distillation: Weight = 0.5
    temperature: Positive = 4.0

    name = "sgcl"
    needs = frozenset({TEACHER})

    def loss(self, task: NewTask, step: Step) -> torch.Tensor:
        old = step.old_text if step.old_text is not None else step.text.new_zeros(0, step.text.shape[1])
        start = task.notes.setdefault(START, step.text.detach().clone())
        target_text, scale = start[step.labels], step.logit_scale
        targets = (self.softness * target_text @ torch.cat([old, start]).T).softmax(dim=1)
        predicted = (scale * step.features @ torch.cat([old, step.text]).T).log_softmax(dim=1)
        loss = step.task_loss + self.soft_weight * F.kl_div(predicted, targets, reduction="batchmean")
        if len(old):
            teacher = guided(scale * step.teacher() @ old.T, target_text, old) / self.temperature
            student = scale * step.features @ old.T / self.temperature
            divergence = F.kl_div(student.log_softmax(dim=1), teacher.softmax(dim=1), reduction="batchmean")
            loss = loss + self.distillation * self.temperature**2 * divergence
        return loss
