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
    _check(tuner, adapters, weights, adapter_name, combination_type, svd_rank)
    parts = [all_factors(tuner.model, name) for name in adapters]
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError(f"the adapters {list(adapters)} stand in different layers, so they have no sum")
    total: dict[str, Factors] = {}
    for name in parts[0]:
        own = [part[name] for part in parts]
        ups = [weight * factors.scale * factors.up for weight, factors in zip(weights, own, strict=True)]
        total[name] = Factors(torch.cat([factors.down for factors in own]), torch.cat(ups, dim=1), 1.0)
        if combination_type == "svd":
            rank = svd_rank or max(len(factors.down) for factors in own)
            total[name] = best_of_rank(total[name], rank, name)[0]
    config = replace(config_of(tuner, adapters[0]), history_rank=0, history_pattern={})
    text_ranks = [len(factors.down) for name, factors in total.items() if in_text_tower(name)]
    if text_ranks:  # the same in all layers
        config = replace(config, text_rank=text_ranks[0], text_alpha=float(text_ranks[0]))
    tuner.peft_config[adapter_name] = config
    tuner.inject_adapter(tuner.model, adapter_name)
    for name, factors in total.items():
        layer: Any = tuner.model.get_submodule(name)
        if isinstance(layer, DualModeLinear):
            layer.set_history(adapter_name, factors.down.T, factors.up)
        else:
            layer.dulbe_text_A[adapter_name].data.copy_(factors.down)
            layer.dulbe_text_B[adapter_name].data.copy_(factors.up)


def config_of(tuner: DualModeLoraModel, adapter: str) -> DualModeLoraConfig:
    return cast(DualModeLoraConfig, tuner.peft_config[adapter])


def _check(
    tuner: DualModeLoraModel,
    adapters: Sequence[str],
    weights: Sequence[float],
    adapter_name: str,
    combination_type: str,
    svd_rank: int | None,
) -> None:
    unknown = [name for name in adapters if name not in tuner.peft_config]
    if unknown or not adapters:
        raise ValueError(f"adapters must be some of {list(tuner.peft_config)}, got {list(adapters)}")
    if len(weights) != len(adapters):
        raise ValueError(f"there are {len(adapters)} adapters and {len(weights)} weights")
    for weight in weights:
        check_number("weights", weight)
    if adapter_name in tuner.peft_config:
        raise ValueError(f"the model already has the adapter {adapter_name!r}: take another name")
    if combination_type not in ("cat", "svd"):
        raise ValueError(f"combination_type must be 'cat' or 'svd', got {combination_type!r}")
    if svd_rank is not None:
        check_int("svd_rank", svd_rank, 1)
    whole = [name for name in adapters if config_of(tuner, name).modules_to_save]
    if whole:
        raise ValueError(f"adapter {whole[0]!r} has modules_to_save, whole modules that have no weighted sum")
