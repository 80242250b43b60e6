"""SD-LoRA: the directions of old updates are frozen, while their magnitudes are still trained.

    W x = W_0 x + sum over old tasks i of m_i B_i A_i x / (|B_i| |A_i|) + m_t B_t A_t x        |.|: Frobenius norm

Task t trains A_t, B_t and all magnitudes m_1, ..., m_t. The new pair is not normalised while it is trained.

When the task ends, the magnitudes are written into the factors: B_i becomes m_i B_i / (|B_i| |A_i|), and B_t becomes
m_t B_t. The next task recovers them from the factors as m_i = |B_i| |A_i|, so no output changes between two tasks.

Reference: Wu et al., "SD-LoRA: Scalable Decoupled Low-Rank Adaptation for Class Incremental Learning",
arXiv 2501.13198.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dulbe_peft.adapter.linear import Updates
from dulbe_peft.strategies.base import NewTask, replaced_modes
from dulbe_peft.strategies.lora import MergedLora
from dulbe_peft.utils.settings import Positive


def directions(down: torch.Tensor, up: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return B_i / (|B_i| |A_i|), (d_out, pairs * rank), or 0 where B_i is 0, and m_i = |B_i| |A_i|, (pairs,)."""
    pairs = up.shape[1] // rank
    norms = [factor.unflatten(1, (pairs, rank)).norm(dim=(0, 2)) for factor in (down, up)]
    magnitudes = norms[0] * norms[1]
    return up / torch.where(magnitudes > 0, magnitudes, 1.0).repeat_interleave(rank), magnitudes


def scaled(up: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """Multiply the columns of each pair i in `up`, (d_out, pairs * rank), by m_i."""
    return up * magnitudes.repeat_interleave(up.shape[1] // len(magnitudes))


@dataclass(frozen=True)
class SdLora(MergedLora):
    """SD-LoRA, in which each layer has its own magnitudes and every task trains all of them."""

    magnitude: Positive = 0.8  # initial magnitude of a new pair

    name = "sd_lora"
    keeps_factors = True

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[torch.Tensor]]:
        adapter, layers, old, magnitudes = task.adapter_name, task.layers, {}, {}
        for name, layer in layers.items():
            down, up = layer.dulbe_history_P[adapter], layer.dulbe_history_B[adapter]
            old[name], norms = directions(down, up, task.rank(name))
            magnitudes[name] = torch.cat([norms, norms.new_tensor([self.magnitude])]).requires_grad_()
        task.notes.update(magnitudes)

        def all_pairs(name: str) -> Updates:
            layer = layers[name]
            down = torch.cat([layer.dulbe_history_P[adapter], layer.dulbe_P[adapter]], dim=1)
            return [(down, scaled(torch.cat([old[name], layer.current_up(adapter)], dim=1), magnitudes[name]))]

        with task.adapter.trained_bases() as bases, replaced_modes(task, layers, all_pairs, history=False):
            yield [*bases, *magnitudes.values()]

    def finish(self, task: NewTask) -> None:
        adapter = task.adapter_name
        for name, layer in task.layers.items():
            rank = task.rank(name)
            old, _ = directions(layer.dulbe_history_P[adapter], layer.dulbe_history_B[adapter], rank)
            ups = scaled(torch.cat([old, layer.current_up(adapter)], dim=1), task.notes[name])
            layer.dulbe_history_B[adapter] = ups[:, :-rank].contiguous()
            layer.set_up_projections(adapter, ups[:, -rank:])
