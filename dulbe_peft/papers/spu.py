"""SPU: trains only a tenth of the weights in the first layer of each MLP, those with the largest gradients.

    chosen  a `share` of the layer's weights, those with the largest |G|; G: gradient of the new images' loss before
            the task
    W_t     = W_{t-1} + D        D starts at 0 and is trained at the chosen weights only

Every task chooses its weights anew. Such a sparse update may have full rank, so the adapter keeps one dense matrix per
layer. With share=1, every weight of all adapted layers is trained: plain fine-tuning.

Reference: Zhang et al., "Overcoming Generic Knowledge Loss with Selective Parameter Update", arXiv 2308.12462. In the
published code, G is the gradient of the squared norm of the logits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Gt, Le

from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.adapter.linear import Updates, dense
from dulbe_peft.strategies.base import GRADIENTS, NewTask, Strategy, replaced_modes

VALUES = "values of layer "


@dataclass(frozen=True)
class Spu(Strategy):
    """Train single weights of the first MLP layers instead of low-rank modes."""

    name = "spu"
    needs = frozenset({GRADIENTS})
    share: Annotated[float, Gt(0), Le(1)] = 0.1

    @property
    def target_modules(self) -> tuple[str, ...] | None:  # type: ignore[override]
        """The first layer of each MLP, or, for fine-tuning, any layers."""
        return ("fc1",) if self.share < 1 else None

    def trained_weights(self, layer: DualModeLinear) -> int:
        return max(1, int(self.share * layer.in_features * layer.out_features))

    def plan(self, task: NewTask) -> None:
        """Choose the weights to train; the low-rank modes stay at 0."""
        for name, layer in task.layers.items():
            task.notes[name] = task.gradients[name].abs().flatten().topk(self.trained_weights(layer)).indices

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[torch.Tensor]]:
        layers = task.layers
        for name in layers:
            task.notes[VALUES + name] = torch.zeros_like(task.notes[name], dtype=torch.float32).requires_grad_()
        with replaced_modes(task, layers, lambda name: self._update(task, name)):
            yield [task.notes[VALUES + name] for name in layers]

    def finish(self, task: NewTask) -> None:
        adapter = task.adapter_name
        for name, layer in task.layers.items():
            ((_, update),) = self._update(task, name)
            identity = torch.eye(layer.in_features, device=update.device)
            layer.set_history(adapter, identity, dense(layer.history(adapter)) + update)

    def _update(self, task: NewTask, name: str) -> Updates:
        """Return D, (d_out, d_in)."""
        layer, values = task.layers[name], task.notes[VALUES + name]
        empty = values.new_zeros(layer.out_features * layer.in_features)
        return [(None, empty.scatter(0, task.notes[name], values).view(layer.out_features, layer.in_features))]
