"""What is kept of the beginning of an adapter's task: whether it was planned, and what it changes."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from peft.utils import ModulesToSaveWrapper
from torch import nn

from dulbe_peft.adapter.base import Pair
from dulbe_peft.adapter.targets import in_text_tower

Wrappers = dict[str, ModulesToSaveWrapper]  # by name


@dataclass
class Beginning:
    """The beginning of the task that an adapter trains."""

    planned: bool = True  # False: the bases are the random ones with which the adapter was created
    # Copies of the adapter's `modules_to_save` in the vision tower, by name; None if they are not known.
    modules: dict[str, nn.Module] | None = None
    # Each layer's `copied`, by name; None if it is not known.
    layers: dict[str, tuple[Pair, Pair]] | None = None


def trained_modules(model: nn.Module, adapter: str) -> Wrappers:
    """Return PEFT's wrappers of the vision modules that an adapter trains as a whole, by name."""
    wrappers = ((name, m) for name, m in model.named_modules() if isinstance(m, ModulesToSaveWrapper))
    return {name: m for name, m in wrappers if adapter in m.modules_to_save and not in_text_tower(name)}


def copied_modules(model: nn.Module, adapter: str) -> dict[str, nn.Module]:
    """Return copies of an adapter's modules, which nobody trains."""
    wrappers = trained_modules(model, adapter)
    return {name: copy.deepcopy(m.modules_to_save[adapter]).requires_grad_(False) for name, m in wrappers.items()}


@contextmanager
def replaced(wrappers: Wrappers, adapter: str, others: Mapping[str, nn.Module]) -> Iterator[None]:
    """Put other modules in the place of an adapter's while the block runs, on the same device and in the same mode."""
    own = {name: wrapper.modules_to_save[adapter] for name, wrapper in wrappers.items()}
    for name, module in own.items():
        parameter = next(module.parameters(), None)
        other = others[name].to(None if parameter is None else parameter.device).train(module.training)
        wrappers[name].modules_to_save[adapter] = other
    try:
        yield
    finally:
        for name, module in own.items():
            wrappers[name].modules_to_save[adapter] = module
