"""The adapter's configuration."""

import re
import warnings
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft.config import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME, TaskType
from peft.utils.other import get_pattern_key
from torch.serialization import get_unsafe_globals_in_checkpoint
from transformers.utils.hub import has_file

from dulbe_peft.adapter.registration import DULBE
from dulbe_peft.arguments import AdapterSettings
from dulbe_peft.utils.settings import check_int, setting
from dulbe_peft.utils.tensors import tensor_shapes

DENSE = -1  # the rank of a history that is one matrix
# LoRA's settings, and what this method has in their place.
_OF_LORA = {
    "r": "this method has two ranks instead, shared_rank and residual_rank",
    "lora_alpha": "the update has no scale here; text_alpha is that of the text tower's LoRA",
    "lora_dropout": "the modes have no dropout here, as their bases are planned from all of the gradient",
    "bias": "the biases stay the base model's, which every adapter and every earlier task shares",
}
MAX_HISTORY_RANK = 2**20  # 100,000 tasks; no model grows more, and a file that claims more is refused


def _by_pattern(pattern: Mapping[str, int], layer: str, default: int) -> int:
    """The value of the first key, a name ending or a regular expression, that fits a layer, as PEFT's patterns do."""
    return pattern.get(get_pattern_key(list(pattern), layer), default)


def _holds_only_tensors(path: Path) -> bool:
    """Whether a local file is torch.save's archive and names no class or function but those of plain tensors."""
    try:
        return zipfile.is_zipfile(path) and not get_unsafe_globals_in_checkpoint(path)
    except Exception:  # a damaged archive: the reader of opcodes promises no kinds of errors
        return False


def _history_ranks(file: Path) -> dict[str, int]:
    """Return the rank of each layer's history in an adapter's file, of which the header alone is read."""
    shapes, ranks = tensor_shapes(file), {}
    for name, down in shapes.items():
        layer, found, _ = name.rpartition(".dulbe_history_P")
        up = shapes.get(f"{layer}.dulbe_history_B", ())
        if found and len(down) == len(up) == 2:
            ranks[layer] = down[1] if down[1] == up[1] else DENSE
    return ranks


@dataclass
class DualModeLoraConfig(AdapterSettings, PeftConfig):
    """Configuration of [`DualModeLoraModel`]: frozen-basis shared and residual modes in a CLIP vision tower.

    Raises:
        TypeError: a value is of another type.
        ValueError: a value is out of its limits, or fields contradict each other.

    Reference:
        Section "Gradient-Demand Dual-Mode Subspace Allocation"; defaults from "Implementation Details".
    """

    rank_pattern: dict[str, int] = field(
        default_factory=dict,
        metadata={"help": "Name ending of a vision layer, or a regular expression of it -> its own residual_rank."},
    )
    history_rank: int = setting(0, "Rank of the folded history; the library reads it from the layers or the file.")
    history_pattern: dict[str, int] = field(
        default_factory=dict,
        metadata={
            "help": "Layer -> rank of its history where it is another one, -1 where the history is one matrix; the "
            "library reads it from the layers or the file."
        },
    )

    tower: str | None = setting(None, "vision or text, the tower that the modes are for; kept by the library.")
    base_digests: dict[str, str] = field(
        default_factory=dict,
        metadata={"help": "What tells the base model's weights from others, by tower and type; kept by the library."},
    )

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        for name in _OF_LORA.keys() & kwargs.keys():
            raise TypeError(f"{name}={kwargs[name]!r} is of LoRA: {_OF_LORA[name]}")
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
                    raise ValueError(f"{name} is {getattr(self, name)!r}, no regular expression: {error}") from error
        if self.task_type == TaskType.FEATURE_EXTRACTION:
            warnings.warn(
                "task_type=FEATURE_EXTRACTION makes PEFT pass text-model arguments to the model, which every CLIP "
                "model refuses: leave task_type unset",
                stacklevel=3,
            )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, subfolder: str | None = None, **kwargs: Any) -> Any:
        """As PEFT's, which reads it first: an adapter that is damaged, or a pickle of more than tensors, ends here."""
        where = {name: kwargs[name] for name in ("revision", "token", "cache_dir") if name in kwargs}
        source, prefix = str(pretrained_model_name_or_path), "" if subfolder is None else f"{subfolder}/"
        if (
            not has_file(source, prefix + SAFETENSORS_WEIGHTS_NAME, **where)
            and has_file(source, prefix + WEIGHTS_NAME, **where)
            and not _holds_only_tensors(Path(source) / prefix / WEIGHTS_NAME)
        ):
            raise ValueError(f"{source!r} holds {WEIGHTS_NAME}, a pickle, and no {SAFETENSORS_WEIGHTS_NAME}")
        config = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        file = Path(source) / prefix / SAFETENSORS_WEIGHTS_NAME
        if file.is_file() and isinstance(config, cls):
            config.set_history(_history_ranks(file))
        return config

    def ranks_of(self, layer: str) -> tuple[int, int]:
        """r_S and r_R of a layer of the vision tower, by its dotted name."""
        return self.shared_rank, _by_pattern(self.rank_pattern, layer, self.residual_rank)

    def history_rank_of(self, layer: str) -> int:
        """How many columns the history of a layer has; DENSE where it is one matrix."""
        return _by_pattern(self.history_pattern, layer, self.history_rank)

    def set_history(self, ranks: Mapping[str, int]) -> None:
        """Take down the histories of all layers, by their dotted names."""
        self.history_rank = max(0, *ranks.values()) if ranks else 0
        # The names fit the vision tower alone, too.
        different = [(name, rank) for name, rank in ranks.items() if rank != self.history_rank]
        self.history_pattern = {re.sub(r"^(base_model\.model\.)?(vision_model\.)?", "", n): r for n, r in different}

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain data, sets as sorted lists, so that the same adapter gives the same file."""
        return {key: sorted(value) if isinstance(value, set) else value for key, value in super().to_dict().items()}
