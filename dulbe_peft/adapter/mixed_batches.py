"""Batches in which each row names the adapter to use, as in PEFT's LoRA."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from peft.tuners.tuners_utils import BaseTuner
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from dulbe_peft.adapter.base import DualModeLayer
from dulbe_peft.adapter.layer import DualModeLinear
from dulbe_peft.adapter.targets import in_text_tower

INPUTS = ("pixel_values", "input_ids")
BASE = "__base__"

Rows = Sequence[str] | Mapping[str, Sequence[str]]


@contextmanager
def rows_with_adapters(tuner: BaseTuner, names: Rows) -> Iterator[None]:
    """Apply to each row the adapter that `names` gives it: a list of names, or one list for each of `INPUTS`."""
    rows = names if isinstance(names, Mapping) else dict.fromkeys(INPUTS, names)
    if set(rows) != set(INPUTS):
        raise ValueError(f"adapter_names must be a list, or a mapping with the keys {INPUTS}, got {list(rows)}")
    known = [*tuner.peft_config, BASE]
    unknown = sorted({name for row_names in rows.values() for name in row_names}.difference(known))
    if unknown:
        raise ValueError(f"adapter_names has {unknown}, but the adapters of the model are {known}")
    if tuner.training:
        raise ValueError("adapter_names requires a model in evaluation mode: call eval()")
    if any(isinstance(module, DualModeLinear) and module.weight_overridden for module in tuner.modules()):
        raise ValueError("adapter_names cannot be given inside a block that scales or replaces the model's weights")
    with ExitStack() as hooks:
        for name, module in tuner.model.named_modules():
            if isinstance(module, (DualModeLayer, AuxiliaryTrainingWrapper)):
                hook = partial(_add_names, [*rows[INPUTS[in_text_tower(name)]]])
                hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _add_names(names: list[str], _: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, kwargs | {"adapter_names": names}
