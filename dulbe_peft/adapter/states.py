"""The states of an adapted model in which an operation would be wrong, and the check that each operation makes first.

An operation that is not in the table, or not refused in a state, is right there. A test goes through all operations,
PEFT's too, in all states. Three things are refused elsewhere, because they depend on more than the state: a forward
pass of an adapter other than the one that a block holds, the deletion of an adapter that a block uses (both in
`base.py`), and loading other weights into an adapter that a block holds (in `saved.py`).
"""

from collections import Counter
from collections.abc import Callable, Sequence

from torch import nn

from dulbe_peft.adapter.base import DualModeLayer
from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.utils.processes import refuse_offloaded, refuse_sharded

_BLOCK = (
    "a block is running that holds, scales or leaves out weights (held_weights, scaled, scaled_history, previous_task)"
)
Layers = dict[str, DualModeLayer]


def _merged(model: nn.Module, layers: Layers) -> str | None:
    merged = sorted({name for layer in layers.values() for name in layer.merged_adapters})
    return f"adapters {merged} are merged into the base weights: call unmerge_adapter() first" if merged else None


def _any(found: Callable[[DualModeLayer], bool], problem: str) -> Callable[[nn.Module, Layers], str | None]:
    """Return a check that says `problem` if it is `found` in a layer."""
    return lambda model, layers: problem if any(map(found, layers.values())) else None


def _trains_bases(layer: DualModeLayer) -> bool:
    return isinstance(layer, DualModeLinear) and any(basis.requires_grad for basis in layer.dulbe_P.values())


def _packed(model: nn.Module, layers: Layers) -> str | None:
    packed = [name for name, layer in layers.items() if layer.packed]
    if not packed:
        return None
    return (
        f"layer {packed[0]!r} is quantised, or its class has its own forward ({len(packed)} such layers), so no "
        "update can be merged into it: use the adapter unmerged, or load the base model unquantised"
    )


def _tied(model: nn.Module, layers: Layers) -> str | None:
    """Find weights of adapted layers that other parts of the model use too: each would get the other's update."""
    weights = {id(layer.get_base_layer()._parameters.get("weight")): name for name, layer in layers.items()}
    seen = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    tied = [name for key, name in weights.items() if seen[key] > 1]
    if not tied:
        return None
    return (
        f"the weight of layer {tied[0]!r} is also used elsewhere in the model ({len(tied)} such weights), which would "
        "get this layer's update: use the adapter unmerged"
    )


STATES: dict[str, Callable[[nn.Module, Layers], str | None]] = {
    # Parameters are in parts, also while a pass has gathered them.
    "sharded": lambda model, layers: refuse_sharded(model),
    "merged": _merged,
    "held": _any(lambda layer: layer.held_adapter is not None, f"{_BLOCK}: call this before or after the block"),
    # In such a block, and the outputs are not those of the saved adapter.
    "altered": _any(
        lambda layer: not layer.acts_as_saved,
        f"{_BLOCK}, so the outputs are not those of the saved adapter: call this before or after the block",
    ),
    # In such a block, and it replaces the weights or the modes.
    "replaced": _any(
        lambda layer: isinstance(layer, DualModeLinear) and layer.is_replaced,
        f"{_BLOCK}: call this before or after the block",
    ),
    "mixed": _any(
        lambda layer: layer._rows is not None,
        "a block is running in which each row names its adapter: call this after the block",
    ),
    "disabled": _any(
        lambda layer: layer.disable_adapters,
        "the adapter is disabled, so its modes do not act: call this outside of disable_adapter()",
    ),
    "trained_bases": _any(
        _trains_bases, "a block of trained_bases is running: begin or fold a task before or after the block"
    ),
    "packed": _packed,  # quantised, for example
    "tied": _tied,  # another part of the model uses the same weight
    "meta": lambda model, layers: refuse_offloaded(model),  # parameters without values
}
_BETWEEN_TASKS = ("sharded", "merged", "held", "disabled", "trained_bases", "meta")
_SAVED = ("sharded", "altered", "meta")
_MERGE = ("sharded", "held", "mixed", "packed", "tied")
REFUSED: dict[str, Sequence[str]] = {
    "begin_task": _BETWEEN_TASKS,
    "fold_task": _BETWEEN_TASKS,
    "fold_if_trained": _BETWEEN_TASKS,
    "keep_share": _BETWEEN_TASKS,
    "keep": _BETWEEN_TASKS,
    "merge_adapter": _MERGE,
    "merge_and_unload": _MERGE,
    "collect_statistics": ("sharded", "altered", "mixed", "disabled"),
    "probe_gradients": ("sharded", "merged", "altered", "mixed", "disabled", "meta"),
    "routed_loss": ("sharded",),
    "get_peft_model_state_dict": _SAVED,
    "export_lora": _SAVED,
    "add_weighted_adapter": ("sharded", "meta"),
    "held_weights": ("sharded", "merged", "disabled", "mixed", "altered"),
    "previous_task": ("sharded", "merged", "disabled", "mixed", "replaced"),
    "scaled": ("sharded", "merged", "disabled", "mixed", "meta"),
    "scaled_history": ("sharded", "merged", "disabled", "mixed", "altered", "meta"),
    "rows_with_adapters": ("merged", "disabled", "held"),
    "learn_task": ("merged", "held"),
    "update_classes": ("held",),
}


def check_state(model: nn.Module, operation: str) -> None:
    """Raise a `ValueError` that names the state and what to do if the operation would be wrong in a model's state."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, DualModeLayer)}
    for state in REFUSED[operation]:
        problem = STATES[state](model, layers)
        if problem is not None:
            raise ValueError(problem)
