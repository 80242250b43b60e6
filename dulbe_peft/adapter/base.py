"""What the adapted layers of both towers share: merging, unmerging and the choice of branch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import nn


class DualModeLayer(BaseTunerLayer, nn.Module):
    """A linear layer and the adapters' updates of it, beside the base weight or, after `merge`, in it."""

    if TYPE_CHECKING:  # PEFT's base class carries no types

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self._pristine_weight: torch.Tensor | None = None
        linear = self.get_base_layer()
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"a dual-mode layer wraps torch.nn.Linear, got {type(linear).__name__}")
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.register_state_dict_post_hook(_restore_pristine)

    @property
    def _linear(self) -> nn.Linear:
        return cast(nn.Linear, self.get_base_layer())

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """The whole update of `adapter`, (d_out, d_in) in float32."""
        raise NotImplementedError

    def scaled(self, adapter: str, scale: float) -> AbstractContextManager[None]:
        """Use W_0 + scale * dW, with dW as `get_delta_weight` has it, while a block runs; inner blocks win."""
        raise NotImplementedError

    def _adapted_forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def adapters_here(self, names: Iterable[str]) -> list[str]:
        """The adapters among `names` that this layer has."""
        container = getattr(self, self.adapter_layer_names[0])
        return [name for name in names if name in container]

    @contextmanager
    def _temporarily(self, attribute: str, value: Any) -> Iterator[None]:
        before = getattr(self, attribute)
        setattr(self, attribute, value)
        try:
            yield
        finally:
            setattr(self, attribute, before)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Write updates, of the active adapters by default, into the base weight, and keep the pristine weight."""
        for name in self.adapters_here(check_adapters_to_merge(self, adapter_names)):
            weight = self._linear.weight
            with torch.no_grad():
                delta = self.get_delta_weight(name).to(weight.device)
                merged = (weight.data.float() + delta).to(weight.dtype)
            if safe_merge and not torch.isfinite(merged).all():
                raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
            if self._pristine_weight is None:
                self._pristine_weight = weight.data
            weight.data = merged
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Put the pristine base weight back, bit for bit."""
        if self._pristine_weight is None:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        weight = self._linear.weight
        weight.data = self._pristine_weight.to(device=weight.device, dtype=weight.dtype)
        self._pristine_weight = None
        self.merged_adapters.clear()

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.disable_adapters and self.merged:
            self.unmerge()
        if self.disable_adapters or self.merged:
            return self.base_layer(x, *args, **kwargs)
        return self._adapted_forward(x)

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        return True  # the update is additive

    def _apply(self, fn: Any, recurse: bool = True) -> DualModeLayer:
        if self._pristine_weight is not None:
            self._pristine_weight = fn(self._pristine_weight)
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """New base weights, or new values of a merged adapter, are for the unmerged layer."""
        own = tuple(f".{name}" for name in self.merged_adapters)
        keys = (key for key in state_dict if key.startswith(prefix))
        if self.merged and any(key == prefix + "base_layer.weight" or key.endswith(own) for key in keys):
            self.unmerge()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __repr__(self) -> str:
        return "dulbe." + super().__repr__()


def _restore_pristine(layer: DualModeLayer, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """A state dict carries the pristine base weight, also while an adapter is merged."""
    if layer._pristine_weight is not None:
        state_dict[prefix + "base_layer.weight"] = layer._pristine_weight
