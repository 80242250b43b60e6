"""The adapted linear layers of the vision tower.

    x (.., d_in) ──┬── W = W_0 + B_hist P_hist'  (frozen, folded once, d_out x d_in) ──┬── + ── y (.., d_out)
                   └── P = [P_S P_R] (frozen, d_in x r) ── B = [B_S B_R] (trained) ────┘

W_0 is never written to: the folded weight is a cache beside it, recomputed from W_0 and the saved history by
`DualModeLinear.folded_weight` alone. A model that learned and a model that was loaded therefore agree bit for bit, and
disabling or unloading the adapter gives the pristine base model. Only an explicit `merge` writes to the base weight,
and it keeps the pristine one beside it, so `unmerge` is exact too.

The history is a pair of factors until these would take more than one matrix, r (d_in + d_out) > d_in d_out. From then
on B_hist holds the sum of all updates, (d_out, d_in), and P_hist, which would be the identity, has no column.

The base layer is not called where it is a linear layer as transformers makes it; the weight below takes its place.
Where it is not `plain`, as it is quantised, has hooks or a forward of its own, or its weight is offloaded, it is
called. Every weight below is then W - W_0, added to its output, and the normal state adds the history's factors.
Which of the two is decided in every pass. With `fold="factors"` the normal state adds these factors to a plain layer,
too: nothing is cached, and every pass takes a product more.

Which weight a forward pass of the vision tower's layer uses, and whether it adds the current modes:

| state | set by | weight | modes |
| --- | --- | --- | --- |
| normal | | W_0 + B_hist P_hist', cached | on |
| mixed | `adapter_names` | W_0; a row adds its own adapter's factors | on |
| held | `layer.holding(weight)` | the given one; further updates are added where given | on, or off as asked |
| scaled | `layer.scaled(adapter, scale)` | W_0 + scale * (B_hist P_hist' + B P') | off: they are in the weight |
| resting | `layer.resting()` | as above | off |
| merged, or adapter disabled | PEFT | the base layer's own | off |
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from peft.tuners._buffer_dict import BufferDict
from torch import nn

from dulbe_peft.adapter.base import DualModeLayer, temporarily
from dulbe_peft.adapter.config import DENSE, DualModeLoraConfig
from dulbe_peft.adapter.linear import Update, Updates, add_updates, dense, is_consistent, joined, updated_linear
from dulbe_peft.utils.devices import without_autocast
from dulbe_peft.utils.tensors import has_values, identity


class _Held(NamedTuple):
    weight: torch.Tensor
    beside: bool  # the weight is W - W_0
    updates: Callable[[], Updates]
    modes: bool


class DualModeLinear(DualModeLayer):
    """A linear layer with a frozen history and one shared and one residual mode per adapter.

    Attributes:
        dulbe_P: adapter name -> P = [P_S P_R], (d_in, r_S + r_R), float32, orthonormal columns, frozen.
        dulbe_shared_B: adapter name -> B_S, (d_out, r_S), trainable.
        dulbe_residual_B: adapter name -> B_R, (d_out, r_R), trainable.
        dulbe_history_P: adapter name -> (d_in, history rank), the bases of all finished tasks, frozen; (d_in, 0)
            where the history is dense.
        dulbe_history_B: adapter name -> (d_out, history rank), their up-projections, frozen; or (d_out, d_in).

    Reference:
        Section "Subspace-Frozen Parameterization".
    """

    adapter_layer_names = ("dulbe_shared_B", "dulbe_residual_B")
    other_param_names = ("dulbe_P", "dulbe_history_P", "dulbe_history_B", "folds")

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: DualModeLoraConfig, key: str = "") -> None:
        super().__init__(base_layer)
        self.dulbe_P = BufferDict({}, persistent=True)
        self.dulbe_history_P = BufferDict({}, persistent=True)
        self.dulbe_history_B = BufferDict({}, persistent=True)
        self.dulbe_shared_B = nn.ParameterDict({})
        self.dulbe_residual_B = nn.ParameterDict({})
        # (cache key, source tensors, weight); the sources are kept alive so their ids stay unique.
        self._folded: tuple[tuple[Any, ...], tuple[torch.Tensor, ...], torch.Tensor] | None = None
        self.folds: dict[str, bool] = {}  # adapter name -> whether its history is folded into a cached weight
        self._held: _Held | None = None
        self._resting = False
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config, key)

    def update_layer(self, adapter_name: str, config: DualModeLoraConfig, key: str = "") -> None:
        """Add `adapter_name`: random orthonormal bases, B = 0 (or random with `init_weights=False`), zero history.

        `key` is the layer's dotted name, which the patterns of the configuration speak of.
        """
        ranks, history_rank = config.ranks_of(key), config.history_rank_of(key)
        self.folds[adapter_name] = config.fold == "weight"
        basis = torch.linalg.qr(torch.randn(self.in_features, sum(ranks), dtype=torch.float32))[0]
        self.dulbe_P[adapter_name] = basis.contiguous()
        sizes = (max(0, history_rank), self.in_features if history_rank == DENSE else history_rank)
        self.dulbe_history_P[adapter_name] = torch.zeros(self.in_features, sizes[0], dtype=torch.float32)
        self.dulbe_history_B[adapter_name] = torch.zeros(self.out_features, sizes[1], dtype=torch.float32)
        for container, rank in zip((self.dulbe_shared_B, self.dulbe_residual_B), ranks, strict=True):
            up = torch.zeros(self.out_features, rank, dtype=torch.float32)
            if not config.init_weights and rank:
                nn.init.kaiming_uniform_(up, a=math.sqrt(5))
            container[adapter_name] = nn.Parameter(up)
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        super()._move_adapter_to_device_of_base_layer(adapter_name, device)
        for buffers in (self.dulbe_P, self.dulbe_history_P, self.dulbe_history_B):
            if adapter_name in buffers:  # the frozen factors stay in float32 over a half-precision base
                buffers[adapter_name] = buffers[adapter_name].float()

    def folded_weight(self, adapter: str) -> torch.Tensor:
        """W_0 + B_hist P_hist', (d_out, d_in) in the base weight's dtype; W_0 itself where there is no history.

        The one place where an effective weight is made, and cached until a factor changes. What is written through
        `.data`, or to tensors of inference mode, is noticed when the adapter is saved or loaded, a task begins or is
        folded, or a merge is undone: see `forget_weight`.
        """
        history = self.dulbe_history_B[adapter], self.dulbe_history_P[adapter]
        if not self.plain:
            return dense(self.history(adapter))
        base = self._linear.weight
        if history[0].shape[1] == 0:
            return base
        if base.requires_grad or not has_values():
            return _fold(base, self.history(adapter))
        sources = base, *history
        key, kept = identity(sources), self._folded
        if kept is not None and kept[0] == key:
            return kept[2]
        with torch.inference_mode(False), torch.no_grad():
            weight = _fold(base, self.history(adapter))
        if self.folds[adapter]:
            self._folded = key, sources, weight
        return weight

    def forget_weight(self) -> None:
        """Make the effective weight anew when it is needed next."""
        self._folded = None

    @torch.no_grad()
    def scaled_weight(self, adapter: str, scale: float, modes: bool = False) -> torch.Tensor:
        """W_0 + scale * B_hist P_hist', (d_out, d_in) in the base weight's dtype; with `modes` also scale * B P'."""
        base = self._linear.weight if self.plain else None
        dtype = torch.float32 if base is None else torch.promote_types(base.dtype, torch.float32)
        delta = scale * (self.get_delta_weight(adapter, dtype) if modes else dense(self.history(adapter), dtype))
        return delta if base is None else _fold(base, (None, delta))

    def get_delta_weight(self, adapter: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """History and current modes together, (d_out, d_in) in at least this type."""
        return dense(self.history(adapter), dtype) + dense((self.dulbe_P[adapter], self.current_up(adapter)), dtype)

    def history(self, adapter: str) -> Update:
        """The factors P_hist and B_hist, or None and the sum of all finished tasks' updates."""
        down, up = self.dulbe_history_P[adapter], self.dulbe_history_B[adapter]
        return down if down.shape[1] == up.shape[1] else None, up

    def updates(self, adapter: str, history: bool = True, modes: bool = True) -> Updates:
        """History and current modes as factors, none where there is no history."""
        kept = [self.history(adapter)] if history and self.dulbe_history_B[adapter].shape[1] else []
        down = self.dulbe_P[adapter]
        return [*kept, (down, self.current_up(adapter).to(down.dtype))] if modes else kept

    def current_up(self, adapter: str) -> torch.Tensor:
        """B = [B_S B_R], (d_out, r_S + r_R)."""
        return torch.cat([self.dulbe_shared_B[adapter], self.dulbe_residual_B[adapter]], dim=1)

    def history_rank(self, adapter: str) -> int:
        """How many columns `adapter`'s folded history has; DENSE where it is one matrix."""
        down, up = self.history(adapter)
        return DENSE if down is None else up.shape[1]

    def is_trained(self, adapter: str) -> bool:
        """Whether any current up-projection differs from zero."""
        return bool(self.dulbe_shared_B[adapter].any() or self.dulbe_residual_B[adapter].any())

    def holding(
        self, weight: torch.Tensor, updates: Callable[[], Updates] = list, modes: bool = True
    ) -> AbstractContextManager[None]:
        """Use `weight`, (d_out, d_in), for W_0 and history, and add `updates()`, pairs of P and B, in every pass."""
        return temporarily(self, "_held", _Held(weight, not self.plain, updates, modes))

    def scaled(self, adapter: str, scale: float) -> AbstractContextManager[None]:
        # With nothing held, scale 1 is the layer as it is, bit for bit.
        if scale == 1:
            return temporarily(self, "_held", None)
        return self.holding(self.scaled_weight(adapter, scale, modes=True), modes=False)

    def resting(self) -> AbstractContextManager[None]:
        """Leave out the current modes: the history alone."""
        return temporarily(self, "_resting", True)

    @property
    def in_block(self) -> bool:
        """Whether a block holds another weight, or leaves out the current modes."""
        return self._held is not None or self._resting

    def repeats_bases(self, adapter: str) -> bool:
        """Whether the current bases are those of the modes that were folded last."""
        current = self.dulbe_P[adapter]
        return torch.equal(self.dulbe_history_P[adapter][:, -current.shape[1] :], current)

    @torch.no_grad()
    def fold(self, adapter: str, keep_factors: bool = False) -> None:
        """Add the current modes to the history and set B = 0; a history of too many factors becomes one matrix."""
        old, up = self.history(adapter)
        modes = self.dulbe_P[adapter], self.current_up(adapter).float()
        if old is None:
            self.dulbe_history_B[adapter] = up + dense(modes)
        else:
            self.set_history(adapter, torch.cat([old, modes[0]], 1), torch.cat([up, modes[1]], 1), keep_factors)
        self._zero_up_projections(adapter)

    @torch.no_grad()
    def set_history(self, adapter: str, down: torch.Tensor, up: torch.Tensor, keep_factors: bool = False) -> None:
        """Make B P', from (d_in, r) and (d_out, r), the history: as one matrix where the factors take more."""
        if not keep_factors and down.numel() + up.numel() > self.in_features * self.out_features:
            down, up = down[:, :0], dense((down, up))
        self.dulbe_history_P[adapter], self.dulbe_history_B[adapter] = down.contiguous(), up.contiguous()

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
        linear, held, names = self._linear, self._held, self.adapters_here(self.active_adapters)
        plain, modes = self.plain, not self._resting and (held is None or held.modes)
        # The first adapter's history is in the weight; a second one's stands beside it.
        folded = names[0] if names and held is None and plain and self.folds[names[0]] else None
        updates = [] if held is None else held.updates()
        for name in names:
            updates = updates + self.updates(name, held is None and name != folded, modes)
        if not plain:
            return add_updates(self.base_layer(x), x, self._held_beside() + updates)
        if held is None:
            weight = linear.weight if folded is None else self.folded_weight(folded)
            updates = updates if folded is not None else joined(updates)
        else:
            weight = linear.weight + held.weight if held.beside else held.weight
        return updated_linear(x, weight.to(linear.weight.dtype), linear.bias, updates)

    def _held_beside(self) -> Updates:
        """W - W_0 of the held weight W, also where the layer was plain when the block began."""
        if self._held is None:
            return []
        weight = self._held.weight
        return [(None, weight if self._held.beside else weight - self.get_base_weight().detach().to(weight.dtype))]

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
        for name, up in self.dulbe_history_B.items():
            down = self.dulbe_history_P[name]
            if not is_consistent(down, up):
                args[-1].append(
                    f"{prefix}dulbe_history_P.{name} and B do not fit: {tuple(down.shape)}, {tuple(up.shape)}"
                )


def _fold(base: torch.Tensor, update: Update) -> torch.Tensor:
    down, up = update
    dtype = torch.promote_types(base.dtype, up.dtype)
    with without_autocast(base):
        if down is None:
            return (base.to(dtype) + up.to(dtype)).to(base.dtype)
        return torch.addmm(base.to(dtype), up.to(dtype), down.to(dtype).T).to(base.dtype)
