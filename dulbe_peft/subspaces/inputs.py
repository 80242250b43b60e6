"""Record the inputs of the adapted layers while images pass through the model, and sum X'X over them."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from dulbe_peft.subspaces.occupation import OccupationStatistics, accumulate, mirrored, summed
from dulbe_peft.utils.processes import raise_in_all, unwrapped
from dulbe_peft.utils.torch_settings import evaluating

TOKENS = {"all": slice(None), "cls": slice(1), "patch": slice(1, None)}  # in dimension 1


@torch.no_grad()
def collect_statistics(
    model: nn.Module,
    batches: Iterable[Any],
    forward_fn: Callable[[nn.Module, Any], Any],
    into: OccupationStatistics,
    tokens: str = "all",
    mask_fn: Callable[[Any], torch.Tensor | None] | None = None,
) -> OccupationStatistics:
    """Add the input tokens of every adapted layer, from all batches of all processes, to the statistics.

    The model runs in evaluation mode. If `torch.distributed` is initialised, every process must call this function,
    each with its own batches or with none, and with equal statistics to add to.

    Args:
        model: A model from `get_peft_model`, or any model with a method `dual_mode_layers()` that returns a mapping
            of layer name -> module. It may be wrapped by DDP or accelerate; `forward_fn` gets it unwrapped.
        batches: Any iterable; each element is passed to `forward_fn`.
        forward_fn: `forward_fn(model, batch)` runs the vision tower. Its result is not used.
        into: Statistics to add to, which are also returned. After an error they are unchanged.
        tokens: "all", "cls" (token 0 of dimension 1) or "patch" (the other tokens). A layer whose input is (n, d_in)
            has only the CLS token.
        mask_fn: `mask_fn(batch)` returns a bool tensor, (n, tokens), that is False for padding, or None for a batch
            without padding. Padding is left out of inputs with this number of tokens.

    Raises:
        ValueError: If an input is not finite, a layer was not reached, the layers that share an input have changed, or
            the adapter is disabled or scaled.
        TypeError: If the model has no `dual_mode_layers`.

    Reference:
        "Historical Visual-Mode Occupation", S_t' = X'X.
    """
    if tokens not in TOKENS:
        raise ValueError(f"tokens must be one of {tuple(TOKENS)}, got {tokens!r}")
    model = unwrapped(model)
    if not hasattr(model, "dual_mode_layers"):
        raise TypeError(f"model must come from get_peft_model or have dual_mode_layers(), got {type(model).__name__}")
    if hasattr(model, "check_state"):
        model.check_state("collect_statistics")  # type: ignore[operator]
    return add_inputs(model, batches, forward_fn, into, tokens, mask_fn)


@torch.no_grad()
def add_inputs(
    model: nn.Module,
    batches: Iterable[Any],
    forward_fn: Callable[[nn.Module, Any], Any],
    into: OccupationStatistics,
    tokens: str,
    mask_fn: Callable[[Any], torch.Tensor | None] | None,
) -> OccupationStatistics:
    """Do what `collect_statistics` does, without its checks: a strategy may measure with other weights on purpose."""
    layers: dict[str, nn.Module] = dict(model.dual_mode_layers())  # type: ignore[operator]
    collector = _Collector(tokens)
    with raise_in_all(), evaluating(model), observed_inputs(layers, collector.add):
        for batch in batches:
            collector.mask = None if mask_fn is None else mask_fn(batch)
            forward_fn(model, batch)
    terms = summed(collector.terms(), next(iter(model.parameters()), torch.empty(0)).device)
    reached = {name for names in terms for name in names}
    unreached = [name for name in layers if name not in reached]
    if unreached:
        raise ValueError(f"batches is empty, or forward_fn never reached layer {unreached[0]!r}")
    into.add(terms)
    return into


@contextmanager
def observed_inputs(layers: Mapping[str, nn.Module], observe: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Call `observe(name, input)` before each forward pass of each layer while the block runs."""

    def hook(name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        observe(name, args[0] if args else next(iter(kwargs.values())))

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_pre_hook(partial(hook, name), with_kwargs=True).remove)
        yield


class _Collector:
    """Sums X'X only once for layers that are given the same tensor object. The first such layer holds the sum."""

    def __init__(self, tokens: str) -> None:
        self.tokens = tokens
        self.mask: torch.Tensor | None = None
        self.leader_of: dict[str, str] = {}
        self.sums: dict[str, torch.Tensor] = {}
        # Weak references, because an id may be reused for another tensor, and strong ones would keep inputs in memory.
        self.inputs: dict[str, weakref.ref[torch.Tensor]] = {}

    def add(self, name: str, hidden: torch.Tensor) -> None:
        """Add the input of a layer, (..., d_in)."""
        if name not in self.leader_of:
            same = (leader for leader, reference in self.inputs.items() if reference() is hidden)
            self.leader_of[name] = next(same, name)
        leader = self.leader_of[name]
        if leader == name:
            self.inputs[name] = weakref.ref(hidden)
            self.sums[name] = accumulate(self.sums.get(name), self._select(name, hidden))
        elif self.inputs[leader]() is not hidden:
            raise ValueError(f"layers {leader!r} and {name!r} shared their input tensor before, but not in this batch")

    def terms(self) -> dict[tuple[str, ...], torch.Tensor]:
        """Return the sums, keyed by the names of the layers that share them."""
        groups: dict[str, list[str]] = {}
        for name, leader in self.leader_of.items():
            groups.setdefault(leader, []).append(name)
        return {tuple(names): mirrored(self.sums[leader]) for leader, names in groups.items()}

    def _select(self, name: str, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.ndim == 2 and self.tokens == "patch":
            raise ValueError(f"layer {name!r} reads one token per image and has no patch tokens")
        if hidden.ndim < 3:
            return hidden
        chosen = TOKENS[self.tokens]
        if self.mask is None or self.mask.shape != hidden.shape[:2]:
            return hidden[:, chosen]
        return hidden[:, chosen][self.mask[:, chosen]]
