"""Each layer's whole update as a pair of factors, its best approximation of a lower rank, and sums of adapters.

B = Q_B R_B,  P = Q_P R_P,  R_B R_P' = U S V'
dW_k = (Q_B U_k S_k^1/2) (S_k^1/2 V_k' Q_P')      the best approximation of rank k, by a small SVD
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from dulbe_peft.adapter.base import DualModeLayer, layers_of
from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.adapter.targets import in_text_tower
from dulbe_peft.adapter.text import TextLoraLinear
from dulbe_peft.utils.settings import check_int, check_number


class Factors(NamedTuple):
    """A layer's update scale * up @ down, with `down` of shape (rank, d_in) and `up` of shape (d_out, rank)."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float


def all_factors(base: nn.Module, adapter: str) -> dict[str, Factors]:
    """Return each layer's whole update by name, history first. Tensors are not copied unless they are joined."""
    layers = {}
    for name, layer in layers_of(base, adapter, DualModeLayer).items():
        if isinstance(layer, TextLoraLinear):
            down, up = layer.dulbe_text_A[adapter].detach(), layer.dulbe_text_B[adapter].detach()
            layers[name] = Factors(down, up, layer.scaling[adapter])
        else:
            old, old_up = layer.history(adapter)
            identity = torch.eye(layer.in_features, device=old_up.device)
            down = torch.cat([identity if old is None else old, layer.dulbe_P[adapter]], dim=1).T
            layers[name] = Factors(down, torch.cat([old_up, layer.current_up(adapter)], dim=1).detach(), 1.0)
    return layers


def best_of_rank(factors: Factors, rank: int, name: str) -> tuple[Factors, torch.Tensor]:
    """Return the best factors of at most `rank`, and all singular values of the update. `name` is for messages."""
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


def add_weighted_adapter(
    tuner: Any,
    adapters: Sequence[str],
    weights: Sequence[float],
    adapter_name: str,
    combination_type: str = "svd",
    svd_rank: int | None = None,
) -> None:
    """Add an adapter whose update is the weighted sum of other adapters' updates. It does not become active.

    Args:
        adapters: Names of adapters that are in the same layers.
        weights: One number for each adapter.
        adapter_name: The new adapter's name. Its history is the sum, and its modes are new.
        combination_type: "cat" is exact; "svd" takes the best approximation of rank `svd_rank` in every layer.
        svd_rank: The rank for "svd"; None takes the highest rank among the adapters.

    Raises:
        ValueError: If the adapters cannot be added, or the name is taken. Nothing is changed then.
    """
    tuner.check_state("add_weighted_adapter")
    configs = tuner.peft_config
    if not adapters or not configs.keys() >= set(adapters):
        raise ValueError(f"adapters must be some of {list(configs)}, got {list(adapters)}")
    if len(weights) != len(adapters):
        raise ValueError(f"there are {len(adapters)} adapters and {len(weights)} weights")
    for weight in weights:
        check_number("weights", weight)
    if adapter_name in configs:
        raise ValueError(f"the model already has the adapter {adapter_name!r}: take another name")
    if combination_type not in ("cat", "svd"):
        raise ValueError(f"combination_type must be 'cat' or 'svd', got {combination_type!r}")
    if svd_rank is not None:
        check_int("svd_rank", svd_rank, 1)
    if any(configs[name].modules_to_save for name in adapters):
        raise ValueError(f"one of the adapters {list(adapters)} has modules_to_save, which cannot be summed")
    parts = [all_factors(tuner.model, name) for name in adapters]
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError(f"the adapters {list(adapters)} are in different layers and cannot be summed")
    total = {}
    for name in parts[0]:
        ups = [weight * part[name].scale * part[name].up for weight, part in zip(weights, parts, strict=True)]
        total[name] = Factors(torch.cat([part[name].down for part in parts]), torch.cat(ups, dim=1), 1.0)
        if combination_type == "svd":
            rank = svd_rank or max(len(part[name].down) for part in parts)
            total[name] = best_of_rank(total[name], rank, name)[0]
    config = replace(configs[adapters[0]], history_rank=0, history_pattern={}, init_weights=True)
    text_ranks = [len(factors.down) for name, factors in total.items() if in_text_tower(name)]
    if text_ranks:  # all text layers have the same rank
        config = replace(config, text_rank=text_ranks[0], text_alpha=float(text_ranks[0]))
    configs[adapter_name] = config
    try:
        tuner.inject_adapter(tuner.model, adapter_name)
    except ValueError:  # an unsuitable name, which is found before any layer is changed
        del configs[adapter_name]
        raise
    for name, factors in total.items():
        layer: Any = tuner.model.get_submodule(name)
        if isinstance(layer, DualModeLinear):
            layer.set_history(adapter_name, factors.down.T, factors.up)
        else:
            layer.dulbe_text_A[adapter_name].data.copy_(factors.down)
            layer.dulbe_text_B[adapter_name].data.copy_(factors.up)
    tuner.save_first_beginning(adapter_name)  # its history is the sum
