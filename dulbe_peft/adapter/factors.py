"""The whole update of every layer as a pair of factors, and its best approximation of a lower rank.

B = Q_B R_B,  P = Q_P R_P,  R_B R_P' = U S V'
dW_k = (Q_B U_k S_k^1/2) (S_k^1/2 V_k' Q_P')      the best approximation of rank k, by a small SVD
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from dulbe_peft.adapter.base import DualModeLayer
from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.adapter.text import TextLoraLinear


class Factors(NamedTuple):
    """A layer's update, scale * up @ down; down is (rank, d_in), up (d_out, rank)."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float


def all_factors(base: nn.Module, adapter: str) -> dict[str, Factors]:
    """Layer name -> its whole update, history first; the layer's own tensors."""
    layers = {}
    for name, layer in base.named_modules():
        if not isinstance(layer, DualModeLayer) or not layer.adapters_here([adapter]):
            continue
        if isinstance(layer, TextLoraLinear):
            down, up = layer.dulbe_text_A[adapter].detach(), layer.dulbe_text_B[adapter].detach()
            layers[name] = Factors(down, up, layer.scaling[adapter])
        elif isinstance(layer, DualModeLinear):
            old, old_up = layer.history(adapter)
            identity = torch.eye(layer.in_features, device=old_up.device)
            down = torch.cat([identity if old is None else old, layer.dulbe_P[adapter]], dim=1).T
            layers[name] = Factors(down, torch.cat([old_up, layer.current_up(adapter)], dim=1).detach(), 1.0)
    return layers


def best_of_rank(factors: Factors, rank: int, name: str) -> tuple[Factors, torch.Tensor]:
    """The factors, or where their rank is higher the best ones of `rank`; and all singular values of the update."""
    down, up = factors.down.double(), factors.up.double()
    if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
        raise ValueError(f"the update of layer {name!r} holds NaN or infinity: it cannot be compressed")
    left, left_core = torch.linalg.qr(up)
    right, right_core = torch.linalg.qr(down.T)
    u, values, vh = torch.linalg.svd(left_core @ right_core.T, full_matrices=False)
    if len(down) > rank:
        root = values[:rank].sqrt()
        short_up, short_down = left @ (u[:, :rank] * root), (root[:, None] * vh[:rank]) @ right.T
        factors = Factors(short_down.to(factors.down.dtype), short_up.to(factors.up.dtype), factors.scale)
    return factors, factors.scale * values
