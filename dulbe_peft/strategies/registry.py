"""Registry of the strategies by name. Users can register their own classes."""

from typing import Any, TypeVar

from dulbe_peft.strategies.base import Strategy
from dulbe_peft.utils.specs import Registry, closest, convert, parse_spec

S = TypeVar("S", bound=type[Strategy])

_BUILT_IN = {"dulbe": "dulbe:Dulbe", "frozen": "frozen:Frozen", "lora": "lora:Lora", "merged_lora": "lora:MergedLora"}
_FROM_PAPERS = {
    "first_session": "first_session:FirstSession",
    "o_lora": "o_lora:OLora",
    "inflora": "inflora:InfLora",
    "keeplora": "keeplora:KeepLora",
    "lora_sub": "lora_sub:LoraSub",
    "loda": "loda:Loda",
    "sd_lora": "sd_lora:SdLora",
    "cl_lora": "cl_lora:ClLora",
    "mg_clip": "mg_clip:MgClip",
    "sgcl": "sgcl:Sgcl",
    "lwf": "lwf:Lwf",
    "zscl": "zscl:Zscl",
    "slca": "slca:Slca",
    "spu": "spu:Spu",
    "rapf": "rapf:Rapf",
    "engine": "knowledge_injection:Engine",
    "proof": "proof:Proof",
    "clap4clip": "clap4clip:Clap4Clip",
    "clg_cbm": "clg_cbm:ClgCbm",
    "bofa": "bofa:Bofa",
    "magmax": "magmax:MagMax",
    "lfi": "lfi:Lfi",
    "dualprompt": "dualprompt:DualPrompt",
    "coda_prompt": "coda_prompt:CodaPrompt",
    "l2p": "l2p:L2P",
    "aper": "aper:Aper",
    "vis": "vis:Vis",
    "moe_adapters": "moe_adapters:MoeAdapters",
}
STRATEGIES: Registry[Strategy] = Registry(
    "strategy",
    "dulbe_peft.strategies",
    {name: f"dulbe_peft.strategies.{path}" for name, path in _BUILT_IN.items()}
    | {name: f"dulbe_peft.papers.{path}" for name, path in _FROM_PAPERS.items()},
)


def register_strategy(kind: S) -> S:
    """Register a strategy class under its `name`. The class must be a frozen dataclass. Works as a decorator."""
    if not (isinstance(kind, type) and issubclass(kind, Strategy)) or "__dataclass_fields__" not in vars(kind):
        raise TypeError(f"a strategy must be a class derived from Strategy with @dataclass(frozen=True), got {kind!r}")
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"{kind.__name__}.name is {name!r}, expected letters, digits and underscores")
    STRATEGIES.register(kind)
    return kind


def make_strategy(spec: str | Strategy | dict[str, Any]) -> Strategy:
    """Return the strategy for "name", "name:key=value,key=value", or a dictionary of "name" and saved `settings`."""
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
    except TypeError as error:  # an unknown setting, or a value of the wrong type
        raise ValueError(f"strategy {kind.name!r} does not have the settings {spec!r:.200}: {error}") from error


def _strategy_class(name: str) -> type[Strategy]:
    if name not in STRATEGIES:
        raise ValueError(f"there is no strategy {name!r}{closest(name, STRATEGIES)}")
    return STRATEGIES[name]
