"""The adapter's configuration, and the member that the method has in PEFT's enumeration `PeftType`."""

import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from peft.config import PeftConfig
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME, PeftType, TaskType
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from torch.serialization import get_unsafe_globals_in_checkpoint
from transformers.utils.hub import cached_file, has_file

from dulbe_peft.arguments import AdapterSettings
from dulbe_peft.utils.settings import check_int, documented, setting
from dulbe_peft.utils.tensors import tensor_shapes, tensors_digest

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
# Settings of LoRA that this method does not have, and what to use instead.
_LORA_SETTINGS = {
    "r": "this method has two ranks instead, shared_rank and residual_rank",
    "lora_alpha": "this method does not scale its update; text_alpha scales the LoRA of the text tower",
    "lora_dropout": "this method has no dropout, because the bases of its modes are planned from the whole gradient",
    "bias": "this method leaves the biases unchanged, because all adapters and all earlier tasks share them",
}
MAX_HISTORY_RANK = 2**20  # enough for 100,000 tasks; a file that claims a higher rank is refused


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


def history_fields(ranks: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of a configuration for the history ranks of all layers, given by dotted name."""
    rank = max(0, *ranks.values()) if ranks else 0
    # Without these prefixes, the names also match the layers of a vision tower that stands alone.
    different = [(name, other) for name, other in ranks.items() if other != rank]
    pattern = {re.sub(r"^(base_model\.model\.)?(vision_model\.)?", "", n): r for n, r in different}
    return {"history_rank": rank, "history_pattern": pattern}


def _saved_name(name: str, adapter: str | None = None) -> str:
    """Return a tensor's name without the adapter's name and without the prefix that not every file has."""
    name = name.removeprefix("base_model.model.")
    return name if adapter is None or f".{PREFIX}" not in name else name.removesuffix(f".{adapter}")


def _file_digest(file: Path) -> str:
    with safe_open(file, framework="pt") as tensors:
        return tensors_digest({_saved_name(name): tensors.get_tensor(name) for name in tensors.keys()})  # noqa: SIM118


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
    history_rank: int = setting(
        0, "Rank of the folded history in the file. The library writes it into the file and reads it from there."
    )
    history_pattern: dict[str, int] = field(
        default_factory=dict,
        metadata={
            "help": "The layers whose history has a rank other than history_rank, and that rank; -1 means that the "
            "history is one matrix. The library writes them into the file and reads them from there."
        },
    )

    tower: str | None = setting(None, "The tower that the modes are for, vision or text. The library writes it.")
    base_digests: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "help": "Digests that identify the base model's weights, by part and dtype. The library writes them."
        },
    )

    base_settings: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "help": "Settings of the base model's towers that change their outputs, such as the activation function. "
            "The library writes them."
        },
    )
    sha256: str | None = setting(None, "Digest of the file's tensors. The library writes it and checks it at loading.")

    def __new__(cls, *args: object, **kwargs: object) -> Any:
        for name in _LORA_SETTINGS.keys() & kwargs.keys():
            raise TypeError(f"{name}={kwargs[name]!r} is a setting of LoRA: {_LORA_SETTINGS[name]}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._noted: tuple[dict[str, torch.Tensor], str, dict[str, Any]] | None = None
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
        if isinstance(config, cls):
            if file is not None:
                config.set_history(_history_ranks(file))
                if config.sha256 is not None and config.sha256 != _file_digest(file):
                    raise ValueError(
                        f"{file} is damaged: its tensors do not have the SHA-256 in {CONFIG_NAME}. If you changed "
                        "them on purpose, remove sha256 from that file"
                    )
            config.sha256 = None  # it is not a property of the adapter, which may be trained further
        return config

    def note(self, tensors: dict[str, torch.Tensor], adapter: str, facts: dict[str, object]) -> None:
        """Note facts about an adapter for the next `save_pretrained`. PEFT adds modules to save to `tensors` by then.

        They are no fields, so that the configuration can be used again for a fresh adapter.
        """
        self._noted = tensors, adapter, facts

    def save_pretrained(self, save_directory: str, **kwargs: Any) -> None:
        """Write the configuration, with the facts that were noted about the adapter."""
        noted, self._noted = self._noted, None
        written = self
        if noted is not None:
            tensors, adapter, facts = noted
            digest = tensors_digest({_saved_name(name, adapter): tensor for name, tensor in tensors.items()})
            written = replace(self, **facts, sha256=digest)
            written.auto_mapping, written.inference_mode = self.auto_mapping, self.inference_mode
        super(DualModeLoraConfig, written).save_pretrained(save_directory, **kwargs)

    def ranks_of(self, layer: str) -> tuple[int, int]:
        """Return r_S and r_R of the vision layer with the dotted name `layer`."""
        return self.shared_rank, _by_pattern(self.rank_pattern, layer, self.residual_rank)

    def history_rank_of(self, layer: str) -> int:
        """Return how many columns the history of a layer has, or DENSE if it is one matrix."""
        return _by_pattern(self.history_pattern, layer, self.history_rank)

    def set_history(self, ranks: Mapping[str, int]) -> None:
        """Set the history ranks of all layers, given by dotted name."""
        for name, value in history_fields(ranks).items():
            setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain data. Sets become sorted lists, so that the file is always the same."""
        return {key: sorted(value) if isinstance(value, set) else value for key, value in super().to_dict().items()}
