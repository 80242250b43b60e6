"""SD-LoRA: the directions of old updates are frozen, while their magnitudes are still trained.

    W x = W_0 x + sum over old tasks i of m_i B_i A_i x / (|B_i| |A_i|) + m_t B_t A_t x        |.|: Frobenius norm

Task t trains A_t, B_t and all magnitudes m_1, ..., m_t, which all layers share. Each task starts all magnitudes at
`magnitude`, as the authors' code does, and trains them with a rate of their own. The new pair is not normalised while
it is trained.

When the task ends, the magnitudes are written into the factors: B_i becomes m_i B_i / (|B_i| |A_i|), and B_t becomes
m_t B_t. With `restart=false`, the next task recovers them from the factors as m_i = |B_i| |A_i|, one for each layer,
and no output changes between two tasks.

Reference: Wu et al., "SD-LoRA: Scalable Decoupled Low-Rank Adaptation for Class Incremental Learning",
arXiv 2501.13198.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

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
    """SD-LoRA, with Adam in place of SGD."""

    magnitude: Positive = 0.8  # of every pair when a task starts
    magnitude_rate: Positive = 8e-3  # learning rate of the magnitudes; the authors' SGD has the same for all tensors
    restart: bool = True  # whether a task starts the magnitudes of old pairs at `magnitude`, or where they ended

    name = "sd_lora"
    keeps_factors = True
    shares = False  # every task begins with magnitudes of its own

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[torch.Tensor]]:
        adapter, layers, old, starts = task.adapter_name, task.layers, {}, {}
        for name, layer in layers.items():
            down, up = layer.dulbe_history_P[adapter], layer.dulbe_history_B[adapter]
            old[name], ended = directions(down, up, task.rank(name))
            start = torch.cat([ended, ended.new_tensor([self.magnitude])])
            starts[name] = torch.full_like(start, self.magnitude) if self.restart else start
        # Adam changes any number by about its learning rate in a step, so m = start + ratio * shift changes by ratio
        # times that, which is `magnitude_rate`.
        shift = torch.zeros_like(next(iter(starts.values()))).requires_grad_()
        ratio = self.magnitude_rate / float(task.args.learning_rate)
        task.notes.update({name: partial(_moved, start, ratio, shift) for name, start in starts.items()})

        def all_pairs(name: str) -> Updates:
            layer = layers[name]
            down = torch.cat([layer.dulbe_history_P[adapter], layer.dulbe_P[adapter]], dim=1)
            return [(down, scaled(torch.cat([old[name], layer.current_up(adapter)], dim=1), task.notes[name]()))]

        with task.adapter.trained_bases() as bases, replaced_modes(task, layers, all_pairs, history=False):
            yield [*bases, shift]

    def finish(self, task: NewTask) -> None:
        adapter = task.adapter_name
        for name, layer in task.layers.items():
            rank = task.rank(name)
            old, _ = directions(layer.dulbe_history_P[adapter], layer.dulbe_history_B[adapter], rank)
            ups = scaled(torch.cat([old, layer.current_up(adapter)], dim=1), task.notes[name]())
            layer.dulbe_history_B[adapter] = ups[:, :-rank].contiguous()
            layer.set_up_projections(adapter, ups[:, -rank:])


def _moved(start: torch.Tensor, ratio: float, shift: torch.Tensor) -> torch.Tensor:
    return start + ratio * shift
