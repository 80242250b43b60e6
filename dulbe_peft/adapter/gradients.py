"""The gradients of the method: the probe for planning a task, and gradient routing for training it."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from dulbe_peft.adapter.base import DualModeLayer
from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.utils.processes import gather_objects, raise_in_all, sum_over_processes, unwrapped, world
from dulbe_peft.utils.settings import check_number
from dulbe_peft.utils.torch_settings import evaluating


class GradientProbe(dict[str, torch.Tensor]):
    """A dict of layer name -> G, (out_features, in_features), with facts about the probed adapter."""

    def __init__(
        self, gradients: Mapping[str, torch.Tensor], config: DualModeLoraConfig, has_history: bool = False
    ) -> None:
        super().__init__(gradients)
        self.config, self.has_history = config, has_history


def probe_gradients(
    model: nn.Module, batches: Iterable[Any], loss_fn: Callable[[nn.Module, Any], tuple[torch.Tensor, int]]
) -> GradientProbe:
    """Return the gradient of a data set's mean loss with respect to the weight of every adapted layer.

    The model runs in evaluation mode and is not changed. If `torch.distributed` is initialised, every process must
    call this function, each with its own batches or with none. All processes get the gradient of the mean over the
    samples of all processes.

    Args:
        model: A model from `get_peft_model` with one active dual-mode adapter. It may be wrapped by DDP or accelerate;
            `loss_fn` gets it unwrapped.
        batches: Any iterable; each element is passed to `loss_fn`.
        loss_fn: `loss_fn(model, batch) -> (loss, n)`, the batch's mean loss, a scalar, and its number of samples.

    Returns:
        A dict of layer name -> G, (out_features, in_features), in float32 or a wider dtype, on the base weight's
        device. Its attribute `config` is the adapter's configuration, from which `allocate_modes` takes the ranks.
        A warning names the layers whose G is zero.

    Raises:
        ValueError: If there is no batch, a loss is not finite, no loss depends on an adapted layer, or the adapter is
            disabled, merged or scaled.
        TypeError: If the model does not come from `get_peft_model`, or `loss_fn` does not return a pair.

    Reference:
        Section "Gradient-Demand Dual-Mode Subspace Allocation"; appendix "Prospective-gradient estimation".
    """
    peft_model = peft_model_of(model)
    peft_model.check_state("probe_gradients")
    with raise_in_all():
        sums, size = summed_gradients(peft_model, batches, loss_fn)
    sum_over_processes(sums.values())
    total = sum(gather_objects(size))
    if not total:
        raise ValueError("batches is empty: the probe needs at least one batch of the new task's data")
    unused = [name for name, gradient in sums.items() if not gradient.any()]
    if unused:
        warnings.warn(
            f"the loss of loss_fn has no gradient in {len(unused)} of {len(sums)} adapted layers, so nothing is "
            f"planned for them: {unused[:5]}",
            stacklevel=2,
        )
    gradients = {name: gradient.div_(total) for name, gradient in sums.items()}
    return GradientProbe(gradients, peft_model.active_config, peft_model.has_history)


def summed_gradients(
    model: Any, batches: Iterable[Any], loss_fn: Callable[[nn.Module, Any], tuple[torch.Tensor, int]]
) -> tuple[dict[str, torch.Tensor], int]:
    """Return the gradients of the loss, summed over this process's samples, and the number of samples."""
    layers: dict[str, DualModeLinear] = model.dual_mode_layers()
    adapter = model.adapter_name
    losses: list[torch.Tensor] = []
    total = 0
    with evaluating(model), ExitStack() as held:
        weights = {}
        for name, layer in layers.items():
            weight = layer.folded_weight(adapter).detach()
            # Half precision would lose digits in sums over many batches.
            weights[name] = weight.to(torch.promote_types(weight.dtype, torch.float32)).requires_grad_()
            held.enter_context(layer.holding(adapter, weights[name]))
        for batch in batches:
            result = loss_fn(model, batch)
            if not isinstance(result, tuple):
                raise TypeError(f"loss_fn must return (mean loss, batch size), a pair, got a {type(result).__name__}")
            loss, size = result
            (loss * size).backward(inputs=list(weights.values()))
            losses.append(loss.detach())
            total += size
    if total and all(weight.grad is None for weight in weights.values()):
        raise ValueError("the loss of loss_fn has no gradient in any adapted layer: loss_fn must run the vision tower")
    finite = torch.isfinite(torch.stack(losses)).tolist() if losses else []
    if not all(finite):
        bad = finite.index(False)
        raise ValueError(f"loss of probe batch {bad} is {losses[bad].item()}, expected a finite number")
    return {n: torch.zeros_like(w) if w.grad is None else w.grad for n, w in weights.items()}, total


def peft_model_of(model: nn.Module) -> Any:
    """Return the `PeftModel` inside the wrappers of DDP or accelerate. For any other model, raise a `TypeError`."""
    inner = unwrapped(model)
    if hasattr(inner, "dual_mode_layers"):
        return inner
    if any(isinstance(module, DualModeLayer) for module in inner.modules()):
        raise TypeError(
            f"the adapter of this {type(inner).__name__} was injected by add_adapter, load_adapter or "
            "inject_adapter_in_model. Such an adapter can be used and saved, but not planned or trained task by task: "
            "use a model from get_peft_model or PeftModel.from_pretrained"
        )
    raise TypeError(f"model must come from get_peft_model(..., DualModeLoraConfig(...)), got {type(inner).__name__}")


