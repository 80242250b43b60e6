"""Gradients of the method: the probe that plans a task, and the routing that trains it."""

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.utils.devices import evaluating
from dulbe_peft.utils.settings import check_number


def probe_gradients(
    model: nn.Module, batches: Iterable[Any], loss_fn: Callable[[nn.Module, Any], tuple[torch.Tensor, int]]
) -> dict[str, torch.Tensor]:
    """Gradient of a data set's mean loss by every adapted layer's weight, in evaluation mode and without a step.

    Args:
        model: a model from `get_peft_model` with one active dual-mode adapter.
        batches: any iterable; each element is handed to `loss_fn`.
        loss_fn: `loss_fn(model, batch) -> (loss, n)`, the batch's mean loss, a scalar, and its number of samples.

    Returns:
        Layer name -> G, (out_features, in_features), in at least float32, on the base weight's device.

    Raises:
        ValueError: there is no batch, a loss is not finite, or no loss depends on an adapted layer.

    Reference:
        Section "Gradient-Demand Dual-Mode Subspace Allocation"; appendix "Prospective-gradient estimation".
    """
    if not hasattr(model, "dual_mode_layers"):
        raise TypeError(f"model must come from get_peft_model, got {type(model).__name__}")
    layers: dict[str, DualModeLinear] = model.dual_mode_layers()  # type: ignore[operator]
    model.check_unmerged()  # type: ignore[operator]
    adapter = next(iter(layers.values())).active_adapters[0]
    losses: list[torch.Tensor] = []
    total = 0
    with evaluating(model), ExitStack() as held:
        weights = {}
        for name, layer in layers.items():
            weight = layer.folded_weight(adapter).detach()
            # At least float32: half precision loses sums over many batches.
            weights[name] = weight.to(torch.promote_types(weight.dtype, torch.float32)).requires_grad_()
            held.enter_context(layer.holding(weights[name]))
        for batch in batches:
            result = loss_fn(model, batch)
            if not isinstance(result, tuple):
                raise TypeError(f"loss_fn must return (mean loss, batch size), a pair, got a {type(result).__name__}")
            loss, size = result
            (loss * size).backward(inputs=list(weights.values()))
            losses.append(loss.detach())
            total += size
    if not total:
        raise ValueError("batches is empty: the probe needs at least one batch of the new task's data")
    if all(weight.grad is None for weight in weights.values()):
        raise ValueError("the loss of loss_fn has no gradient in any adapted layer: it must run the vision tower")
    bad = [index for index, finite in enumerate(torch.isfinite(torch.stack(losses)).tolist()) if not finite]
    if bad:
        raise ValueError(f"loss of probe batch {bad[0]} is {losses[bad[0]].item()}, expected a finite number")
    return {n: torch.zeros_like(w) if w.grad is None else w.grad.div_(total) for n, w in weights.items()}


def route_gradients(
    model: nn.Module,
    task_loss: torch.Tensor,
    structure_loss: torch.Tensor | None,
    structure_weight: float = 0.5,
) -> None:
    """Accumulate into `.grad` as `backward()` would, each loss into the parameters it is meant for.

    `task_loss` reaches every trainable parameter, those outside the model too; `structure_weight * structure_loss`
    reaches B_S of every layer and nothing else. Both losses may come from one forward pass.

    Args:
        model: a model from `get_peft_model` with one active dual-mode adapter.
        task_loss: scalar, cross-entropy over the current classes.
        structure_loss: scalar, `bidirectional_kl` over the old classes; None at the first task.
        structure_weight: lambda, at least 0.

    Raises:
        ValueError: a loss is no scalar, has no gradient where it is meant to have one, or (on the CPU, where looking
            is free) is not finite. No gradient is touched then.

    Reference:
        Section "Routed Cross-Modal Training", "Gradient Routing".
    """
    routed_loss(model, task_loss, structure_loss, structure_weight).backward()


def routed_loss(
    model: nn.Module,
    task_loss: torch.Tensor,
    structure_loss: torch.Tensor | None,
    structure_weight: float = 0.5,
    scale: float = 1.0,
) -> torch.Tensor:
    """task_loss + lambda structure_loss, a scalar whose `backward()` does what `route_gradients` says.

    It holds the gradient g of the structure loss by B_S, and sum(g B_S) has this gradient and no other. `scale` is
    that of a `torch.amp.GradScaler`: half precision would lose g without it.
    """
    losses = {"task_loss": task_loss} | ({} if structure_loss is None else {"structure_loss": structure_loss})
    for name, loss in losses.items():
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
            raise ValueError(f"{name} must be a scalar tensor, got {loss!r}")
        if loss.device.type == "cpu" and not torch.isfinite(loss):
            raise ValueError(f"{name} is {loss.item()}, expected a finite number")
    check_number("structure_weight", structure_weight, least=0)
    if not task_loss.requires_grad:
        raise ValueError("task_loss does not depend on any trainable parameter")
    shared = [p for p in model.shared_parameters() if p.requires_grad and p.numel()]  # type: ignore[operator]
    if structure_loss is None or structure_weight == 0 or not shared:
        return task_loss
    routed: tuple[torch.Tensor | None, ...] = ()
    if structure_loss.requires_grad:
        weighted = scale * structure_weight * structure_loss
        routed = torch.autograd.grad(weighted, shared, retain_graph=True, allow_unused=True)
    pairs = [(p, gradient / scale) for p, gradient in zip(shared, routed) if gradient is not None]
    if not pairs:
        raise ValueError(
            "structure_loss has no gradient in any shared mode: it must run the vision tower, and gradient "
            "checkpointing must be the kind with use_reentrant=False"
        )
    carrier = torch.stack([(p * gradient).sum() for p, gradient in pairs]).sum()
    return task_loss + structure_weight * structure_loss.detach() + (carrier - carrier.detach())
