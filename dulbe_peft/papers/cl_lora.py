"""CL-LoRA: one shared pair in the lower blocks, a pair per task in the upper blocks, and an early exit between them.

    lower blocks   W x + B A x           A: random orthonormal, frozen, the same for all tasks; B: trained in all tasks
    upper blocks   W x + mu_t B_t A_t x  A_t (random orthonormal at first), B_t and mu_t (from U(0.5, 1.5)): trained

    loss = cross-entropy + similarity * mean over earlier tasks s of |cos(mu_s, mu_t)|
         + distillation * H(softmax(teacher / T), softmax(student / T))         from the second task on

Each upper layer has one mu_t; the penalty treats all of them as one vector. Teacher and student are the logits at the
early exit, as in the published code: the tower is cut after the lower blocks, and its final norm and projection are
applied. The teacher uses B as the previous task left it. The distillation trains only the lower B, and row i of its
gradient is scaled by d_out |B_old[i]| / sum over j of |B_old[j]|. After each task the update, mu_t B_t A_t in
upper layers, is merged into the weight.

Reference: He et al., "CL-LoRA: Continual Low-Rank Adaptation for Rehearsal-Free Class-Incremental Learning",
arXiv 2505.24816; the weights 5 and 1e-4 and the temperature are those of the published code.
"""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge, Lt
from torch import nn
from torch.nn import functional as F

from dulbe_peft.adapter.base import temporarily
from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.adapter.linear import Updates, dense
from dulbe_peft.strategies.base import Memory, Modes, NewTask, Step, Strategy, replaced_modes
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.utils.settings import Positive, Weight

WEIGHTS = "block_weights"


def block_of(name: str) -> int:
    """Return the block number in a layer's dotted name, or -1 if it has none."""
    return next((int(part) for part in name.split(".") if part.isdigit()), -1)


def lower_and_upper(names: Iterable[str], share: float) -> tuple[list[str], list[str], int]:
    """Split layers into those of the first `share` of blocks and the rest; also return the number of these blocks."""
    blocks = {name: block_of(name) for name in names}
    count = int(share * (1 + max(blocks.values(), default=-1)))
    lower = [name for name, block in blocks.items() if 0 <= block < count]
    return lower, [name for name in blocks if name not in lower], count


def early_exit(model: nn.Module, name: str, count: int) -> AbstractContextManager[None]:
    """Cut the tower that contains the layer `name` after `count` blocks; its final norm and projection still apply."""
    path, _, attribute = name[: name.index(f".{block_of(name)}.")].rpartition(".")
    parent = model.get_submodule(path)
    return temporarily(parent, attribute, getattr(parent, attribute)[:count])


def row_scales(old_up: torch.Tensor) -> torch.Tensor:
    """Return d_out |B_old[i]| / sum_j |B_old[j]|, (d_out, 1), with mean 1; all are 1 if B_old, (d_out, r), is 0."""
    norms = old_up.norm(dim=1, keepdim=True)
    mean = norms.mean()
    return torch.where(mean > 0, norms / torch.where(mean > 0, mean, 1.0), 1.0)


@dataclass(frozen=True)
class ClLora(Strategy):
    """CL-LoRA, whose update is merged into the weights after each task."""

    shared_blocks: Annotated[float, Ge(0), Lt(1)] = 0.5  # share of the blocks, from the input, with the shared pair
    distillation: Weight = 5.0
    temperature: Positive = 2.0
    similarity: Weight = 1e-4

    name = "cl_lora"
    memory_kind = dict

    def plan(self, task: NewTask) -> Modes:
        layers, generator = task.layers, task.generator()
        lower, upper, _ = lower_and_upper(layers, self.shared_blocks)
        bases = {name: layers[name].dulbe_P[task.adapter_name] for name in lower}
        for name in upper if task.index else lower + upper:
            start = torch.rand(layers[name].in_features, task.rank(name), generator=generator)
            bases[name] = torch.linalg.qr(start).Q
        return task.modes(bases)

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[torch.Tensor]]:
        adapter, upper = task.adapter_name, self._upper(task)
        start = 0.5 + torch.rand(len(upper), generator=task.generator(salt=1))
        task.notes[WEIGHTS] = start.to(next(iter(upper.values())).dulbe_P[adapter].device).requires_grad_()
        weights, places = task.notes[WEIGHTS], {name: index for index, name in enumerate(upper)}

        def weighted_pair(name: str) -> Updates:
            return [(upper[name].dulbe_P[adapter], weights[places[name]] * upper[name].current_up(adapter))]

        held, replaced = task.adapter.held_weights(), replaced_modes(task, upper, weighted_pair)
        with held, replaced, task.adapter.trained_bases(upper) as bases:
            yield [*bases, weights]

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
            loss = self.distillation * -(logits[1].softmax(dim=1) * logits[0].log_softmax(dim=1)).sum(dim=1).mean()
            # Scale each row of the gradient by B as the previous task left it.
            adapter, layers = task.adapter_name, [task.layers[name] for name in lower]
            ups = [(layer, up[adapter]) for layer in layers for up in (layer.dulbe_shared_B, layer.dulbe_residual_B)]
            for (layer, up), gradient in zip(ups, torch.autograd.grad(loss, [up for _, up in ups]), strict=True):
                # All tasks share one orthonormal A, so the previous task's B is the whole history times A'.
                gradient *= row_scales(dense(layer.history(adapter)) @ layer.dulbe_P[adapter])
                up.grad = gradient if up.grad is None else up.grad.add_(gradient)

    def finish(self, task: NewTask) -> None:
        for layer, weight in zip(self._upper(task).values(), task.notes[WEIGHTS], strict=True):
            layer.set_up_projections(task.adapter_name, weight * layer.current_up(task.adapter_name))

    def remember(self, task: NewTask, inputs: OccupationStatistics) -> Memory:
        row = task.notes[WEIGHTS].detach()[None]
        old = [task.memory[WEIGHTS].to(row)] if isinstance(task.memory, dict) else []
        return {WEIGHTS: torch.cat([*old, row])}

    def _upper(self, task: NewTask) -> dict[str, DualModeLinear]:
        """Return the layers that have a pair for each task."""
        return {name: task.layers[name] for name in lower_and_upper(task.layers, self.shared_blocks)[1]}