def route_gradients(
    model: nn.Module,
    task_loss: torch.Tensor,
    structure_loss: torch.Tensor | None,
    structure_weight: float | None = None,
) -> None:
    """Backpropagate each loss into the parameters it is meant for, accumulating into `.grad` as `backward()` does.

    `task_loss` reaches every trainable parameter, including those outside the model. `structure_weight *
    structure_loss` reaches B_S of every layer and nothing else. Both losses may come from one forward pass.

    If `torch.distributed` is initialised, every process must call this function, and the gradients of the model's
    parameters are summed over the processes. A loss that is a mean over the rows of one process must therefore be
    divided by the number of processes. A model inside DDP is left to DDP, which averages the gradients.

    Args:
        model: A model from `get_peft_model` with one active dual-mode adapter. It may be wrapped by DDP.
        task_loss: Scalar, cross-entropy over the current classes.
        structure_loss: Scalar, `bidirectional_kl` over the old classes; None in the first task.
        structure_weight: Lambda, at least 0; None takes the configuration's value.

    Raises:
        ValueError: If a loss is not a scalar, has no gradient in the parameters it is meant for, or is not finite
            (which is only checked on the CPU, where it costs nothing). No gradient is changed in this case.
        TypeError: If the model does not come from `get_peft_model`.

    Reference:
        Section "Routed Cross-Modal Training", "Gradient Routing".
    """
    with _summed_over_processes(model):
        routed_loss(model, task_loss, structure_loss, structure_weight).backward()


@contextmanager
def _summed_over_processes(model: nn.Module) -> Iterator[None]:
    """Sum the gradients that the block accumulates over all processes, and add the sums to `.grad`.

    If the block raises an error in one process, no gradient is changed in any.
    """
    if world()[1] == 1 or isinstance(model, nn.parallel.DistributedDataParallel):
        yield
        return
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    try:
        with raise_in_all():
            yield
        reached = zip(*gather_objects([parameter.grad is not None for parameter in parameters]), strict=True)
        summed = [parameter for parameter, anywhere in zip(parameters, map(any, reached), strict=True) if anywhere]
        for parameter in summed:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        sum_over_processes(parameter.grad for parameter in summed if parameter.grad is not None)
    except BaseException:
        for parameter in parameters:
            parameter.grad = None
        raise
    finally:
        for parameter, old in zip(parameters, before, strict=True):
            if old is not None:
                parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)


def routed_loss(
    model: nn.Module,
    task_loss: torch.Tensor,
    structure_loss: torch.Tensor | None,
    weight: float | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return task_loss + lambda structure_loss, whose `backward()` routes each loss to the parameters it is meant for.

    `task_loss` reaches every trainable parameter, `structure_loss` only B_S of every layer. Use this function instead
    of `route_gradients` if other code calls `backward()`, such as `accelerator.backward(loss)` or
    `scaler.scale(loss).backward()`. It computes the gradient g of the structure loss with respect to B_S, and adds
    sum(g B_S), whose only gradient is g in B_S.

    Args:
        model: A model from `get_peft_model` with one active dual-mode adapter. It may be wrapped by DDP.
        task_loss: Scalar, cross-entropy over the current classes.
        structure_loss: Scalar, `bidirectional_kl` over the old classes; None in the first task.
        weight: Lambda, at least 0; None takes the configuration's `structure_weight`.
        scale: The scale of a `torch.amp.GradScaler`, `scaler.get_scale()`. Without it, g would underflow in half
            precision.

    Returns:
        A scalar with the value of task_loss + lambda structure_loss.

    Raises:
        ValueError: If a loss is not a scalar, has no gradient in the parameters it is meant for, or is not finite
            (which is only checked on the CPU, where it costs nothing).
        TypeError: If the model does not come from `get_peft_model`.

    Example:
        >>> loss = routed_loss(model, task_loss, structure_loss)
        >>> accelerator.backward(loss)

    Reference:
        Section "Routed Cross-Modal Training", "Gradient Routing".
    """
    peft_model = peft_model_of(model)
    if structure_loss is not None and (structure_loss is task_loss or structure_loss.grad_fn is task_loss.grad_fn):
        raise ValueError(
            "structure_loss is the task loss itself: pass None in the first task, which has no old classes"
        )
    losses = {"task_loss": task_loss} | ({} if structure_loss is None else {"structure_loss": structure_loss})
    for name, loss in losses.items():
        if not isinstance(loss, torch.Tensor) or loss.ndim != 0:
            raise ValueError(f"{name} must be a scalar tensor, got {loss!r}")
        if loss.device.type == "cpu" and not torch.isfinite(loss):
            raise ValueError(f"{name} is {loss.item()}, expected a finite number")
    weight = peft_model.active_config.structure_weight if weight is None else weight
    check_number("structure_weight", weight, least=0)
    if not task_loss.requires_grad:
        raise ValueError("task_loss does not depend on any trainable parameter")
    peft_model.check_state("routed_loss")
    shared = [p for p in peft_model.shared_parameters() if p.requires_grad and p.numel()]
    if structure_loss is None or weight == 0 or not shared:
        return task_loss
    routed: tuple[torch.Tensor | None, ...] = ()
    if structure_loss.requires_grad:
        weighted = scale * weight * structure_loss
        routed = torch.autograd.grad(weighted, shared, retain_graph=True, allow_unused=True)
    pairs = [(p, gradient / scale) for p, gradient in zip(shared, routed) if gradient is not None]
    if not pairs:
        raise ValueError(
            "structure_loss has no gradient in any shared mode: compute it from the outputs of the vision tower, and "
            "use gradient checkpointing only with use_reentrant=False"
        )
    carrier = torch.stack([(p * gradient).sum() for p, gradient in pairs]).sum()
    return task_loss + weight * structure_loss.detach() + (carrier - carrier.detach())
