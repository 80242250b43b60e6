"""LoRA-Sub, or LoRA-DRS: train only in the new task's input directions, measured after subtracting old updates.

    W~ = W_0 - sum over earlier tasks j of B_j A_j           in all adapted layers at once
    S  = X'X over the new task's images, X: a layer's inputs in the model with weights W~
    S  = U diag(l) U',  l descending;  k = the least with l_1 + ... + l_k >= energy * (l_1 + l_2 + ...)
    A <- A + step U_k U_k'                                   step: what the optimiser would have added

A and B are new for each task, and the update B A is merged into the weight when the task ends. The first task is not
restricted. In the code, P = A'. With `normalize`, the projector is divided by its norm, |U_k U_k'|_F = sqrt(k), as in
the published code; by default it is the paper's.

The step that Adam has made is projected, as in the published code, and not the gradient, because Adam's scaling would
move a projected gradient out of the space again. With `project_start`, the random start of A is projected too, so that
the whole update lies in the space.

Reference: Liu and Chang, "LoRA Subtraction for Drift-Resistant Space in Exemplar-Free Continual Learning",
arXiv 2503.18985; the published code fixes energy = 0.99.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt, Le

from dulbe_peft.strategies.base import INPUTS, Modes, NewTask
from dulbe_peft.strategies.lora import MergedLora, kaiming_bases
from dulbe_peft.subspaces.decompositions import eigh, fix_signs, to_float64


def leading_space(moment: torch.Tensor, energy: float, name: str) -> torch.Tensor:
    """Return U_k, (d_in, k), float32: the fewest leading eigenvectors of X'X, (d_in, d_in), whose eigenvalues sum to
    at least a share `energy` of its trace."""
    values, vectors = eigh(to_float64(moment, name), name)
    held = values.clamp(min=0).cumsum(0)
    count = 1 + int((held < energy * held[-1]).sum())
    return fix_signs(vectors[:, :count]).float()


@dataclass(frozen=True)
class LoraSub(MergedLora):
    """LoRA-Sub without its triplet loss."""

    energy: Annotated[float, Gt(0), Le(1)] = 0.99
    normalize: bool = False
    project_start: bool = False

    name = "lora_sub"
    needs = frozenset({INPUTS})

    def measuring(self, task: NewTask) -> AbstractContextManager[object] | None:
        return task.adapter.scaled_history(-1.0) if task.index else None

    def plan(self, task: NewTask) -> Modes:
        bases = kaiming_bases(task)
        for names in task.inputs.groups if task.index else ():
            label = f"inputs of layer {names[0]!r}"
            space = leading_space(task.inputs[names[0]], self.energy, label).cpu()
            task.notes.update(dict.fromkeys(names, space))
            if self.project_start:
                bases.update({name: space @ (space.T @ bases[name]) for name in names})
        return task.modes(bases)

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[torch.Tensor]]:
        with super().training(task) as bases:
            for name, basis in zip(task.layers, bases, strict=True):
                task.notes[f"{name}.before"] = basis.detach().clone()  # P before the step
            yield bases

    def after_step(self, task: NewTask) -> None:
        if not task.index:
            return  # the first task is not restricted
        for name, layer in task.layers.items():
            space, basis, before = task.notes[name], layer.dulbe_P[task.adapter_name], task.notes[f"{name}.before"]
            step = space @ (space.T @ (basis - before))
            before += step / space.shape[1] ** 0.5 if self.normalize else step
            basis.copy_(before)
