"""The same update as a stock LoRA adapter, which loads without this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict

from dulbe_peft.config import PREFIX
from dulbe_peft.files import write_tensors
from dulbe_peft.layer import DualModeLinear, TextLoraLinear


def export_lora(model: PeftModel, folder: str | Path) -> Path:
    """Write the active adapter as PEFT's own LoRA: A = stacked bases, B = stacked up-projections, alpha = rank.

    History, current modes, text LoRA and `modules_to_save` are included. The factors are this adapter's, bit for bit;
    no decomposition takes place.

    Args:
        model: a model from `get_peft_model` with one active dual-mode adapter.
        folder: where `adapter_config.json` and `adapter_model.safetensors` go; made if it is not there.

    Returns:
        The folder.
    """
    tuner: Any = model.base_model
    adapter = tuner._active()
    config: Any = model.peft_config[adapter]
    tensors: dict[str, torch.Tensor] = {}
    ranks: dict[str, int] = {}
    alphas: dict[str, float] = {}
    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, DualModeLinear) and adapter in layer.dulbe_P:
            down = torch.cat([layer.dulbe_history_P[adapter], layer.dulbe_P[adapter]], dim=1).T
            current = [layer.dulbe_shared_B[adapter], layer.dulbe_residual_B[adapter]]
            up = torch.cat([layer.dulbe_history_B[adapter], *current], dim=1)
            alphas[name] = down.shape[0]
        elif isinstance(layer, TextLoraLinear) and adapter in layer.dulbe_text_A:
            down, up = layer.dulbe_text_A[adapter], layer.dulbe_text_B[adapter]
            alphas[name] = config.text_alpha
        else:
            continue
        ranks[name] = down.shape[0]
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
    saved = get_peft_model_state_dict(model, adapter_name=adapter, save_embedding_layers=False)
    tensors |= {key: value for key, value in saved.items() if f".{PREFIX}" not in key}
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    _lora_config(config, ranks, alphas).save_pretrained(str(target))
    write_tensors(target / "adapter_model.safetensors", tensors, {"format": "pt"})
    return target


def _lora_config(config: Any, ranks: dict[str, int], alphas: dict[str, float]) -> LoraConfig:
    """A configuration with the visual layers' rank as the default, and the text layers' as patterns."""
    rank = max(ranks.values())
    different = {name for name in ranks if ranks[name] != rank or alphas[name] != rank}
    return LoraConfig(
        r=rank,
        lora_alpha=rank,
        target_modules=sorted(ranks),
        rank_pattern={f"^{name}": ranks[name] for name in sorted(different)},
        alpha_pattern={f"^{name}": alphas[name] for name in sorted(different)},
        modules_to_save=config.modules_to_save,
        base_model_name_or_path=config.base_model_name_or_path,
        revision=config.revision,
        inference_mode=True,
    )
