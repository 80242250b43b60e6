"""O-LoRA: a new LoRA pair for each task, with a penalty on the overlap of its rows with those of earlier pairs.

    W_t = W_0 + sum over i < t of B_i A_i + B_t A_t            A_t and B_t trained, earlier pairs frozen and active
    loss = cross-entropy + lambda_1 * sum over layers and i < t of the sum of entries |A_i A_t'|

A_t is initialised like LoRA's A, and B_t at 0. Earlier pairs are in the adapter's history: P_hist has all A_i' side by
side as columns, so a layer's sum over i is the sum of the entries of |P_hist' P|.

Reference: Wang et al., "Orthogonal Subspace Learning for Language Model Continual Learning", arXiv 2310.14152.
"""

from dataclasses import dataclass

import torch

from dulbe_peft.strategies.base import NewTask
from dulbe_peft.strategies.lora import MergedLora
from dulbe_peft.utils.settings import Weight


@dataclass(frozen=True)
class OLora(MergedLora):
    """Train a new LoRA pair for each task, with a penalty on its overlap with earlier pairs."""

    name = "o_lora"
    keeps_factors = True
    lambda_1: Weight = 0.5

    def penalty(self, task: NewTask) -> torch.Tensor | None:
        if not task.index:
            return None
        name = task.adapter_name
        overlaps = [layer.dulbe_history_P[name].T @ layer.dulbe_P[name] for layer in task.layers.values()]
        return self.lambda_1 * torch.stack([overlap.abs().sum() for overlap in overlaps]).sum()
