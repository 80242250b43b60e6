"""The base class of the adapted layers in both towers: merging, unmerging and the choice of branch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate.utils import align_module_device
from peft.tuners._buffer_dict import BufferDict
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge, onload_layer
from peft.utils.quantization_utils import resolve_quantization_backend
from torch import nn

from dulbe_peft.adapter.linear import add_updates

_FORWARD = nn.Linear.forward
Pair = tuple[torch.Tensor, torch.Tensor]  # P or A, and B
L = TypeVar("L", bound="DualModeLayer")


def quantization(layer: nn.Module) -> Any:
    """Return PEFT's backend for a quantised layer, or None for any other layer."""
    # PEFT needs torchao's function only to merge, and quantised layers are never merged here.
    return resolve_quantization_backend(layer, get_apply_tensor_subclass=object)


def between(share: float, before: Pair, after: Pair) -> Pair:
    """Return the pair of factors, P and B, that lies `share` of the way from `before` to `after`.

    If the update was zero before, that is `share` times the update after, exactly.
    """
    if not before[1].any():
        return after[0], share * after[1]
    down, up = (old.to(new).lerp(new, share) for old, new in zip(before, after, strict=True))
    return down, up


def is_linear(layer: nn.Module) -> bool:
    """Return whether the layer is linear, quantised or not, so that an adapter can stand beside it."""
    backend = None if isinstance(layer, nn.Linear) else quantization(layer)
    return isinstance(layer, nn.Linear) or (backend is not None and backend.layer_type == "linear")


@contextmanager
def temporarily(owner: object, attribute: str, value: object) -> Iterator[None]:
    """Set an attribute to another value while the block runs."""
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        last = getattr(owner, attribute)
        # If an earlier block ended first, the attribute is at rest: it must not be set to that block's value again.
        if last is value or last:
            setattr(owner, attribute, before)
        if last is not value:
            raise ValueError("a block of the adapter ends while a later one is running: leave them in reverse order")


