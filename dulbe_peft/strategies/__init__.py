"""Strategies by name: how each method constrains what a new task trains. One file a paper that trains the model.

Each file begins with its method's formulas. docs/strategies.md says where the method differs from its paper.
"""

from typing import Any, TypeVar

from dulbe_peft.strategies.base import Memory, NewTask, Step, Strategy
from dulbe_peft.strategies.bofa import Bofa
from dulbe_peft.strategies.cl_lora import ClLora
from dulbe_peft.strategies.dulbe import Dulbe
from dulbe_peft.strategies.frozen import Clap4Clip, ClgCbm, Engine, Frozen, Proof, Rapf
from dulbe_peft.strategies.inflora import InfLora
from dulbe_peft.strategies.keeplora import KeepLora
from dulbe_peft.strategies.loda import Loda
from dulbe_peft.strategies.lora import FirstSession, Lora, MergedLora, Slca
from dulbe_peft.strategies.lora_sub import LoraSub
from dulbe_peft.strategies.mg_clip import MgClip
from dulbe_peft.strategies.o_lora import OLora
from dulbe_peft.strategies.sd_lora import SdLora
from dulbe_peft.strategies.sgcl import Sgcl
from dulbe_peft.strategies.spu import Spu
from dulbe_peft.strategies.zscl import Zscl
from dulbe_peft.utils.specs import closest, convert, parse_spec

__all__ = ["STRATEGIES", "Memory", "NewTask", "Step", "Strategy", "make_strategy", "register_strategy"]

S = TypeVar("S", bound=type[Strategy])

_LORA = (Lora, MergedLora, FirstSession, OLora, InfLora, KeepLora, LoraSub, Loda, SdLora, ClLora, MgClip, Sgcl, Zscl)
_KINDS: tuple[type[Strategy], ...] = (Dulbe, Frozen, *_LORA, Slca, Spu, Rapf, Engine, Proof, Clap4Clip, ClgCbm, Bofa)
STRATEGIES: dict[str, type[Strategy]] = {kind.name: kind for kind in _KINDS}


def register_strategy(kind: S) -> S:
    """Make a strategy, a frozen dataclass with a name of its own, known under that name; works as a decorator."""
    if not (isinstance(kind, type) and issubclass(kind, Strategy)) or "__dataclass_fields__" not in vars(kind):
        raise TypeError(f"a strategy must be a class derived from Strategy with @dataclass(frozen=True), got {kind!r}")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{kind.__name__}.name is {name!r}, expected letters, digits and underscores")
    if STRATEGIES.get(name, kind) is not kind:
        raise ValueError(f"the strategy {name!r} is {STRATEGIES[name].__name__} already: choose another name")
    STRATEGIES[name] = kind
    return kind


def make_strategy(spec: str | Strategy | dict[str, Any]) -> Strategy:
    """A strategy from its text, "name" or "name:key=value,key=value", or from what `settings` saved beside "name"."""
    if isinstance(spec, Strategy):
        return spec
    if isinstance(spec, str):
        name, texts = parse_spec(spec)
        return _strategy_class(name)(**convert(_strategy_class(name), texts, f"the strategy {name!r}"))
    if not isinstance(spec, dict) or not isinstance(spec.get("name"), str):
        raise TypeError(f"strategy must be a name such as 'dulbe' or a Strategy, got {spec!r:.100}")
    kind = _strategy_class(spec["name"])
    try:
        return kind(**{key: value for key, value in spec.items() if key != "name"})
    except TypeError as error:  # an unknown setting, or a value of another type
        raise ValueError(f"strategy {kind.name!r} does not have the settings {spec!r:.200}: {error}") from error


def _strategy_class(name: str) -> type[Strategy]:
    if name not in STRATEGIES:
        raise ValueError(f"there is no strategy {name!r}{closest(name, STRATEGIES)}")
    return STRATEGIES[name]
