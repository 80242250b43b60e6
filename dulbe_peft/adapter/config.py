"""The adapter's configuration."""

from __future__ import annotations

import re
import warnings
import zipfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from peft.config import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME, WEIGHTS_NAME, TaskType
from torch.serialization import get_unsafe_globals_in_checkpoint

from dulbe_peft.adapter.expressions import check_expression
from dulbe_peft.adapter.registration import DULBE
from dulbe_peft.utils.checks import check_int, check_number, is_int
from dulbe_peft.utils.hub import has_file
from dulbe_peft.utils.tensors import tensor_shapes

MAX_HISTORY_RANK = 2**20  # 100,000 tasks; no model grows more, and a file that claims more is refused


def _checked_names(name: str, value: Any, or_expression: bool) -> Any:
    """Names as a sorted list; None or an expression as it is."""
    if value is None:
        return None
    if isinstance(value, str) and or_expression:
        check_expression(name, value)
        return value
    if not isinstance(value, (list, set, tuple)) or not all(isinstance(entry, str) for entry in value):
        kinds = "a list of strings or a regular expression" if or_expression else "a list of strings"
        raise TypeError(f"{name} must be {kinds}, got {value!r}")
    return sorted(value)


def _check_indices(value: Any) -> int | list[int] | None:
    """`layers_to_transform` in Python's own types, which JSON knows."""
    if value is None:
        return None
    if is_int(value):
        return int(value)
    if isinstance(value, (list, tuple, set)) and all(is_int(entry) for entry in value):
        return [int(entry) for entry in (sorted(value) if isinstance(value, set) else value)]
    raise TypeError(f"layers_to_transform must be an int or a list of ints, got {value!r}")


def _holds_only_tensors(path: Path) -> bool:
    """Whether a local file is torch.save's archive and names no class or function but those of plain tensors."""
    try:
        return zipfile.is_zipfile(path) and not get_unsafe_globals_in_checkpoint(path)
    except Exception:  # a damaged archive: the reader of opcodes promises no kinds of errors
        return False


