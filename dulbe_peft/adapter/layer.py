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
| resting | `resting(layers)`, for this thread alone | as above | off |
| merged, or adapter disabled | PEFT | the base layer's own | off |
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from peft.tuners._buffer_dict import BufferDict
from torch import nn

from dulbe_peft.adapter.base import DualModeLayer
from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.adapter.linear import Updates, updated_linear
from dulbe_peft.utils.precision import without_autocast

# The layers whose modes are off, one set for each block. A context variable, so that threads do not see each other's.
_RESTING: ContextVar[tuple[frozenset[DualModeLinear], ...]] = ContextVar("_RESTING", default=())
_COUNTING = threading.Lock()


@contextmanager
def resting(layers: Iterable[DualModeLinear]) -> Iterator[None]:
    """Leave out the layers' current modes in this thread: their history alone.

    Compiled code cannot read a context variable. It reads a count on each layer, which all threads share.
    """
    block = frozenset(layers)
    with _COUNTING:
        for layer in block:
            layer._rests += 1
    _RESTING.set((*_RESTING.get(), block))
    try:
        yield
    finally:
        _RESTING.set(tuple(other for other in _RESTING.get() if other is not block))
        with _COUNTING:
            for layer in block:
                layer._rests -= 1


class DualModeLinear(DualModeLayer):
    """A linear layer with a frozen history and one shared and one residual mode per adapter.

    Attributes:
        in_features: d_in.
        out_features: d_out.
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
        self._rests = 0  # how many `resting` blocks hold this layer, of all threads
        self._held: tuple[torch.Tensor, Callable[[], Updates] | None, bool] | None = None
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: DualModeLoraConfig) -> None:
        """Add `adapter_name`: random orthonormal bases, B = 0 (or random with `init_weights=False`), zero history."""
        shared_rank, residual_rank = config.shared_rank, config.residual_rank
        weight = self._linear.weight
        device = weight.device
        kind: dict[str, Any] = {"device": device, "dtype": torch.float32}
        cpu_basis = torch.linalg.qr(torch.randn(self.in_features, shared_rank + residual_rank, dtype=torch.float32))[0]
        self.dulbe_P[adapter_name] = cpu_basis.contiguous().to(device)
        self.dulbe_history_P[adapter_name] = torch.zeros(self.in_features, config.history_rank, **kind)
        self.dulbe_history_B[adapter_name] = torch.zeros(self.out_features, config.history_rank, **kind)
        for container, rank in ((self.dulbe_shared_B, shared_rank), (self.dulbe_residual_B, residual_rank)):
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

    # ------------------------------------------------------------------ the frozen history

    def history_rank(self, adapter: str) -> int:
        """Rank of `adapter`'s folded history."""
        return int(self.dulbe_history_B[adapter].shape[1])

    def basis_shapes(self, adapter: str) -> tuple[tuple[int, int], tuple[int, int]]:
        """(d_in, r_S) and (d_in, r_R)."""
        ranks = self.dulbe_shared_B[adapter].shape[1], self.dulbe_residual_B[adapter].shape[1]
        return (self.in_features, ranks[0]), (self.in_features, ranks[1])

    def folded_weight(self, adapter: str) -> torch.Tensor:
        """W_0 + B_hist P_hist', (d_out, d_in) in the base weight's dtype; W_0 itself where there is no history.

        The one place where an effective weight is made. The result is cached until the adapter, the base weight or
        the history changes; what is written through `.data`, or to tensors of inference mode, is not noticed. Compiled
        code makes it in every pass, and so does a layer whose base weight is trained.
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
        base = self._linear.weight
        up, down = self.dulbe_history_B[adapter], self.dulbe_history_P[adapter]
        if modes:
            up, down = (
                torch.cat([up, self.current_up(adapter)], dim=1),
                torch.cat([down, self.dulbe_P[adapter]], dim=1),
            )
        return _fold(base, scale * up, down)

    def current_delta(self, adapter: str) -> torch.Tensor:
        """B P' of the current task's modes, (d_out, d_in) in float32."""
        up = self.current_up(adapter)
        with without_autocast(up):
            return up.float() @ self.dulbe_P[adapter].float().T

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """History and current modes together, (d_out, d_in) in float32."""
        if adapter not in self.dulbe_shared_B:
            raise self._missing(adapter)
        history_up, history_down = self.dulbe_history_B[adapter].float(), self.dulbe_history_P[adapter].float()
        with without_autocast(history_up):
            return torch.addmm(self.current_delta(adapter), history_up, history_down.T)

    def is_trained(self, adapter: str) -> bool:
        """Whether any current up-projection differs from zero."""
        return bool(self.dulbe_shared_B[adapter].any() or self.dulbe_residual_B[adapter].any())

    def holding(
        self, weight: torch.Tensor, updates: Callable[[], Updates] | None = None, modes: bool = True
    ) -> AbstractContextManager[None]:
        """Use `weight` in place of W_0 and all history, and add what `updates` returns in every forward pass.

        Args:
            weight: (d_out, d_in).
            updates: returns pairs of P, (d_in, r), and B, (d_out, r).
            modes: whether the current modes are added, too; False where `updates` has them in another form.
        """
        return self._holding((weight, updates, modes))

    def scaled(self, adapter: str, scale: float) -> AbstractContextManager[None]:
        # With nothing held, scale 1 is the layer as it is, bit for bit.
        return self._holding(None if scale == 1 else (self.scaled_weight(adapter, scale, modes=True), None, False))

    @contextmanager
    def _holding(self, held: tuple[torch.Tensor, Callable[[], Updates] | None, bool] | None) -> Iterator[None]:
        before, self._held = self._held, held
        try:
            yield
        finally:
            self._held = before

    def current_up(self, adapter: str) -> torch.Tensor:
        """B = [B_S B_R], (d_out, r_S + r_R)."""
        return torch.cat([self.dulbe_shared_B[adapter], self.dulbe_residual_B[adapter]], dim=1)

    @torch.no_grad()
    def fold(self, adapter: str) -> None:
        """Append the current modes to the history and set B = 0."""
        up = self.current_up(adapter).float()
        self.dulbe_history_B[adapter] = torch.cat([self.dulbe_history_B[adapter], up], dim=1)
        self.dulbe_history_P[adapter] = torch.cat([self.dulbe_history_P[adapter], self.dulbe_P[adapter]], dim=1)
        self._zero_up_projections(adapter)

    @torch.no_grad()
    def set_up_projections(self, adapter: str, up: torch.Tensor) -> None:
        """Write B = [B_S B_R], (d_out, r_S + r_R)."""
        shared_rank = self.dulbe_shared_B[adapter].shape[1]
        self.dulbe_shared_B[adapter].copy_(up[:, :shared_rank])
        self.dulbe_residual_B[adapter].copy_(up[:, shared_rank:])

    @torch.no_grad()
    def install_bases(self, adapter: str, shared: torch.Tensor, residual: torch.Tensor) -> None:
        """Freeze P = [P_S P_R] as the current bases and set B = 0.

        Args:
            shared: P_S, (d_in, r_S).
            residual: P_R, (d_in, r_R).
        """
        old = self.dulbe_P[adapter]
        self.dulbe_P[adapter] = torch.cat([shared, residual], dim=1).to(old.device, torch.float32).contiguous()
        self._zero_up_projections(adapter)

    def task_tensors(self, adapter: str) -> dict[str, torch.Tensor]:
        """What `fold` and `install_bases` change, for `put_back`: bases and history themselves, copies of both B."""
        kept = {name: getattr(self, name)[adapter] for name in self.other_param_names}
        return kept | {name: getattr(self, name)[adapter].detach().clone() for name in self.adapter_layer_names}

    @torch.no_grad()
    def put_back(self, adapter: str, tensors: dict[str, torch.Tensor]) -> None:
        """Make the layer again what it was when `task_tensors` was called."""
        for name in self.other_param_names:
            getattr(self, name)[adapter] = tensors[name]
        for name in self.adapter_layer_names:
            getattr(self, name)[adapter].copy_(tensors[name])

    def _zero_up_projections(self, adapter: str) -> None:
        for container in (self.dulbe_shared_B, self.dulbe_residual_B):
            container[adapter].data.zero_()
            container[adapter].grad = None

    # ------------------------------------------------------------------ forward

    def _adapted_forward(self, x: torch.Tensor) -> torch.Tensor:
        linear = self._linear
        weight, updates, modes_on = linear.weight, None, True
        if self._held is not None:
            weight, updates, modes_on = self._held
        rests = self._rests if torch.compiler.is_compiling() else any(self in block for block in _RESTING.get())
        modes_on = modes_on and not rests
        extra: Updates = [] if updates is None else updates()
        for name in self._adapters_here(self.active_adapters):
            if weight is linear.weight:
                weight = self.folded_weight(name)
            elif self._held is None and self.dulbe_history_B[name].shape[1]:
                # A second adapter's history, beside the folded first one's.
                extra.append((self.dulbe_history_P[name], self.dulbe_history_B[name]))
            if modes_on:
                extra.append((self.dulbe_P[name], self.current_up(name).to(self.dulbe_P[name].dtype)))
        return updated_linear(x, weight.to(linear.weight.dtype), linear.bias, extra)

    # ------------------------------------------------------------------ state

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_folded": None, "_held": None, "_rests": 0}

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
                if saved is None or saved.ndim != 2 or saved.shape[0] != size:
                    continue
                if saved.shape[1] != buffers[name].shape[1]:
                    buffers[name] = buffers[name].new_zeros(saved.shape)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _identity(tensor: torch.Tensor) -> tuple[int, ...]:
    """Changes where the tensor is another one or is written to; inference tensors do not count what is written."""
    return id(tensor), tensor.data_ptr(), -1 if tensor.is_inference() else tensor._version


def _fold(base: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(base.dtype, torch.float32)
    with without_autocast(base):
        return torch.addmm(base.to(dtype), up.to(dtype), down.to(dtype).T).to(base.dtype)
