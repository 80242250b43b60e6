"""Registry of the strategies by name. Users can register their own classes."""

from typing import Any, TypeVar

from dulbe_peft.strategies.base import Strategy
from dulbe_peft.utils.specs import Registry, closest, convert, parse_spec

S = TypeVar("S", bound=type[Strategy])

_PATHS = {  # name -> module in this package, and class
    "dulbe": "strategies.dulbe:Dulbe",
    "frozen": "strategies.frozen:Frozen",
    "lora": "strategies.lora:Lora",
    "merged_lora": "strategies.lora:MergedLora",
    "first_session": "papers.first_session:FirstSession",
    "o_lora": "papers.o_lora:OLora",
    "inflora": "papers.inflora:InfLora",
    "keeplora": "papers.keeplora:KeepLora",
    "lora_sub": "papers.lora_sub:LoraSub",
    "loda": "papers.loda:Loda",
    "sd_lora": "papers.sd_lora:SdLora",
    "cl_lora": "papers.cl_lora:ClLora",
    "mg_clip": "papers.mg_clip:MgClip",
    "sgcl": "papers.sgcl:Sgcl",
    "lwf": "papers.lwf:Lwf",
    "zscl": "papers.zscl:Zscl",
    "slca": "papers.slca:Slca",
    "spu": "papers.spu:Spu",
    "rapf": "papers.rapf:Rapf",
    "engine": "papers.knowledge_injection:Engine",
    "proof": "papers.proof:Proof",
    "clap4clip": "papers.clap4clip:Clap4Clip",
    "clg_cbm": "papers.clg_cbm:ClgCbm",
    "bofa": "papers.bofa:Bofa",
    "magmax": "papers.magmax:MagMax",
    "lfi": "papers.lfi:Lfi",
    "dualprompt": "papers.dualprompt:DualPrompt",
    "coda_prompt": "papers.coda_prompt:CodaPrompt",
    "l2p": "papers.l2p:L2P",
    "aper": "papers.aper:Aper",
    "vis": "papers.vis:Vis",
    "moe_adapters": "papers.moe_adapters:MoeAdapters",
}
STRATEGIES: Registry[Strategy] = Registry(
    "strategy",
    "dulbe_peft.strategies",
    {name: f"dulbe_peft.{path}" for name, path in _PATHS.items()},
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
