"""The adapted linear layers of the vision tower.

    x (.., d_in) ──┬── W = W_0 + B_hist P_hist'  (frozen, folded once, d_out x d_in) ──┬── + ── y (.., d_out)
                   └── P = [P_S P_R] (frozen, d_in x r) ── B = [B_S B_R] (trained) ────┘

W_0 is never written to. The folded weight is a cache beside it, which only `DualModeLinear.folded_weight` computes,
from W_0 and the saved history. A model that was trained and a model that was loaded therefore agree bit for bit, and
disabling or unloading the adapter gives the pristine base model. Only an explicit `merge` writes to the base weight.
It keeps a copy of the pristine weight, so `unmerge` is exact too.

The history is a pair of factors until these would take more memory than one matrix: r (d_in + d_out) > d_in d_out.
From then on B_hist holds the sum of all updates, (d_out, d_in), and P_hist, which would be the identity, has no
columns.

A plain linear layer, as transformers makes it, is not called: the forward pass uses the weight in the table below
instead of the layer's own. A layer that is not `plain` (because it is quantised, has hooks or a `forward` of its own,
or because its weight is offloaded) is called. Each weight W in the table is then applied as W - W_0 and added to the
layer's output, and the normal state adds the factors of the history. Every forward pass checks anew whether the layer
is plain. With `fold="factors"`, the normal state adds these factors to a plain layer too: nothing is cached, and every
pass computes one more product.

The weight that a forward pass of a vision layer uses, and whether it adds the current modes:

| state | set by | weight | modes |
| --- | --- | --- | --- |
| normal | | W_0 + B_hist P_hist', cached | on |
| mixed | `adapter_names` | W_0; to each row, the factors of the row's adapter are added | on |
| held | `layer.holding(adapter, weight)` | the given weight | on, or other factors if given |
| scaled | `layer.scaled(adapter, scale)` | W_0 + scale * (B_hist P_hist' + B P') | off: they are in the weight |
| resting | `layer.resting(adapter)` | that of the state it is combined with | off |
| merged, or adapter disabled | PEFT | the base layer's weight | off |

A block holds, scales or rests one adapter, and a forward pass with another active adapter raises an error.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from peft.tuners._buffer_dict import BufferDict
from torch import nn

from dulbe_peft.adapter.base import DualModeLayer, Pair, between, temporarily
from dulbe_peft.adapter.config import DENSE, DualModeLoraConfig
from dulbe_peft.adapter.linear import Update, Updates, add_updates, dense, is_consistent, joined, updated_linear
from dulbe_peft.utils.tensors import has_values, identity
from dulbe_peft.utils.torch_settings import keep_saved_activations, without_autocast


class _Held(NamedTuple):
    """What a running block lets a layer use in place of its own weights."""

    adapter: str
    weight: torch.Tensor | None = None  # in place of W_0 and history
    beside: bool = False  # the weight holds W - W_0 and is added to the base layer's
    modes: Callable[[], Updates] | None = None  # factors in place of the current modes; `list` for none
    as_saved: bool = False  # the weight is W_0 with the whole history


class DualModeLinear(DualModeLayer):
    """A linear layer with a frozen history and one shared and one residual mode per adapter.

    Attributes:
        dulbe_P: Adapter name -> P = [P_S P_R], (d_in, r_S + r_R), float32, orthonormal columns, frozen.
        dulbe_shared_B: Adapter name -> B_S, (d_out, r_S), trainable.
        dulbe_residual_B: Adapter name -> B_R, (d_out, r_R), trainable.
        dulbe_history_P: Adapter name -> (d_in, history rank), the bases of all finished tasks, frozen; (d_in, 0)
            where the history is dense.
        dulbe_history_B: Adapter name -> (d_out, history rank), their up-projections, frozen; or (d_out, d_in).

    Reference:
        Section "Subspace-Frozen Parameterization".
    """

    adapter_layer_names = ("dulbe_shared_B", "dulbe_residual_B")
    other_param_names = ("dulbe_P", "dulbe_history_P", "dulbe_history_B", "caches", "_weights", "_folded_bases")

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: DualModeLoraConfig, key: str = "") -> None:
        super().__init__(base_layer)
        self.dulbe_P = BufferDict({}, persistent=True)
        self.dulbe_history_P = BufferDict({}, persistent=True)
        self.dulbe_history_B = BufferDict({}, persistent=True)
        self.dulbe_shared_B = nn.ParameterDict({})
        self.dulbe_residual_B = nn.ParameterDict({})
        self.caches: dict[str, bool] = {}  # adapter name -> whether W_0 + B_hist P_hist' is kept
        # Adapter name -> (cache key, source tensors, weight). Keeping the sources alive keeps their ids unique.
        self._weights: dict[str, tuple[tuple[Any, ...], tuple[torch.Tensor, ...], torch.Tensor]] = {}
        self._folded_bases: dict[str, torch.Tensor] = {}  # adapter name -> the bases that were folded last
        self._active_adapter = adapter_name
        self.update_layer(adapter_name, config, key)

    def update_layer(self, adapter_name: str, config: DualModeLoraConfig, key: str = "") -> None:
        """Add `adapter_name` with random orthonormal bases, B = 0 (random if `init_weights` is False) and no history.

        `key` is the layer's dotted name, to which the patterns of the configuration are applied.
        """
        ranks, history_rank = config.ranks_of(key), config.history_rank_of(key)
        self.caches[adapter_name] = config.fold == "weight"
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
                frozen = buffers[adapter_name]
                buffers[adapter_name] = frozen.to(torch.promote_types(frozen.dtype, torch.float32))

    def folded_weight(self, adapter: str) -> torch.Tensor:
        """Return W_0 + B_hist P_hist', (d_out, d_in), in the base weight's dtype; without a history, W_0 itself.

        Only this method computes the effective weight. The result is cached until a factor changes. Writes through
        `.data` or to inference tensors go unnoticed until the adapter is saved or loaded, a task begins or is folded,
        or a merge is undone: see `forget_weight`.
        """
        return self._plain_weight(adapter) if self.plain else dense(self.history(adapter))

    def _plain_weight(self, adapter: str) -> torch.Tensor:
        base, history = self._linear.weight, (self.dulbe_history_B[adapter], self.dulbe_history_P[adapter])
        if history[0].shape[1] == 0:
            return base
        if base.requires_grad or not has_values():
            return _fold(base, self.history(adapter))
        sources = base, *history
        key, cached = identity(sources), self._weights.get(adapter)
        if cached is not None and cached[0] == key:
            return cached[2]
        with torch.inference_mode(False), torch.no_grad():
            weight = _fold(base, self.history(adapter))
        if self.caches[adapter]:
            self._weights[adapter] = key, sources, weight
        return weight

    def forget_weight(self) -> None:
        """Drop the cached effective weights, so that the next pass computes them again."""
        self._weights.clear()

    @torch.no_grad()
    def scaled_weight(self, adapter: str, scale: float, modes: bool = False) -> torch.Tensor:
        """Return W_0 + scale * B_hist P_hist', (d_out, d_in), in the base weight's dtype.

        With `modes`, scale * B P' is added. For a layer that is not plain, W_0 is left out.
        """
        base = self._linear.weight if self.plain else None
        dtype = torch.float32 if base is None else torch.promote_types(base.dtype, torch.float32)
        delta = scale * (self.get_delta_weight(adapter, dtype) if modes else dense(self.history(adapter), dtype))
        return delta if base is None else _fold(base, (None, delta))

    def get_delta_weight(self, adapter: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the sum of history and current modes, (d_out, d_in), in `dtype` or a wider type."""
        return dense(self.history(adapter), dtype) + dense((self.dulbe_P[adapter], self.current_up(adapter)), dtype)

    def history(self, adapter: str) -> Update:
        """Return the factors P_hist and B_hist, or None and the summed updates of all finished tasks."""
        down, up = self.dulbe_history_P[adapter], self.dulbe_history_B[adapter]
        return down if down.shape[1] == up.shape[1] else None, up

    def updates(self, adapter: str, history: bool = True, modes: bool = True) -> Updates:
        """Return the factors of the history, if there is one, and of the current modes."""
        updates = [self.history(adapter)] if history and self.dulbe_history_B[adapter].shape[1] else []
        down = self.dulbe_P[adapter]
        return [*updates, (down, self.current_up(adapter).to(down.dtype))] if modes else updates

    def current_up(self, adapter: str) -> torch.Tensor:
        """Return B = [B_S B_R], (d_out, r_S + r_R)."""
        return torch.cat([self.dulbe_shared_B[adapter], self.dulbe_residual_B[adapter]], dim=1)

    def history_rank(self, adapter: str) -> int:
        """Return how many columns the folded history of `adapter` has, or DENSE if it is one matrix."""
        down, up = self.history(adapter)
        return DENSE if down is None else up.shape[1]

    def is_trained(self, adapter: str) -> bool:
        """Return whether any current up-projection differs from zero."""
        return bool(self.dulbe_shared_B[adapter].any() or self.dulbe_residual_B[adapter].any())

    def holding(
        self,
        adapter: str,
        weight: torch.Tensor,
        modes: Callable[[], Updates] | None = None,
        as_saved: bool = False,
    ) -> AbstractContextManager[None]:
        """Use `weight`, (d_out, d_in), instead of W_0 and the adapter's history while the block runs.

        In every pass, the factors `modes()` act instead of the current modes. `as_saved` states that the weight is W_0
        with the whole history.
        """
        if modes is None and self._held is not None and self._held.weight is None:
            modes = self._held.modes  # the modes rest already
        return temporarily(self, "_held", _Held(adapter, weight, not self.plain, modes, as_saved))

    def scaled(self, adapter: str, scale: float) -> AbstractContextManager[None]:
        # At scale 1 the layer is used as it is, so that its outputs are the same bit for bit.
        if scale != 1:
            return self.holding(adapter, self.scaled_weight(adapter, scale, modes=True), modes=list)
        held = None if self._held is None or not self.plain else self.folded_weight(adapter).detach()
        return temporarily(self, "_held", held if held is None else _Held(adapter, held, as_saved=True))

    @torch.no_grad()
    def scale_update(self, adapter: str, scale: float) -> None:
        """Multiply B and B_hist, and so the whole update, by `scale`."""
        self.set_up_projections(adapter, scale * self.current_up(adapter))
        self.dulbe_history_B[adapter] = scale * self.dulbe_history_B[adapter]

    def resting(self, adapter: str) -> AbstractContextManager[None]:
        """Leave out the current modes while the block runs, so that only the history acts."""
        return temporarily(self, "_held", (self._held or _Held(adapter))._replace(modes=list))

    @property
    def holds_history_only(self) -> bool:
        return self._held is not None and self._held.modes is not list

    @property
    def is_replaced(self) -> bool:
        """Whether a running block uses another weight than W_0 with the history, or other factors than the modes."""
        held = self._held
        if held is None:
            return False
        return (held.weight is not None and not held.as_saved) or (held.modes is not None and held.modes is not list)

    @property
    def acts_as_saved(self) -> bool:
        resting = self._held is not None and self._held.modes is list
        return not self.is_replaced and not (resting and self.is_trained(self._held.adapter))

    def copied(self, adapter: str) -> tuple[Pair, Pair]:
        """Return copies of P and B, and the present history, which is never changed in place."""
        modes = self.dulbe_P[adapter].detach().clone(), self.current_up(adapter).detach().clone()
        return modes, (self.dulbe_history_P[adapter], self.dulbe_history_B[adapter])

    @torch.no_grad()
    def keep_share(self, adapter: str, share: float, begun: tuple[Pair, Pair]) -> None:
        """Move modes and history to `share` of the way from `begun`, what `copied` returned."""
        modes, (old_down, old_up) = begun
        down, up = between(share, modes, (self.dulbe_P[adapter], self.current_up(adapter)))
        self.dulbe_P[adapter].copy_(down)
        self.set_up_projections(adapter, up)
        down, up = self.dulbe_history_P[adapter], self.dulbe_history_B[adapter]
        old_down, old_up = old_down.to(down), old_up.to(up)
        if torch.equal(up, old_up) and torch.equal(down, old_down):
            return
        # A strategy has changed the history itself, as one that trains single weights does.
        old = dense((old_down if old_down.shape[1] == old_up.shape[1] else None, old_up))
        self.set_history(adapter, down[:, :0], old.lerp(dense(self.history(adapter)), share))

    def repeats_bases(self, adapter: str) -> bool:
        """Return whether the current bases equal those of the modes that were folded last."""
        last = self._folded_bases.get(adapter)
        if last is None:  # the adapter was loaded: a history of factors ends with the bases
            last = self.dulbe_history_P[adapter][:, -self.dulbe_P[adapter].shape[1] :]
        return torch.equal(last.to(self.dulbe_P[adapter].device), self.dulbe_P[adapter])

    @torch.no_grad()
    def fold(self, adapter: str, keep_factors: bool = False) -> None:
        """Add the current modes to the history and set B = 0. Factors that outgrow one matrix become one."""
        old, up = self.history(adapter)
        self._folded_bases[adapter] = self.dulbe_P[adapter].clone()  # a history that is one matrix does not show them
        modes = self.dulbe_P[adapter], self.current_up(adapter).to(self.dulbe_P[adapter].dtype)
        if old is None:
            self.dulbe_history_B[adapter] = up + dense(modes)
        else:
            self.set_history(adapter, torch.cat([old, modes[0]], 1), torch.cat([up, modes[1]], 1), keep_factors)
        self._zero_up_projections(adapter)

    @torch.no_grad()
    def set_history(self, adapter: str, down: torch.Tensor, up: torch.Tensor, keep_factors: bool = False) -> None:
        """Set the history to B P', given P, (d_in, r), and B, (d_out, r); as one matrix if that takes less memory."""
        if not keep_factors and down.numel() + up.numel() > self.in_features * self.out_features:
            down, up = down[:, :0], dense((down, up))
        self.dulbe_history_P[adapter], self.dulbe_history_B[adapter] = down.contiguous(), up.contiguous()

    @torch.no_grad()
    def drop_empty_history(self, adapter: str) -> None:
        """Remove a history that consists of zeros, which a new adapter has if its configuration is of a saved one."""
        down, up = self.dulbe_history_P[adapter], self.dulbe_history_B[adapter]
        if not up.any() and not down.any():
            self.set_history(adapter, down[:, :0], up[:, :0])

    @torch.no_grad()
    def install_bases(self, adapter: str, shared: torch.Tensor, residual: torch.Tensor) -> None:
        """Set the current, frozen bases to P = [P_S P_R], (d_in, r_S) and (d_in, r_R), and set B = 0."""
        self.dulbe_P[adapter] = torch.cat([shared, residual], dim=1).to(self.dulbe_P[adapter]).contiguous()
        self._zero_up_projections(adapter)

    def _zero_up_projections(self, adapter: str) -> None:
        for container in (self.dulbe_shared_B, self.dulbe_residual_B):
            container[adapter].data.zero_()
            container[adapter].grad = None

    @torch.no_grad()
    def set_up_projections(self, adapter: str, up: torch.Tensor) -> None:
        """Copy `up`, (d_out, r_S + r_R), into B = [B_S B_R]."""
        shared_rank = self.dulbe_shared_B[adapter].shape[1]
        self.dulbe_shared_B[adapter].copy_(up[:, :shared_rank])
        self.dulbe_residual_B[adapter].copy_(up[:, shared_rank:])

    def _adapted_forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling() and torch.is_grad_enabled():
            keep_saved_activations()  # for `routed_loss`
        linear, held, names, plain = self._linear, self._held, self.present_adapters(self.active_adapters), self.plain
        weight, modes = (None, None) if held is None else (held.weight, held.modes)
        # The history of the first adapter is folded into the weight. The histories of others are added as factors.
        folded = names[0] if names and weight is None and plain and self.caches[names[0]] else None
        updates = [] if modes is None else modes()
        for name in names:
            updates = updates + self.updates(name, weight is None and name != folded, modes is None)
        if not plain:
            return add_updates(self.base_layer(x), x, self._held_beside() + updates)
        if weight is None:
            weight = linear.weight if folded is None else self._plain_weight(folded)
            updates = updates if folded is not None else joined(updates)
        elif held.beside:
            weight = linear.weight + weight
        return updated_linear(x, weight.to(linear.weight.dtype), linear.bias, updates)

    def _held_beside(self) -> Updates:
        """Return W - W_0 for the held weight W, also if the layer was still plain when the block began."""
        if self._held is None or self._held.weight is None:
            return []
        weight = self._held.weight
        return [(None, weight if self._held.beside else weight - self.get_base_weight().detach().to(weight.dtype))]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_weights": {}}

    def _apply(self, fn: Any, recurse: bool = True) -> DualModeLayer:
        self._weights.clear()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Resize the history to that of the state dict, then load the values."""
        self._weights.clear()
        self._folded_bases.clear()
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
