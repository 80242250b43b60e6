"""Count what a strategy trains and keeps, from shapes: parameters, shared inputs and bytes."""

from typing import Any

import torch

from dulbe_peft.encoders.loading import image_shape, unit_image_embeds
from dulbe_peft.strategies.base import Memory, Strategy
from dulbe_peft.subspaces.inputs import observed_inputs


def trainable_parameters(model: Any, strategy: Strategy, memory: Memory | None = None) -> dict[str, int]:
    """Return how many parameters a task trains: B of shared and residual modes, trained bases P, others, the total.

    For a strategy that does not train the adapter, they are the numbers in its `memory`, which are 0 before a task and
    include those of finished tasks.
    """
    if not strategy.trains_adapter:
        weights = sum(map(strategy.trained_weights, model.dual_mode_layers().values()))
        kept = sum(tensor.numel() for tensor in memory.values()) if isinstance(memory, dict) else 0
        return {"shared": 0, "residual": 0, "bases": 0, "other": weights or kept, "total": weights or kept}
    layers = model.dual_mode_layers().values()
    shared, residual = (
        sum(p.numel() for p in modes()) for modes in (model.shared_parameters, model.residual_parameters)
    )
    other = sum(p.numel() for p in model.parameters() if p.requires_grad) - shared - residual
    bases = sum(layer.dulbe_P[model.adapter_name].numel() for layer in layers) * strategy.trains_bases
    if weights := sum(map(strategy.trained_weights, layers)):
        shared, residual, other = 0, 0, other + weights
    counts = {"shared": shared, "residual": residual, "bases": bases, "other": other}
    return counts | {"total": sum(counts.values())}


def shared_inputs(model: Any) -> dict[tuple[str, ...], int]:
    """Encode one image, and return which adapted layers share an input: their names -> the input's width d_in."""
    read: dict[str, torch.Tensor] = {}
    base, layers = model.get_base_model(), model.dual_mode_layers()
    blank = torch.zeros(1, *image_shape(base), device=next(base.parameters()).device)
    with observed_inputs(layers, read.__setitem__), torch.no_grad():
        unit_image_embeds(base, blank)
    groups: dict[int, list[str]] = {}
    for name, tensor in read.items():
        groups.setdefault(id(tensor), []).append(name)
    return {tuple(names): layers[names[0]].in_features for names in groups.values()}


def statistics_bytes(model: object) -> int:
    """Return the size in bytes of the statistics S of a model's inputs, in float32."""
    return 4 * sum(width**2 for width in shared_inputs(model).values())
