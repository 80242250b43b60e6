"""CL-LoRA: one shared pair in the lower blocks, a pair for each task in the upper ones, and an early exit between.

    lower blocks   W x + B A x           A random orthonormal, frozen, the same for all tasks; B trained on
    upper blocks   W x + mu_t B_t A_t x  A_t starts as such a matrix and is trained, and so is mu_t, from U(0.5, 1.5)

    loss = cross-entropy + similarity * mean over earlier tasks s of |cos(mu_s, mu_t)|
         + distillation * H(softmax(teacher / T), softmax(student / T))         from the second task on

Each upper layer has one mu_t; the penalty takes all of them as one vector. Teacher and student are logits at the early
exit, as in the published code: the tower ends after the lower blocks, with its own last norm and projection. The
teacher has B as the last task left it. The distillation reaches the lower B alone, and row i of its gradient is scaled
by d_out |B_old[i]| / sum over j of |B_old[j]|.

The update of an upper layer is merged with mu, and that of a lower one as it is. B then starts at 0 on the merged
weight, which is the same as training it on.

What differs:
- The paper keeps one branch a task through the upper blocks at test, and compares class c with its own task's branch.
  A merged model has one branch. Later tasks are trained on the weights with all earlier updates in them.
- The paper makes a step for the distillation, and then one for the rest. Here one step takes both gradients.
- The logits are those of the text classifier, and the distillation does not train the text tower. The paper's logits
  are those of a trained cosine classifier, which its distillation trains too.
- The paper adapts q and v; here mu has an entry for each adapted layer.

Reference: He et al., "CL-LoRA: Continual Low-Rank Adaptation for Rehearsal-Free Class-Incremental Learning",
arXiv 2505.24816; the weights 5 and 1e-4 and the temperature are those of the published code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional as F

from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.adapter.linear import Updates
from dulbe_peft.strategies.base import Memory, NewTask, Step, Strategy
from dulbe_peft.strategies.blocks import early_exit, lower_and_upper
from dulbe_peft.subspaces.modes import ModeBases
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.utils.checks import check_number

WEIGHTS = "block_weights"


@dataclass(frozen=True)
class ClLora(Strategy):
    """CL-LoRA, merged.

    Attributes:
        shared_blocks: the share of the blocks that have the shared pair, counted from the input, in [0, 1).
        distillation: weight of the distillation at the early exit; 0 leaves it out.
        temperature: T of the distillation.
        similarity: weight of the penalty on similar block weights.
    """

    shared_blocks: float = 0.5
    distillation: float = 5.0
    temperature: float = 2.0
    similarity: float = 1e-4

    name = "cl_lora"

    def __post_init__(self) -> None:
        for name in ("shared_blocks", "distillation", "similarity"):
            check_number(name, getattr(self, name), least=0)
        check_number("temperature", self.temperature, positive=True)
        if self.shared_blocks >= 1:
            raise ValueError(f"shared_blocks must be below 1, got {self.shared_blocks}")

    def plan(self, task: NewTask) -> dict[str, ModeBases]:
        layers, generator = task.layers, task.generator()
        lower, upper, _ = lower_and_upper(layers, self.shared_blocks)
        bases = {name: layers[name].dulbe_P[task.adapter_name] for name in lower}
        for name in upper if task.index else lower + upper:
            start = torch.rand(layers[name].in_features, sum(task.ranks), generator=generator)
            bases[name] = torch.linalg.qr(start).Q
        return task.modes(bases)

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[torch.Tensor]]:
        adapter, upper = task.adapter_name, self._upper(task)
        start = 0.5 + torch.rand(len(upper), generator=task.generator(salt=1))
        weights = start.to(next(iter(upper.values())).dulbe_P[adapter].device).requires_grad_()
        task.notes[WEIGHTS] = weights

        def weighted_pair(layer: DualModeLinear, index: int) -> Updates:
            return [(layer.dulbe_P[adapter], weights[index] * layer.current_up(adapter))]

        with ExitStack() as stack:
            stack.enter_context(task.adapter.held_weights())
            for index, layer in enumerate(upper.values()):
                pair = partial(weighted_pair, layer, index)
                stack.enter_context(layer.holding(layer.folded_weight(adapter).detach(), pair, modes=False))
            yield [*stack.enter_context(task.adapter.trained_bases(upper)), weights]

    def penalty(self, task: NewTask) -> torch.Tensor | None:
        if not isinstance(task.memory, dict):
            return None
        weights = task.notes[WEIGHTS]
        cosines = F.cosine_similarity(task.memory[WEIGHTS].to(weights), weights[None], dim=1)
        return self.similarity * cosines.abs().mean()

    def backward(self, task: NewTask, step: Step) -> None:
        super().backward(task, step)
        lower, _, count = lower_and_upper(task.layers, self.shared_blocks)
        if task.index and lower and self.distillation:
            with early_exit(task.adapter.model, lower[0], count):
                student = step.encode()
                with torch.no_grad(), task.adapter.previous_task():
                    teacher = step.encode()
            logits = [step.logit_scale * z @ step.text.detach().T / self.temperature for z in (student, teacher)]
            loss = -(logits[1].softmax(dim=1) * logits[0].log_softmax(dim=1)).sum(dim=1).mean()
            self._add_lower_gradients(self.distillation * loss, [task.layers[name] for name in lower], task)

    def finish(self, task: NewTask) -> None:
        for layer, weight in zip(self._upper(task).values(), task.notes[WEIGHTS], strict=True):
            layer.set_up_projections(task.adapter_name, weight * layer.current_up(task.adapter_name))

    def remember(self, task: NewTask, inputs: OccupationStatistics) -> Memory:
        row = task.notes[WEIGHTS].detach()[None]
        old = [task.memory[WEIGHTS].to(row)] if isinstance(task.memory, dict) else []
        return {WEIGHTS: torch.cat([*old, row])}

    def check_memory(self, memory: Memory | None, widths: Mapping[str, int]) -> None:
        if memory is None:
            return
        rows, upper = memory.get(WEIGHTS), len(lower_and_upper(widths, self.shared_blocks)[1])
        if rows is None or rows.ndim != 2 or rows.shape[1] != upper or not len(rows) or not rows.is_floating_point():
            found = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in [*memory.items()][:3]}
            raise ValueError(f"{WEIGHTS} must be float (tasks, {upper} upper layers), the file holds {found}")

    def _upper(self, task: NewTask) -> dict[str, DualModeLinear]:
        """The layers with a pair for each task."""
        layers = task.layers
        return {name: layers[name] for name in lower_and_upper(layers, self.shared_blocks)[1]}

    def _add_lower_gradients(self, loss: torch.Tensor, layers: list[DualModeLinear], task: NewTask) -> None:
        """Add the loss's gradients to those of the layers' B, row by row scaled by the B that the last task left."""
        adapter, rank = task.adapter_name, sum(task.ranks)
        ups = [[layer.dulbe_shared_B[adapter], layer.dulbe_residual_B[adapter]] for layer in layers]
        gradients = iter(torch.autograd.grad(loss, [up for pair in ups for up in pair]))
        for layer, pair in zip(layers, ups, strict=True):
            # All tasks have the same A, so the B of the last task is the sum of what they folded.
            scales = row_scales(layer.dulbe_history_B[adapter].unflatten(1, (-1, rank)).sum(dim=1))
            for up in pair:
                up.grad = next(gradients) * scales if up.grad is None else up.grad.add_(next(gradients) * scales)


def row_scales(old_up: torch.Tensor) -> torch.Tensor:
    """d_out |B_old[i]| / sum_j |B_old[j]|, (d_out, 1), of mean 1; all 1 where B_old, (d_out, r), is 0."""
    norms = old_up.norm(dim=1, keepdim=True)
    mean = norms.mean()
    return torch.where(mean > 0, norms / torch.where(mean > 0, mean, 1.0), 1.0)