@dataclass
class DualModeLoraConfig(PeftConfig):
    """Configuration of [`DualModeLoraModel`]: frozen-basis shared and residual modes in a CLIP vision tower.

    The help text of every field stands in its metadata; the command line and the documentation read it from there.

    Raises:
        TypeError: a value is of another type, such as a rank that is not an int.
        ValueError: a rank is negative, both visual ranks are zero, an expression is none, or fields contradict each
            other.

    Reference:
        Section "Gradient-Demand Dual-Mode Subspace Allocation"; defaults from "Implementation Details".
    """

    shared_rank: int = field(
        default=1, metadata={"help": "Rank r_S of the shared mode, inside the historically used directions."}
    )
    residual_rank: int = field(
        default=8, metadata={"help": "Rank r_R of the residual modes, outside the historically used directions."}
    )
    support_rank: int = field(
        default=128,
        metadata={
            "help": "K_h, how many top eigenvectors of the input statistics count as historically used; clamped to "
            "what a layer and its data allow."
        },
    )
    target_modules: list[str] | str | None = field(
        default=None,
        metadata={
            "help": "Linear layers to adapt: a list of name endings, a regular expression, or 'all-linear'. "
            "None: keys, values and MLP, which are k_proj, v_proj, fc1 and fc2 in CLIP. Inside a dual encoder only "
            "the vision tower is adapted; a list and 'all-linear' leave its pooling head alone, 'all-linear' also the "
            "projections."
        },
    )
    exclude_modules: list[str] | str | None = field(
        default=None, metadata={"help": "Names (list of endings, or a regular expression) of layers to leave alone."}
    )
    text_rank: int = field(
        default=8, metadata={"help": "Rank of the plain LoRA in the text tower, where there is one; 0 turns it off."}
    )
    text_alpha: float = field(
        default=1.0, metadata={"help": "Numerator of the text LoRA's scale, text_alpha / text_rank."}
    )
    text_target_modules: list[str] | None = field(
        default=None,
        metadata={
            "help": "Name endings of the text tower's layers with LoRA. None: keys, values and MLP, which are k_proj, "
            "v_proj, fc1 and fc2 in CLIP."
        },
    )
    init_weights: bool = field(
        default=True,
        metadata={"help": "True: every B starts at zero, the output is the base model's. False: random B."},
    )
    layers_to_transform: list[int] | int | None = field(
        default=None, metadata={"help": "Indices of the vision tower's blocks to adapt; None adapts all."}
    )
    layers_pattern: list[str] | str | None = field(
        default=None,
        metadata={"help": "Name of the nn.ModuleList that layers_to_transform indexes, where it is not found."},
    )
    modules_to_save: list[str] | None = field(
        default=None, metadata={"help": "Further modules to train in full and to save with the adapter."}
    )
    history_rank: int = field(
        default=0,
        metadata={"help": "Rank of the folded history; kept up to date by the library, never set by hand."},
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = DULBE
        for name in ("shared_rank", "residual_rank", "text_rank"):
            setattr(self, name, check_int(name, getattr(self, name), 0))
        self.support_rank = check_int("support_rank", self.support_rank, 1)
        self.history_rank = check_int("history_rank", self.history_rank, 0, MAX_HISTORY_RANK)
        if self.shared_rank + self.residual_rank == 0:
            raise ValueError("shared_rank and residual_rank are both 0: at least one must be positive")
        check_number("text_alpha", self.text_alpha)
        self.target_modules = _checked_names("target_modules", self.target_modules, or_expression=True)
        self.exclude_modules = _checked_names("exclude_modules", self.exclude_modules, or_expression=True)
        for name in ("text_target_modules", "modules_to_save"):
            setattr(self, name, _checked_names(name, getattr(self, name), or_expression=False))
        _checked_names("layers_pattern", self.layers_pattern, or_expression=True)
        patterns = [self.layers_pattern] if isinstance(self.layers_pattern, str) else self.layers_pattern or ()
        for pattern in patterns:  # PEFT puts each into an expression of its own
            if not isinstance(pattern, str) or not re.fullmatch(r"[\w.]+", pattern):
                raise ValueError(f"layers_pattern has {pattern!r}: a name has letters, digits, _ and dots")
        for name in self.modules_to_save or ():
            if not re.fullmatch(r"[\w.]+", name):
                raise ValueError(f"modules_to_save names {name!r}: a module's name has letters, digits, _ and dots")
        self.layers_to_transform = _check_indices(self.layers_to_transform)
        if isinstance(self.target_modules, list) and not self.target_modules:
            raise ValueError("target_modules is an empty list: name at least one layer, or pass None for the default")
        if isinstance(self.target_modules, str) and self.target_modules != "all-linear":
            if self.layers_to_transform is not None:
                raise ValueError(
                    "layers_to_transform cannot be used when target_modules is a regular expression "
                    f"({self.target_modules!r}): name the layers in a list, or put the indices into the expression"
                )
        if self.layers_pattern and self.layers_to_transform is None:
            raise ValueError(f"layers_pattern={self.layers_pattern!r} has no effect without layers_to_transform")
        if self.task_type == TaskType.FEATURE_EXTRACTION:
            warnings.warn(
                "task_type=FEATURE_EXTRACTION makes PEFT pass text-model arguments to the model, which every CLIP "
                "model refuses: leave task_type unset",
                stacklevel=3,
            )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, subfolder: str | None = None, **kwargs: Any) -> Any:
        """As PEFT's; PEFT reads it first, so this is where an adapter that is a pickle or damaged is refused.

        A folder's `adapter_model.bin` is read, by PEFT's restricted reader, where it can hold nothing but tensors:
        that is what `save_pretrained(..., safe_serialization=False)` writes.

        Raises:
            ValueError: the repository holds `adapter_model.bin` and no `adapter_model.safetensors`, or a folder does
                and the file could hold more than tensors (it is not unpickled), or a folder's safetensors file is
                damaged or has a history of another rank.
        """
        where = {name: kwargs[name] for name in ("revision", "token", "cache_dir") if name in kwargs}
        source, prefix = str(pretrained_model_name_or_path), "" if subfolder is None else f"{subfolder}/"
        if (
            not has_file(source, prefix + SAFETENSORS_WEIGHTS_NAME, **where)
            and has_file(source, prefix + WEIGHTS_NAME, **where)
            and not _holds_only_tensors(Path(source) / prefix / WEIGHTS_NAME)
        ):
            raise ValueError(
                f"{source!r} holds {WEIGHTS_NAME}, a pickle, and no {SAFETENSORS_WEIGHTS_NAME}: only safetensors "
                "files are read"
            )
        config = super().from_pretrained(pretrained_model_name_or_path, subfolder=subfolder, **kwargs)
        file = Path(source) / prefix / SAFETENSORS_WEIGHTS_NAME
        if file.is_file():  # its header alone, before memory is taken for what the configuration claims
            ranks = {shape[-1] for name, shape in tensor_shapes(file).items() if ".dulbe_history_" in name and shape}
            if ranks - {getattr(config, "history_rank", 0)}:
                raise ValueError(f"history_rank is {config.history_rank}, but {file} has a history of {sorted(ranks)}")
        return config

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain data, sets as sorted lists, so that the same adapter gives the same file."""
        return {key: sorted(value) if isinstance(value, set) else value for key, value in super().to_dict().items()}

    @classmethod
    def own_fields(cls) -> list[Any]:
        """The dataclass fields a user sets, without PEFT's bookkeeping and without `history_rank`."""
        inherited = {f.name for f in fields(PeftConfig)}
        return [f for f in fields(cls) if f.name not in inherited and f.name != "history_rank"]
