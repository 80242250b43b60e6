"""The adapted linear layers of the vision tower.

    x (.., d_in) ──┬── W = W_0 + B_hist P_hist'  (frozen, folded once, d_out x d_in) ──┬── + ── y (.., d_out)
                   └── P = [P_S P_R] (frozen, d_in x r) ── B = [B_S B_R] (trained) ────┘

W_0 is never written to: the folded weight is a cache beside it, recomputed from W_0 and the saved factors by
`DualModeLinear.folded_weight` alone. A model that learned and a model that was loaded therefore agree bit for bit, and
disabling or unloading the adapter gives the pristine base model. Only an explicit `merge` writes to the base weight,
and it keeps the pristine one beside it, so `unmerge` is exact too.

Which weight a forward pass of the vision tower's layer uses, and whether it adds the current modes:

| state | set by | weight | modes |
| --- | --- | --- | --- |
| normal | | W_0 + B_hist P_hist', cached | on |
| held | `layer.holding(weight)` | the given one; further updates are added where given | on, or off as asked |
| scaled | `layer.scaled(adapter, scale)` | W_0 + scale * (B_hist P_hist' + B P') | off: they are in the weight |
| resting | `layer.resting()` | as above | off |
| merged, or adapter disabled | PEFT | the base layer's own | off |
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from peft.tuners._buffer_dict import BufferDict
from torch import nn

from dulbe_peft.adapter.base import DualModeLayer
from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.adapter.linear import Updates, updated_linear
from dulbe_peft.utils.precision import without_autocast


class _Held(NamedTuple):
    weight: torch.Tensor
    updates: Callable[[], Updates]
    modes: bool


class DualModeLinear(DualModeLayer):
    """A linear layer with a frozen history and one shared and one residual mode per adapter.

    Attributes:
        dulbe_P: adapter name -> P = [P_S P_R], (d_in, r_S + r_R), float32, orthonormal columns, frozen.
        dulbe_shared_B: adapter name -> B_S, (d_out, r_S), trainable.
        dulbe_residual_B: adapter name -> B_R, (d_out, r_R), trainable.
        dulbe_history_P: adapter name -> (d_in, history rank), the bases of all finished tasks, frozen.
        dulbe_history_B: adapter name -> (d_out, history rank), their up-projections, frozen.

    Reference:
        Section "Subspace-Frozen Parameterization".
    """

    adapter_layer_names = ("dulbe_shared_B", "dulbe_residual_B")
    other_param_names = ("dulbe_P", "dulbe_history_P", "dulbe_history_B")

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: DualModeLoraConfig) -> None:
        super().__init__(base_layer)
        self.dulbe_P = BufferDict({}, persistent=True)
        self.dulbe_history_P = BufferDict({}, persistent=True)
        self.dulbe_history_B = BufferDict({}, persistent=True)
        self.dulbe_shared_B = nn.ParameterDict({})
        self.dulbe_residual_B = nn.ParameterDict({})
        # (cache key, source tensors, weight); the sources are kept alive so their ids stay unique.
        self._folded: tuple[tuple[Any, ...], tuple[torch.Tensor, ...], torch.Tensor] | None = None
        self._held: _Held | None = None
        self._resting = False
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: DualModeLoraConfig) -> None:
        """Add `adapter_name`: random orthonormal bases, B = 0 (or random with `init_weights=False`), zero history."""
        rank = config.shared_rank + config.residual_rank
        basis = torch.linalg.qr(torch.randn(self.in_features, rank, dtype=torch.float32))[0]
        self.dulbe_P[adapter_name] = basis.contiguous()
        self.dulbe_history_P[adapter_name] = torch.zeros(self.in_features, config.history_rank, dtype=torch.float32)
        self.dulbe_history_B[adapter_name] = torch.zeros(self.out_features, config.history_rank, dtype=torch.float32)
        modes = (self.dulbe_shared_B, config.shared_rank), (self.dulbe_residual_B, config.residual_rank)
        for container, rank in modes:
            up = torch.zeros(self.out_features, rank, dtype=torch.float32)
            if not config.init_weights and rank:
                nn.init.kaiming_uniform_(up, a=math.sqrt(5))
            container[adapter_name] = nn.Parameter(up)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        super()._move_adapter_to_device_of_base_layer(adapter_name, device)
        for name in self.other_param_names:  # the frozen factors stay in float32 over a half-precision base
            buffers = getattr(self, name)
            if adapter_name in buffers:
                buffers[adapter_name] = buffers[adapter_name].float()

    def folded_weight(self, adapter: str) -> torch.Tensor:
        """W_0 + B_hist P_hist', (d_out, d_in) in the base weight's dtype; W_0 itself where there is no history.

        The one place where an effective weight is made, and cached until a factor changes. What is written through
        `.data`, or to tensors of inference mode, is not noticed.
        """
        base = self._linear.weight
        factors = self.dulbe_history_B[adapter], self.dulbe_history_P[adapter]
        if factors[0].shape[1] == 0:
            return base
        if base.requires_grad or torch.compiler.is_compiling():
            return _fold(base, *factors)
        key = tuple(_identity(tensor) for tensor in (base, *factors))
        if self._folded is None or self._folded[0] != key:
            with torch.inference_mode(False), torch.no_grad():
                self._folded = key, (base, *factors), _fold(base, *factors)
        return self._folded[2]

    @torch.no_grad()
    def scaled_weight(self, adapter: str, scale: float, modes: bool = False) -> torch.Tensor:
        """W_0 + scale * B_hist P_hist', (d_out, d_in) in the base weight's dtype; with `modes` also scale * B P'."""
        up, down = self.dulbe_history_B[adapter], self.dulbe_history_P[adapter]
        if modes:
            up = torch.cat([up, self.current_up(adapter)], dim=1)
            down = torch.cat([down, self.dulbe_P[adapter]], dim=1)
        return _fold(self._linear.weight, scale * up, down)

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """History and current modes together, (d_out, d_in) in float32."""
        up, history_up = self.current_up(adapter).float(), self.dulbe_history_B[adapter].float()
        with without_autocast(up):
            current = up @ self.dulbe_P[adapter].float().T
            return torch.addmm(current, history_up, self.dulbe_history_P[adapter].float().T)

    def current_up(self, adapter: str) -> torch.Tensor:
        """B = [B_S B_R], (d_out, r_S + r_R)."""
        return torch.cat([self.dulbe_shared_B[adapter], self.dulbe_residual_B[adapter]], dim=1)

    def history_rank(self, adapter: str) -> int:
        """Rank of `adapter`'s folded history."""
        return int(self.dulbe_history_B[adapter].shape[1])

    def is_trained(self, adapter: str) -> bool:
        """Whether any current up-projection differs from zero."""
        return bool(self.dulbe_shared_B[adapter].any() or self.dulbe_residual_B[adapter].any())

    def holding(
        self, weight: torch.Tensor, updates: Callable[[], Updates] = list, modes: bool = True
    ) -> AbstractContextManager[None]:
        """Use `weight`, (d_out, d_in), for W_0 and history, and add `updates()`, pairs of P and B, in every pass."""
        return self._temporarily("_held", _Held(weight, updates, modes))

    def scaled(self, adapter: str, scale: float) -> AbstractContextManager[None]:
        # With nothing held, scale 1 is the layer as it is, bit for bit.
        held = None if scale == 1 else _Held(self.scaled_weight(adapter, scale, modes=True), list, False)
        return self._temporarily("_held", held)

    def resting(self) -> AbstractContextManager[None]:
        """Leave out the current modes: the history alone."""
        return self._temporarily("_resting", True)

    @torch.no_grad()
    def fold(self, adapter: str) -> None:
        """Append the current modes to the history and set B = 0."""
        up = self.current_up(adapter).float()
        self.dulbe_history_B[adapter] = torch.cat([self.dulbe_history_B[adapter], up], dim=1)
        self.dulbe_history_P[adapter] = torch.cat([self.dulbe_history_P[adapter], self.dulbe_P[adapter]], dim=1)
        self._zero_up_projections(adapter)

    @torch.no_grad()
    def install_bases(self, adapter: str, shared: torch.Tensor, residual: torch.Tensor) -> None:
        """Freeze P = [P_S P_R], (d_in, r_S) and (d_in, r_R), as the current bases and set B = 0."""
        device = self.dulbe_P[adapter].device
        self.dulbe_P[adapter] = torch.cat([shared, residual], dim=1).to(device, torch.float32).contiguous()
        self._zero_up_projections(adapter)

    def _zero_up_projections(self, adapter: str) -> None:
        for container in (self.dulbe_shared_B, self.dulbe_residual_B):
            container[adapter].data.zero_()
            container[adapter].grad = None

    @torch.no_grad()
    def set_up_projections(self, adapter: str, up: torch.Tensor) -> None:
        """Write B = [B_S B_R], (d_out, r_S + r_R)."""
        shared_rank = self.dulbe_shared_B[adapter].shape[1]
        self.dulbe_shared_B[adapter].copy_(up[:, :shared_rank])
        self.dulbe_residual_B[adapter].copy_(up[:, shared_rank:])

    def _adapted_forward(self, x: torch.Tensor) -> torch.Tensor:
        linear, held = self._linear, self._held
        weight = linear.weight if held is None else held.weight
        updates = [] if held is None else held.updates()
        modes = not self._resting and (held is None or held.modes)
        for name in self.adapters_here(self.active_adapters):
            if held is None and weight is linear.weight:
                weight = self.folded_weight(name)
            elif held is None and self.history_rank(name):
                # A second adapter's history, beside the folded first one's.
                updates.append((self.dulbe_history_P[name], self.dulbe_history_B[name]))
            if modes:
                updates.append((self.dulbe_P[name], self.current_up(name).to(self.dulbe_P[name].dtype)))
        return updated_linear(x, weight.to(linear.weight.dtype), linear.bias, updates)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_folded": None, "_held": None, "_resting": False}

    def _apply(self, fn: Any, recurse: bool = True) -> DualModeLayer:
        self._folded = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Resize the history to the length in the state before its values are copied in."""
        self._folded = None
        for attribute, size in (("dulbe_history_P", self.in_features), ("dulbe_history_B", self.out_features)):
            buffers = getattr(self, attribute)
            for name in list(buffers):
                saved = state_dict.get(f"{prefix}{attribute}.{name}")
                if saved is not None and saved.ndim == 2 and saved.shape[0] == size:
                    buffers[name] = buffers[name].new_zeros(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _identity(tensor: torch.Tensor) -> tuple[int, ...]:
    """Changes where the tensor is another one or is written to; inference tensors do not count what is written."""
    return id(tensor), tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


def _fold(base: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(base.dtype, torch.float32)
    with without_autocast(base):
        return torch.addmm(base.to(dtype), up.to(dtype), down.to(dtype).T).to(base.dtype)
