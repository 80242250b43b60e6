"""The adapter's configuration, and the member that the method has in PEFT's enumeration `PeftType`."""

import json
import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from peft.config import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME, PeftType, TaskType
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from safetensors.torch import load_file
from torch.serialization import get_unsafe_globals_in_checkpoint
from transformers.utils.hub import cached_file, has_file

from dulbe_peft.arguments import AdapterSettings
from dulbe_peft.utils.settings import check_int, documented
from dulbe_peft.utils.tensors import tensor_shapes, tensors_digest, write_tensors

PREFIX = "dulbe_"


def register_peft_type() -> PeftType:
    """Add a real enumeration member, once, so that JSON, pickle and deepcopy work as for PEFT's own methods."""
    name = "DULBE"
    if name in PeftType.__members__:
        return PeftType[name]
    kind: Any = PeftType
    member: Any = str.__new__(PeftType, name)
    member._name_ = name
    member._value_ = name
    member.__objclass__ = PeftType
    member._sort_order_ = len(PeftType.__members__)
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = member
    PeftType._value2member_map_[name] = member
    if hasattr(kind, "_hashable_values_"):  # Python >= 3.13
        kind._hashable_values_.append(name)
    type.__setattr__(PeftType, name, member)
    return member


DULBE = register_peft_type()


DENSE = -1  # the rank of a history that is one matrix
MAX_HISTORY_RANK = 2**20  # enough for 100,000 tasks; a file that claims a higher rank is refused
FORMAT = "dulbe-adapter-1"  # the entry of an adapter file's metadata


def _by_pattern(pattern: Mapping[str, int], layer: str, default: int) -> int:
    """Return the value of the first key (a name ending or a regular expression) that matches a layer, as PEFT does."""
    return pattern.get(get_pattern_key(list(pattern), layer), default)


def _holds_only_tensors(path: Path) -> bool:
    """Return whether a local file was written by `torch.save` and refers only to what plain tensors need."""
    try:
        return zipfile.is_zipfile(path) and not get_unsafe_globals_in_checkpoint(path)
    except Exception:  # a damaged archive: torch does not say which errors its opcode reader raises
        return False


def _history_ranks(file: Path) -> dict[str, int]:
    """Return the rank of each layer's history in an adapter file, reading only the file's header."""
    shapes, ranks = tensor_shapes(file), {}
    for name, down in shapes.items():
        layer, suffix, _ = name.rpartition(".dulbe_history_P")
        up = shapes.get(f"{layer}.dulbe_history_B", ())
        if suffix and len(down) == len(up) == 2:
            ranks[layer] = down[1] if down[1] == up[1] else DENSE
    return ranks


def _short_name(name: str) -> str:
    """Return a layer's name without the prefixes that it lacks in a vision tower that stands alone."""
    return re.sub(r"^(base_model\.model\.)?(vision_model\.)?", "", name)


def history_fields(ranks: Mapping[str, int]) -> dict[str, object]:
    """Return `history_rank` and `history_pattern` for the history ranks of all layers, given by dotted name."""
    rank = max(0, *ranks.values()) if ranks else 0
    return {"history_rank": rank, "history_pattern": {_short_name(n): r for n, r in ranks.items() if r != rank}}


@dataclass(frozen=True)
class AdapterFacts:
    """What a saved adapter's file says about it: no settings, but results and what it was made on."""

    tower: str | None = None  # the tower that the modes are for, vision or text
    base_digests: dict[str, str] = field(default_factory=dict)  # of the base model's weights, by part and dtype
    base_settings: dict[str, str] = field(default_factory=dict)  # of the base model that change its outputs
    history_ranks: dict[str, int] = field(default_factory=dict)  # of all layers, by short name; from the tensors


def write_facts(file: Path, facts: AdapterFacts) -> None:
    """Write facts, and a digest of the tensors, into the metadata of an adapter file that PEFT has written."""
    tensors = load_file(file)
    content = {name: value for name, value in asdict(facts).items() if name != "history_ranks"}
    write_tensors(
        file,
        tensors,
        {"format": "pt", FORMAT: json.dumps(content | {"sha256": tensors_digest(tensors)}, sort_keys=True)},
    )


def read_facts(file: Path) -> AdapterFacts:
    """Return the facts in an adapter file. A file that somebody else wrote has only the ranks of its tensors.

    Raises:
        ValueError: If the metadata is damaged, or the tensors do not have the digest in it.
    """
    ranks = {_short_name(name): rank for name, rank in _history_ranks(file).items()}
    with safe_open(file, framework="pt") as tensors:
        text = (tensors.metadata() or {}).get(FORMAT)
        if text is None:
            return AdapterFacts(history_ranks=ranks)
        digest = tensors_digest({name: tensors.get_tensor(name) for name in tensors.keys()})  # noqa: SIM118
    from dulbe_peft.adapter.facts import SavedFacts, checked  # here, because importing pydantic takes long

    what = f"{file}: the metadata {FORMAT!r}"
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{what} is damaged: {error}") from error
    saved = checked(SavedFacts, content, what)
    if saved.sha256 != digest:
        raise ValueError(
            f"{file} is damaged: its tensors do not have the SHA-256 in its metadata. If you changed them on purpose, "
            f"write them without the metadata {FORMAT!r}"
        )
    return AdapterFacts(saved.tower, saved.base_digests, saved.base_settings, ranks)