def layers_of(model: nn.Module, adapter: str, kind: type[L]) -> dict[str, L]:
    """Return the layers of class `kind` that have the adapter, by dotted name."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
    return {name: layer for name, layer in layers.items() if layer.present_adapters([adapter])}


class DualModeLayer(BaseTunerLayer, nn.Module):
    """A linear layer and its adapters' updates, which stand beside the base weight until `merge` adds them to it.

    Subclasses define `updates(adapter)`, the whole update as factors; `get_delta_weight(adapter, dtype)`, the same
    update as a matrix, (d_out, d_in), in `dtype` or a wider type; `scaled(adapter, scale)`, a context manager inside
    which the layer uses W_0 + scale * dW; `acts_as_saved`; and `scale_update(adapter, scale)`, which multiplies dW.
    """

    if TYPE_CHECKING:  # PEFT's base class carries no types

        def __getattr__(self, name: str) -> Any: ...

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self._disable_adapters = False
        self.merged_adapters: list[str] = []
        self._pristine_weight: torch.Tensor | None = None
        self.cast_input_dtype_enabled = False  # PEFT's helper sets it; inputs are only cast to the bases' dtype
        self._held: Any = None  # what a running block uses in place of the weights of the adapter `_held.adapter`
        self._rows: list[str] | None = None  # inside a block in which each row names its adapter
        self.in_features: int = self._linear.in_features
        self.out_features: int = self._linear.out_features
        self.register_state_dict_post_hook(_restore_pristine)

    @property
    def _linear(self) -> Any:
        return self.get_base_layer()

    @property
    def packed(self) -> bool:
        """Whether no update can be merged, because the base layer is quantised or its class has its own `forward`."""
        linear = self._linear
        return type(linear._parameters.get("weight")) is not nn.Parameter or type(linear).forward is not _FORWARD

    @property
    def plain(self) -> bool:
        """Whether the base layer currently computes x W' + bias, without hooks, from a weight that is not offloaded.

        If it is packed, has hooks or a `forward` of its own, or if its weight is offloaded, the base layer is called
        and all updates are added to its output.
        """
        linear = self._linear
        return not (
            linear._forward_hooks
            or linear._forward_pre_hooks
            or linear._backward_hooks
            or linear._backward_pre_hooks
            or "forward" in linear.__dict__
            or type(linear).forward is not _FORWARD
            or type(weight := linear._parameters.get("weight")) is not nn.Parameter
            or weight.is_meta
        )

    def get_base_weight(self) -> torch.Tensor:
        """Return W_0, (d_out, d_in). PEFT unpacks the weight of a quantised layer."""
        backend = quantization(self._linear)
        weight: torch.Tensor = self._linear.weight if backend is None else backend.get_base_weight(self._linear)
        if not weight.is_floating_point() or weight.shape != (self.out_features, self.in_features):
            raise ValueError(f"this needs the weight of a {type(self._linear).__name__}, which cannot be unpacked")
        return weight

    @property
    def held_adapter(self) -> str | None:
        """The adapter whose weights a running block holds, scales or leaves out."""
        return None if self._held is None else str(self._held.adapter)

    @property
    def holds_history_only(self) -> bool:
        """Whether a running block holds the history and leaves the current modes as they are."""
        return False

    @property
    def acts_as_saved(self) -> bool:
        """Whether no block is running in which the outputs differ from those of the saved adapter."""
        raise NotImplementedError

    def present_adapters(self, names: Iterable[str]) -> list[str]:
        """Return those of `names` that are adapters of this layer."""
        container = getattr(self, self.adapter_layer_names[0])
        return [name for name in names if name in container]

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Add updates (by default those of the active adapters) to the base weight, and keep the pristine weight."""
        for name in self.present_adapters(check_adapters_to_merge(self, adapter_names)):
            weight = self._linear.weight
            dtype = torch.promote_types(weight.dtype, torch.float32)
            with torch.no_grad():
                delta = self.get_delta_weight(name, dtype).to(weight.device)
                merged = (weight.data.to(dtype) + delta).to(weight.dtype)
            if safe_merge and not torch.isfinite(merged).all():
                raise ValueError(f"NaNs detected in the merged weights. The adapter {name} seems to be broken")
            if self._pristine_weight is None:
                self._pristine_weight = weight.data
            weight.data = merged
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """Restore the pristine base weight, bit for bit."""
        if self._pristine_weight is None:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        weight = self._linear.weight
        if weight.is_meta:  # offloaded: PEFT loads it for the block and offloads it again
            with onload_layer(self):
                return self.unmerge()
        weight.data = self._pristine_weight.to(device=weight.device, dtype=weight.dtype)
        self._pristine_weight = None
        self.merged_adapters.clear()

    def forward(self, x: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if self.disable_adapters and self.merged:
            self.unmerge()
        if self.disable_adapters or (self.merged and self._rows is None):
            return self.base_layer(x, *args, **kwargs)
        if self._held is not None or self._rows is not None:
            self._check_block()
        offloaded = [part for part in self._modules.values() if part is not None and "_hf_hook" in part.__dict__]
        with _onloaded(offloaded) if offloaded else nullcontext():
            return self._adapted_forward(x) if self._rows is None else self._mixed_forward(x, self._rows)

    def _check_block(self) -> None:
        """Raise an error if a running block does not fit what the layer would compute."""
        if self._rows is not None and (self._held is not None or self.merged):
            raise ValueError(
                "adapter_names cannot be given while an adapter is merged, or inside a block that scales or replaces "
                "the model's weights"
            )
        if self._held is not None and self.active_adapters != [self._held.adapter]:
            raise ValueError(
                f"a block is running that holds, scales or leaves out weights of the adapter {self._held.adapter!r}, "
                f"but {self.active_adapters} is active: call set_adapter after the block"
            )

    def _adapted_forward(self, x: torch.Tensor) -> torch.Tensor:
        updates = [update for name in self.present_adapters(self.active_adapters) for update in self.updates(name)]
        return add_updates(self.base_layer(x), x, updates)

    def _mixed_forward(self, x: torch.Tensor, names: list[str]) -> torch.Tensor:
        """Apply to each row of x, (n, ..., d_in), the adapter named for it. Unknown names leave the base output."""
        if len(x) != len(names):
            raise ValueError(f"adapter_names has {len(names)} names, but the input of a layer has {len(x)} rows")
        result = self.base_layer(x)
        for name in self.present_adapters(dict.fromkeys(names)):
            rows = torch.tensor([row for row, row_name in enumerate(names) if row_name == name], device=x.device)
            result = result.index_copy(0, rows, add_updates(result[rows], x[rows], self.updates(name)))
        return result

    def check_unused(self, adapter_name: str) -> None:
        """Raise an error if a running block uses the adapter, which must not be deleted then."""
        if self.held_adapter == adapter_name or adapter_name in (self._rows or ()):
            raise ValueError(f"a block is running that uses the adapter {adapter_name!r}: delete it after the block")

    def delete_adapter(self, adapter_name: str) -> None:
        self.check_unused(adapter_name)
        super().delete_adapter(adapter_name)

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_held": None, "_rows": None}

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        return True  # the update is additive

    def _apply(self, fn: Any, recurse: bool = True) -> DualModeLayer:
        if self._pristine_weight is not None:
            self._pristine_weight = fn(self._pristine_weight)
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *args: object) -> None:
        """Load the state dict; unmerge first if it holds the base weight or values of a merged adapter."""
        merged_endings = tuple(f".{name}" for name in self.merged_adapters)
        keys = (key for key in state_dict if key.startswith(prefix))
        if self.merged and any(key == prefix + "base_layer.weight" or key.endswith(merged_endings) for key in keys):
            self.unmerge()
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __repr__(self) -> str:
        return "dulbe." + super().__repr__()


@contextmanager
def _onloaded(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Load the adapter's offloaded parameters while the block runs; the base layer has its own hook for this."""
    with ExitStack() as stack:
        for module in modules:
            if isinstance(module, (nn.ParameterDict, BufferDict)):
                stack.enter_context(align_module_device(module))
        yield


def _restore_pristine(layer: DualModeLayer, state_dict: dict[str, object], prefix: str, _: object) -> None:
    """Put the pristine base weight into the state dict, also while an adapter is merged."""
    if layer._pristine_weight is not None:
        state_dict[prefix + "base_layer.weight"] = layer._pristine_weight
