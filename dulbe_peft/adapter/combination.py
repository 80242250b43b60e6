"""A weighted sum of adapters as a further adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import torch

from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.adapter.factors import Factors, all_factors, best_of_rank
from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.adapter.targets import in_text_tower
from dulbe_peft.utils.checks import check_int, check_number

if TYPE_CHECKING:
    from dulbe_peft.adapter.model import DualModeLoraModel


def add_weighted_adapter(
    tuner: DualModeLoraModel,
    adapters: Sequence[str],
    weights: Sequence[float],
    adapter_name: str,
    combination_type: str,
    svd_rank: int | None,
) -> None:
    """See `DualModeLoraModel.add_weighted_adapter`."""
    configs = cast(dict[str, DualModeLoraConfig], tuner.peft_config)
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
        raise ValueError(f"one of the adapters {list(adapters)} has modules_to_save, which have no weighted sum")
    parts = [all_factors(tuner.model, name) for name in adapters]
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError(f"the adapters {list(adapters)} stand in different layers, so they have no sum")
    total = {name: _sum([part[name] for part in parts], weights) for name in parts[0]}
    if combination_type == "svd":
        for name, factors in total.items():
            rank = svd_rank or max(len(part[name].down) for part in parts)
            total[name] = best_of_rank(factors, rank, name)[0]
    config = replace(configs[adapters[0]], history_rank=0, history_pattern={})
    text_ranks = [len(factors.down) for name, factors in total.items() if in_text_tower(name)]
    if text_ranks:  # the same in all layers
        config = replace(config, text_rank=text_ranks[0], text_alpha=float(text_ranks[0]))
    configs[adapter_name] = config
    tuner.inject_adapter(tuner.model, adapter_name)
    for name, factors in total.items():
        layer: Any = tuner.model.get_submodule(name)
        if isinstance(layer, DualModeLinear):
            layer.set_history(adapter_name, factors.down.T, factors.up)
        else:
            layer.dulbe_text_A[adapter_name].data.copy_(factors.down)
            layer.dulbe_text_B[adapter_name].data.copy_(factors.up)


def _sum(parts: list[Factors], weights: Sequence[float]) -> Factors:
    ups = [weight * part.scale * part.up for weight, part in zip(weights, parts, strict=True)]
    return Factors(torch.cat([part.down for part in parts]), torch.cat(ups, dim=1), 1.0)
