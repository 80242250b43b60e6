"""BOFA: only the visual projection learns, each task along the input directions that earlier tasks used least.

    dW_t = B P'                         P: the r eigenvectors of least eigenvalue of S_<t = sum of x x', x the
                                        projection's input over all images of earlier tasks; B trained from 0
    W = W_0 + (1 / t) sum over s <= t of dW_s

Each task is trained on W_0 alone; the earlier updates are switched off meanwhile. The input of the projection is
frozen, so S never goes stale.

Reference: "BOFA: Bridge-Layer Orthogonal Low-Rank Fusion for CLIP-Based Class-Incremental Learning", arXiv 2511.11421.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from dulbe_peft.strategies.base import Modes, NewTask
from dulbe_peft.strategies.memories import OccupationStrategy, old_statistic
from dulbe_peft.subspaces.decompositions import eigh, fix_signs


def least_directions(statistic: torch.Tensor, count: int, name: str = "S") -> torch.Tensor:
    """The eigenvectors of S, (d, d) in float64, of the `count` smallest eigenvalues, the smallest first."""
    _, vectors = eigh(statistic, name)
    return fix_signs(vectors.flip(1)[:, :count])


@dataclass(frozen=True)
class Bofa(OccupationStrategy):
    """The mean of updates that start from the same weight, each in the directions used least before it."""

    name = "bofa"
    classifiers = ("bofa", "lda")
    target_modules = ("visual_projection",)

    def plan(self, task: NewTask) -> Modes:
        generator, bases = task.generator(), {}
        for name, layer in task.layers.items():
            old = old_statistic(task, name)
            if old is not None:
                bases[name] = least_directions(old, task.rank(name), f"statistics of layer {name!r}")
            else:
                bases[name] = torch.linalg.qr(torch.randn(layer.in_features, task.rank(name), generator=generator)).Q
        return task.modes(bases)

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[torch.Tensor]]:
        names = () if task.index else None  # the first task trains P, too
        with task.adapter.scaled_history(0), task.adapter.trained_bases(names) as bases:
            yield bases

    def finish(self, task: NewTask) -> None:
        """The old updates' mean over t - 1 tasks becomes their part of the mean over t, and so does the new update."""
        adapter, part = task.adapter_name, 1 / (task.index + 1)
        for layer in task.layers.values():
            layer.dulbe_history_B[adapter] = (1 - part) * layer.dulbe_history_B[adapter]
            layer.set_up_projections(adapter, part * layer.current_up(adapter))
