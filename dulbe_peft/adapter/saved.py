"""What an adapter's file must hold to fit a model, and the other names that its keys may have."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dulbe_peft.adapter.linear import is_consistent
from dulbe_peft.adapter.registration import PREFIX
from dulbe_peft.adapter.targets import in_text_tower
from dulbe_peft.encoders.registry import ENCODERS
from dulbe_peft.utils.tensors import rounded_digest

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _with_vision_model(key: str) -> str:
    head, dot, tail = key.partition("base_model.model.")
    if in_text_tower(tail) or tail.startswith("vision_model."):
        return key
    return f"{head}{dot}vision_model.{tail}" if dot else f"vision_model.{key}"


# Between `CLIPModel` and the vision towers that stand alone.
KEY_RENAMES: tuple[Callable[[str], str], ...] = (
    str,
    lambda key: key.replace("vision_model.", "", 1),
    _with_vision_model,
)


class MisfitError(ValueError):
    """The adapter is of another base model, or of other settings than its configuration says."""


def innermost(model: Any) -> Any:
    """Return the base model inside a `PeftModel`, or the model itself."""
    while hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model


def whose(config: Any, model: Any) -> str:
    """On which base model an adapter was made, and which one it is being put into."""
    made, kind = config.base_model_name_or_path, (config.auto_mapping or {}).get("base_model_class")
    model = innermost(model)
    own = getattr(model, "name_or_path", None) or getattr(getattr(model, "config", None), "_name_or_path", None)
    here = f"{own!r}, a {type(model).__name__}" if own else f"a {type(model).__name__} without a name"
    return f"it was made on {made!r}{f', a {kind}' if kind else ''}, and this model is {here}"


def tower_of(model_type: Any) -> str | None:
    """Return "vision" or "text" for an encoder or a tower that stands alone, by its type; None for other models."""
    parts = str(model_type).split("_")
    if model_type in ENCODERS or "vision" in parts:
        return "vision"
    return "text" if "text" in parts else None


def check_tower(config: Any, model: Any, tower: str | None) -> None:
    """Raise where an adapter's modes were made for another tower than the model is."""
    if config.tower and tower and config.tower != tower:
        raise ValueError(f"the adapter's modes are for a {config.tower} tower, but {whose(config, model)}")


def base_digests(model: nn.Module) -> dict[str, str]:
    """Return a digest of 256 pristine values of every weight in each tower's blocks, as bfloat16 and as float16.

    Keys are such as "vision bfloat16"; "vision shapes" is a digest of names and shapes. A type is left out that the
    weights cannot be converted to without another rounding. Nothing is returned where weights are quantised or not
    here.
    """
    towers: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in model.state_dict().items():
        name = key.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")
        if PREFIX in name or ".modules_to_save." in name or not any(part.isdigit() for part in name.split(".")):
            continue
        if type(tensor) is not torch.Tensor or tensor.is_meta or tensor.dtype not in _FLOATS:
            return {}
        tower = "text" if in_text_tower(name) else "vision"
        towers.setdefault(tower, {})[name.removeprefix("vision_model.")] = tensor
    found = {}
    for tower, weights in towers.items():
        found[f"{tower} shapes"] = rounded_digest({name: weights[name][:0] for name in weights}, torch.float16)[:16]
        for dtype in (torch.bfloat16, torch.float16):
            if all(weight.dtype in (dtype, torch.float32, torch.float64) for weight in weights.values()):
                kind = str(dtype).removeprefix("torch.")
                found[f"{tower} {kind}"] = rounded_digest(weights, dtype)[:16]
    return found


def warn_of_another_base(config: Any, model: nn.Module) -> None:
    """Warn where an adapter was saved on other weights than the model has."""
    here = base_digests(model) if config.base_digests else {}
    differing = [key.split() for key in here if config.base_digests.get(key, here[key]) != here[key]]
    other = sorted({tower for tower, _ in differing})
    if other and "shapes" not in {what for _, what in differing}:  # else loading raises an error
        warnings.warn(
            f"the adapter was made on a base model with other weights in the {' and the '.join(other)} tower: "
            f"{whose(config, model)}. It changes these weights, so its answers will be wrong",
            stacklevel=4,
        )


def check_saved(saved: dict[str, torch.Tensor], known: dict[str, torch.Tensor], adapter: str) -> None:
    """Raise unless a file's tensors are the adapter's, finite; text LoRA may be missing, or the model's text tower."""
    ours = {key for key in known if f".{PREFIX}" in key and key.endswith(f".{adapter}")}
    theirs = {key for key in saved if f".{PREFIX}" in key}
    if not any(map(in_text_tower, theirs)) or not any(map(in_text_tower, known)):
        ours, theirs = ({key for key in keys if not in_text_tower(key)} for keys in (ours, theirs))
    if theirs and not ours & theirs:
        raise MisfitError(f"none of its {len(theirs)} keys fits a layer: {min(theirs)!r}")
    if ours != theirs:
        missing, unknown = sorted(ours - theirs), sorted(theirs - ours)
        raise MisfitError(f"keys missing {missing[:3]}, unknown {unknown[:3]}")
    # PEFT would load them, also in place of a weight of the base model.
    strange = sorted(key for key in saved if f".{PREFIX}" not in key and ".modules_to_save." not in key)
    if strange:
        raise ValueError(f"the saved adapter holds {strange[0]!r}, which is no tensor of an adapter")
    for key in sorted(ours):
        expected = known[key].shape
        if ".dulbe_history_" in key:
            expected = expected[:1] + saved[key].shape[1:2]
        if saved[key].shape != expected:
            shapes = f"{tuple(saved[key].shape)}, the model's {tuple(known[key].shape)}"
            raise MisfitError(f"{key!r} has shape {shapes}")
        if saved[key].dtype not in _FLOATS:
            raise ValueError(f"the saved adapter's {key!r} has type {saved[key].dtype}, expected floating point")
    for key in (key for key in ours if ".dulbe_history_P" in key):
        down, up = saved[key], saved[key.replace(".dulbe_history_P", ".dulbe_history_B")]
        if not is_consistent(down, up):
            raise ValueError(f"the saved adapter's {key!r} does not fit its B: {tuple(down.shape)}, {tuple(up.shape)}")
    for key, tensor in saved.items():
        if not tensor.is_meta and not torch.isfinite(tensor).all():
            raise ValueError(f"the saved adapter's {key!r} holds NaN or infinity")
