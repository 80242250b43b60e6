"""MagMax: fine-tuning goes on from task to task, and the model in use takes each weight's largest change.

    W_t   = W_{t-1} + D                          D, (d_out, d_in), starts at 0 and is trained in full
    v_t   = W_t - W_0                            the change of all tasks up to t
    v     = that v_s, s <= t, with the largest |v_s|, for each single weight; of equal ones, the later
    W     = W_0 + scale v                        used for everything except training, which goes on from W_t

The maximum is associative, so v and v_t are all that is kept: v is the adapter's history, and v_t the memory. The
names of the classes stay as the model embeds them; the loss is the cross-entropy over the task's names.

Reference: Marczak et al., "MagMax: Leveraging Model Merging for Seamless Continual Learning", arXiv 2407.06322, and
the authors' public code, which also trains biases, norms and embeddings, with AdamW at 1e-5, a decay of 0.1, batches
of 128, a warm-up of 500 steps, gradients clipped to 1, and 10 epochs.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.adapter.linear import dense
from dulbe_peft.strategies.base import Memory, NewTask, Strategy, replaced_modes
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.utils.settings import Positive


def larger(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """Return, for each entry, the value with the larger magnitude; if these are equal, that of `new`."""
    return torch.where(new.abs() >= old.abs(), new, old)


@dataclass(frozen=True)
class MagMax(Strategy):
    """Train all weights of the adapted layers, and use the largest change of each."""

    scale: Positive = 0.5  # factor of v in the model that is used; the authors' is 0.5

    name = "magmax"
    memory_kind = dict
    trains_adapter = False
    published_rate = 1e-5
    classifiers = ("text", "bayes")

    def trained_weights(self, layer: DualModeLinear) -> int:
        return layer.in_features * layer.out_features

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[torch.Tensor]]:
        """Train v_t itself, beginning with the last one: the weight is W_0 + v_t."""
        trained, before = {}, task.memory or {}
        assert isinstance(before, dict)
        for name, layer in task.layers.items():
            device = layer.dulbe_P[task.adapter_name].device
            start = before.get(name, torch.zeros(layer.out_features, layer.in_features))
            trained[name] = task.notes[name] = start.to(device, copy=True).requires_grad_()
        with replaced_modes(task, task.layers, lambda name: [(None, trained[name])], history=False):
            yield list(trained.values())

    def finish(self, task: NewTask) -> None:
        adapter = task.adapter_name
        for name, layer in task.layers.items():
            change = task.notes[name] = task.notes[name].detach()
            if task.index:
                change = larger(dense(layer.history(adapter)) / self.scale, change)
            layer.set_history(adapter, torch.eye(layer.in_features, device=change.device), self.scale * change)

    def remember(self, task: NewTask, inputs: OccupationStatistics) -> Memory:
        """Return v_t, layer name -> (d_out, d_in)."""
        return {name: task.notes[name] for name in task.layers}