def _file(source: str, subfolder: str | None, name: str, where: dict[str, Any]) -> Path | None:
    """Return the path of a file in a local folder, or of a repository's file in the cache; None if there is none."""
    local = Path(source, subfolder or "", name)
    if Path(source).is_dir() or not has_file(source, f"{subfolder}/{name}" if subfolder else name, **where):
        return local if local.is_file() else None
    found = cached_file(source, name, subfolder=subfolder or "", **where)
    return None if found is None else Path(found)


@documented
@dataclass
class DualModeLoraConfig(AdapterSettings, PeftConfig):
    """Configuration of [`DualModeLoraModel`]: shared and residual modes with frozen bases in a CLIP vision tower.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is outside its limits, or fields contradict each other.

    Reference:
        Section "Gradient-Demand Dual-Mode Subspace Allocation"; defaults from "Implementation Details".
    """

    rank_pattern: dict[str, int] = field(
        default_factory=dict,
        metadata={
            "help": "The residual_rank of particular vision layers. Keys are endings of layer names, or regular "
            "expressions."
        },
    )

    # transformers' own `load_adapter` reads nothing but this file before it makes the layers, so these stand here.
    history_rank: int = field(default=0, metadata={"help": "Rank of the saved history. Saving writes it."})
    history_pattern: dict[str, int] = field(
        default_factory=dict,
        metadata={"help": "Layers whose saved history has another rank; -1 means one matrix. Saving writes them."},
    )
    made_on: dict[str, object] = field(default_factory=dict, metadata={"help": "The base model. Saving writes it."})

    def __post_init__(self) -> None:
        # Of the file from which the configuration was read. This is no field, so that a copy is of a fresh adapter.
        self.facts = AdapterFacts()
        if self.made_on:
            from dulbe_peft.adapter.facts import MadeOn, checked  # here, because importing pydantic takes long

            self.facts, self.made_on = AdapterFacts(**checked(MadeOn, self.made_on, "made_on").model_dump()), {}
        PeftConfig.__post_init__(self)
        AdapterSettings.__post_init__(self)
        self.peft_type = DULBE
        self.history_rank = check_int("history_rank", self.history_rank, 0, MAX_HISTORY_RANK)
        for name, least, most in (("history_pattern", DENSE, MAX_HISTORY_RANK), ("rank_pattern", 0, None)):
            if not isinstance(getattr(self, name), dict):
                raise TypeError(f"{name} must be a mapping of layers to ranks, got {getattr(self, name)!r:.100}")
            for layer, rank in getattr(self, name).items():
                check_int(f"{name}[{layer!r}]", rank, least, most)
        for name in ("target_modules", "exclude_modules"):
            if isinstance(getattr(self, name), str):
                try:
                    re.compile(getattr(self, name))
                except re.error as error:
                    raise ValueError(f"{name}={getattr(self, name)!r} is not a regular expression: {error}") from error
        if self.task_type == TaskType.FEATURE_EXTRACTION:
            warnings.warn(
                "task_type=FEATURE_EXTRACTION makes PEFT pass text-model arguments to the model, which every CLIP "
                "model refuses: leave task_type unset",
                stacklevel=3,
            )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, subfolder: str | None = None, **kwargs: Any) -> Any:
        """Load a configuration as PEFT does, and refuse weights that are damaged or pickled with more than tensors.

        PEFT reads an adapter's configuration before its weights, so the pickle is never opened.
        """
        where: dict[str, Any] = {name: kwargs[name] for name in ("revision", "token", "cache_dir") if name in kwargs}
        source = str(pretrained_model_name_or_path)
        file = _file(source, subfolder, SAFETENSORS_WEIGHTS_NAME, where)
        pickled = None if file else _file(source, subfolder, WEIGHTS_NAME, where)
        if pickled is not None and not _holds_only_tensors(pickled):
            raise ValueError(
                f"{source!r} holds {WEIGHTS_NAME}, a pickle with more than tensors, and no {SAFETENSORS_WEIGHTS_NAME}"
            )
        config = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        if isinstance(config, cls) and file is not None:
            config.facts = read_facts(file)
        return config

    def ranks_of(self, layer: str) -> tuple[int, int]:
        """Return r_S and r_R of the vision layer with the dotted name `layer`."""
        return self.shared_rank, _by_pattern(self.rank_pattern, layer, self.residual_rank)

    def history_rank_of(self, layer: str) -> int:
        """Return how many columns the history of a layer has in the file, or DENSE if it is one matrix."""
        if self.facts.history_ranks:
            return self.facts.history_ranks.get(_short_name(layer), 0)
        return _by_pattern(self.history_pattern, layer, self.history_rank)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain data. Sets become sorted lists, so that the file is always the same."""
        return {key: sorted(value) if isinstance(value, set) else value for key, value in super().to_dict().items()}
