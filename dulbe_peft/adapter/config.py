"""The adapter's configuration, and the member that the method has in PEFT's enumeration `PeftType`."""

import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft.config import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME, PeftType, TaskType
from peft.utils.other import get_pattern_key
from torch.serialization import get_unsafe_globals_in_checkpoint
from transformers.utils.hub import has_file

from dulbe_peft.arguments import AdapterSettings
from dulbe_peft.utils.settings import check_int, setting
from dulbe_peft.utils.tensors import tensor_shapes

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


@dataclass
class DualModeLoraConfig(AdapterSettings, PeftConfig):
    """Configuration of [`DualModeLoraModel`]: shared and residual modes with frozen bases in a CLIP vision tower.

    Raises:
        TypeError: a value has the wrong type.
        ValueError: a value is outside its limits, or fields contradict each other.

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
    history_rank: int = setting(0, "Rank of the folded history. The library reads it from the layers or the file.")
    history_pattern: dict[str, int] = field(
        default_factory=dict,
        metadata={
            "help": "The layers whose history has a rank other than history_rank, and that rank; -1 means that the "
            "history is one matrix. The library reads them from the layers or the file."
        },
    )

    tower: str | None = setting(None, "The tower that the modes are for, vision or text. The library sets it.")
    base_digests: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "help": "Digests that identify the base model's weights, by tower and dtype. The library sets them."
        },
    )

    base_settings: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "help": "Settings of the base model's towers that change their outputs, such as the activation function. "
            "The library sets them."
        },
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        for name in _LORA_SETTINGS.keys() & kwargs.keys():
            raise TypeError(f"{name}={kwargs[name]!r} is a setting of LoRA: {_LORA_SETTINGS[name]}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
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
        where = {name: kwargs[name] for name in ("revision", "token", "cache_dir") if name in kwargs}
        source, prefix = str(pretrained_model_name_or_path), "" if subfolder is None else f"{subfolder}/"
        if (
            not has_file(source, prefix + SAFETENSORS_WEIGHTS_NAME, **where)
            and has_file(source, prefix + WEIGHTS_NAME, **where)
            and not _holds_only_tensors(Path(source) / prefix / WEIGHTS_NAME)
        ):
            raise ValueError(
                f"{source!r} holds {WEIGHTS_NAME}, a pickle with more than tensors, and no {SAFETENSORS_WEIGHTS_NAME}"
            )
        config = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        file = Path(source) / prefix / SAFETENSORS_WEIGHTS_NAME
        if file.is_file() and isinstance(config, cls):
            config.set_history(_history_ranks(file))
        return config

    def ranks_of(self, layer: str) -> tuple[int, int]:
        """Return r_S and r_R of the vision layer with the dotted name `layer`."""
        return self.shared_rank, _by_pattern(self.rank_pattern, layer, self.residual_rank)

    def history_rank_of(self, layer: str) -> int:
        """Return how many columns the history of a layer has, or DENSE if it is one matrix."""
        return _by_pattern(self.history_pattern, layer, self.history_rank)

    def set_history(self, ranks: Mapping[str, int]) -> None:
        """Record the history ranks of all layers, given by dotted name."""
        self.history_rank = max(0, *ranks.values()) if ranks else 0
        # Without these prefixes, the names also match the layers of a vision tower that stands alone.
        different = [(name, rank) for name, rank in ranks.items() if rank != self.history_rank]
        self.history_pattern = {re.sub(r"^(base_model\.model\.)?(vision_model\.)?", "", n): r for n, r in different}

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain data. Sets become sorted lists, so that the file is always the same."""
        return {key: sorted(value) if isinstance(value, set) else value for key, value in super().to_dict().items()}
