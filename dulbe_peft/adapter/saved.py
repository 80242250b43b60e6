"""What an adapter's file must hold to fit a model, and the other names that its keys may have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel, get_peft_model_state_dict
from peft.utils import CONFIG_NAME
from torch import nn

from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.adapter.registration import PREFIX
from dulbe_peft.adapter.targets import in_text_tower
from dulbe_peft.utils.tensors import read_tensors, tensor_shapes

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _without_vision_model(key: str) -> str:
    return key.replace("vision_model.", "", 1)


def _with_vision_model(key: str) -> str:
    head, dot, tail = key.partition("base_model.model.")
    if in_text_tower(tail) or tail.startswith("vision_model."):
        return key
    return f"{head}{dot}vision_model.{tail}" if dot else f"vision_model.{key}"


# Between `CLIPModel` and the vision towers that stand alone.
KEY_RENAMES: tuple[Callable[[str], str], ...] = (str, _without_vision_model, _with_vision_model)


def check_saved(saved: dict[str, torch.Tensor], known: dict[str, torch.Tensor], adapter: str) -> None:
    """Raise unless a file's tensors are the adapter's: the same keys and shapes, but for the history's length, finite.

    A file without text LoRA fits a model with one. A file with text LoRA fits a model that has no text tower.
    """
    ours = {key for key in known if f".{PREFIX}" in key and key.endswith(f".{adapter}")}
    theirs = {key for key in saved if f".{PREFIX}" in key}
    if not any(map(in_text_tower, theirs)) or not any(map(in_text_tower, known)):
        ours, theirs = ({key for key in keys if not in_text_tower(key)} for keys in (ours, theirs))
    if theirs and not ours & theirs:
        raise ValueError(
            f"none of the adapter's {len(theirs)} keys fits a layer of this model; the first is {min(theirs)!r}: the "
            "adapter was saved from another architecture, or targets other layers"
        )
    if ours != theirs:
        missing, unknown = sorted(ours - theirs), sorted(theirs - ours)
        raise ValueError(
            f"the saved adapter does not fit: keys missing {missing[:3]}, unknown {unknown[:3]} "
            f"({len(missing)} and {len(unknown)} in all)"
        )
    ranks = {saved[key].shape[-1] for key in ours if ".dulbe_history_" in key and saved[key].ndim}
    if len(ranks) > 1:
        raise ValueError(f"the saved adapter's history has different ranks {sorted(ranks)} in different layers")
    for key in sorted(ours):
        expected = known[key].shape
        if ".dulbe_history_" in key:
            expected = expected[:1] + saved[key].shape[1:2]
        if saved[key].shape != expected:
            shapes = f"{tuple(saved[key].shape)}, the model's {tuple(known[key].shape)}"
            raise ValueError(f"the saved adapter does not fit: {key!r} has shape {shapes}")
        if saved[key].dtype not in _FLOATS:
            raise ValueError(f"the saved adapter's {key!r} has type {saved[key].dtype}, expected floating point")
    for key, tensor in saved.items():
        if not tensor.is_meta and not torch.isfinite(tensor).all():
            raise ValueError(f"the saved adapter's {key!r} holds NaN or infinity")


def check_file(path: Path, config: DualModeLoraConfig, base_model: nn.Module) -> None:
    """Compare the file's header with the adapter that the configuration makes on the base model, without memory."""
    stand_ins: dict[int, Any] = {id(b): b.to("meta") for b in base_model.buffers()}
    stand_ins |= {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in base_model.parameters()}
    with torch.device("meta"):
        model = PeftModel(copy.deepcopy(base_model, stand_ins), copy.deepcopy(config))
    made = get_peft_model_state_dict(model, save_embedding_layers=False)
    expected = {name: tuple(tensor.shape) for name, tensor in made.items()}
    found = tensor_shapes(path)
    strange = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
    if strange:
        raise ValueError(
            f"{len(strange)} tensors are not what {CONFIG_NAME} makes on this base model, the first is "
            f"{strange[0]!r}: in the file {found.get(strange[0])}, expected {expected.get(strange[0])}"
        )
    for name, tensor in read_tensors(path)[0].items():
        if not tensor.is_floating_point():
            raise ValueError(f"tensor {name!r} has type {tensor.dtype}, expected floating point")
