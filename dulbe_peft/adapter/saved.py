"""Check that a saved adapter fits a model, and list the other names that the keys of its tensors may have."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from peft.config import PeftConfig
from torch import nn

from dulbe_peft.adapter.base import DualModeLayer
from dulbe_peft.adapter.config import PREFIX, AdapterFacts, DualModeLoraConfig
from dulbe_peft.adapter.linear import is_consistent
from dulbe_peft.adapter.targets import in_text_tower
from dulbe_peft.encoders.registry import ENCODERS, type_of
from dulbe_peft.utils.tensors import rounded_digest

# Entries of a tower's configuration that change its outputs but no weight: a test tries all entries of all encoders.
# The image size is left out, because position embeddings can be interpolated to another one.
_TOWER_SETTINGS = [
    *("hidden_act", "layer_norm_eps", "num_attention_heads", "rope_theta"),
    *("eos_token_id", "pad_token_id", "is_causal"),
]
_PROJECTIONS = ("visual_projection", "text_projection")
# Other parts with a digest of their own, as their names contain it, and what messages call them.
_PARTS = {"token_embedding.": "token_embeddings", "word_embeddings.": "token_embeddings"}
_PARTS |= {"vision_model.head.": "pooling_head", "text_model.head.": "text_projection"}
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _with_vision_model(key: str) -> str:
    head, dot, tail = key.partition("base_model.model.")
    if in_text_tower(tail) or tail.startswith("vision_model."):
        return key
    return f"{head}{dot}vision_model.{tail}" if dot else f"vision_model.{key}"


# How keys change between `CLIPModel` and the vision towers that stand alone.
KEY_RENAMES: tuple[Callable[[str], str], ...] = (
    str,
    lambda key: key.replace("vision_model.", "", 1),
    _with_vision_model,
)


class MisfitError(ValueError):
    """Raised if an adapter was made for another base model, or with settings that its configuration does not state."""


def innermost(model: object) -> Any:
    """Return the base model inside a `PeftModel`, or the model itself."""
    while hasattr(model, "get_base_model"):
        model = model.get_base_model()
    return model


def describe_origin(config: PeftConfig, model: object) -> str:
    """Return a clause for messages that names an adapter's base model and the model it is being loaded into."""
    origin, kind = config.base_model_name_or_path, (config.auto_mapping or {}).get("base_model_class")
    model = innermost(model)
    name = getattr(model, "name_or_path", None) or getattr(getattr(model, "config", None), "_name_or_path", None)
    target = f"{name!r}, a {type(model).__name__}" if name else f"a {type(model).__name__} without a name"
    made_on = repr(origin) if origin else "a model without a name"
    return f"it was made on {made_on}{f', a {kind}' if kind else ''}, and this model is {target}"


def tower_of(model_type: object) -> str | None:
    """Return "vision" or "text" if this model type is an encoder or a tower that stands alone, otherwise None."""
    parts = str(model_type).split("_")
    if model_type in ENCODERS or "vision" in parts:
        return "vision"
    return "text" if "text" in parts else None


def facts_of(config: DualModeLoraConfig, model: nn.Module) -> AdapterFacts:
    """Return what is written about an adapter of a model when it is saved."""
    tower = config.facts.tower or tower_of(type_of(innermost(model)))
    return AdapterFacts(tower, base_digests(model), base_settings(model))


def check_tower(config: DualModeLoraConfig, model: nn.Module, tower: str | None) -> None:
    """Raise an error if the model is a tower other than the one that the adapter's modes were made for."""
    if config.facts.tower and tower and config.facts.tower != tower:
        raise ValueError(
            f"the adapter's modes are for a {config.facts.tower} tower, but {describe_origin(config, model)}"
        )


def base_digests(model: nn.Module) -> dict[str, str]:
    """Return digests of 256 pristine values of the weights of each tower, as bfloat16 and as float16.

    These are the weights of the blocks and of the patch embedding; position embeddings depend on the resolution. The
    projections, token embeddings and pooling heads have digests of their own, because not every model has them.

    Keys look like "vision bfloat16"; "vision shapes" is a digest of names and shapes. A dtype is left out if the
    weights were already rounded to a different half-precision type. If any weight is quantised or offloaded, the
    result is empty.
    """
    towers: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in model.state_dict().items():
        name = key.removeprefix("base_model.model.").replace(".base_layer.", ".").replace(".original_module.", ".")
        parts = name.split(".")
        part = parts[0] if parts[0] in _PROJECTIONS else next((p for key, p in _PARTS.items() if key in name), None)
        in_block = any(each.isdigit() for each in parts) or "patch_embed" in name
        if PREFIX in name or ".modules_to_save." in name or not (in_block or part):
            continue
        if type(tensor) is not torch.Tensor or tensor.is_meta or tensor.dtype not in _FLOATS:
            return {}
        tower = part or ("text" if in_text_tower(name) else "vision")
        towers.setdefault(tower, {})[name.removeprefix("vision_model.")] = tensor
    digests = {}
    for tower, weights in towers.items():
        digests[f"{tower} shapes"] = rounded_digest({name: weights[name][:0] for name in weights}, torch.float16)[:16]
        for dtype in (torch.bfloat16, torch.float16):
            if all(weight.dtype in (dtype, torch.float32, torch.float64) for weight in weights.values()):
                kind = str(dtype).removeprefix("torch.")
                digests[f"{tower} {kind}"] = rounded_digest(weights, dtype)[:16]
    return digests


def base_settings(model: nn.Module) -> dict[str, str]:
    """Return what the outputs of each tower depend on besides weights and resolution, such as its activation function.

    Keys look like "vision hidden_act". If a model has no configuration of transformers, the result is empty.
    """
    config = getattr(innermost(model), "config", None)
    towers = {name: tower for name in ("vision", "text") if (tower := getattr(config, f"{name}_config", None))}
    if not towers and config is not None:
        towers = {str(tower_of(type_of(innermost(model)))): config}
    settings = {(tower, name): getattr(part, name, None) for tower, part in towers.items() for name in _TOWER_SETTINGS}
    for tower in towers:
        if settings[tower, "is_causal"] is None:  # transformers' default
            settings[tower, "is_causal"] = tower == "text"
    return {
        f"{tower} {name}": str(value)
        for (tower, name), value in settings.items()
        if value is not None or (tower == "text" and name.endswith("token_id"))
    }


def differing(saved: dict[str, str], present: dict[str, str]) -> dict[str, str]:
    """Return the saved values of the keys that both have with other values."""
    return {key: saved[key] for key in present if saved.get(key, present[key]) != present[key]}


def warn_of_another_base(config: DualModeLoraConfig, model: nn.Module) -> None:
    """Warn if an adapter was trained on a base model whose weights or settings differ from the model's."""
    digests = base_digests(model) if config.facts.base_digests else {}
    other_weights = [key.split() for key in differing(config.facts.base_digests, digests)]
    if any(
        what == "shapes" and tower in ("vision", "text") for tower, what in other_weights
    ):  # different shapes raise an error when loaded
        return
    settings = base_settings(model)
    if others := differing(config.facts.base_settings, settings):
        were = ", ".join(f"{key}={value}" for key, value in others.items())
        now = ", ".join(f"{key}={settings[key]}" for key in others)
        warnings.warn(
            f"the adapter was made on a base model with {were}, and this one has {now}: "
            f"{describe_origin(config, model)}. Predictions will be wrong",
            stacklevel=4,
        )
    if towers := sorted({f"{tower} tower" if tower in ("vision", "text") else tower for tower, _ in other_weights}):
        warnings.warn(
            f"the adapter was made on a base model with other weights in the {' and the '.join(towers)}: "
            f"{describe_origin(config, model)}. Its update does not fit other weights, so predictions will be wrong",
            stacklevel=4,
        )


def check_not_held(model: nn.Module, adapter: str, state: dict[str, torch.Tensor]) -> None:
    """Raise an error if a state dict of the model would change an adapter's weights that a running block holds.

    A block that holds the history does not hold the modes, so these may be loaded, as at the end of a training loop.
    """
    held = {name: m for name, m in model.named_modules() if isinstance(m, DualModeLayer) and m.held_adapter == adapter}
    present = model.state_dict() if held else {}
    for name, layer in held.items():
        live = (f".{PREFIX}shared_B.", f".{PREFIX}residual_B.", f".{PREFIX}P.") if layer.holds_history_only else ()
        keys = {key for key in state if key.startswith(f"{name}.") and not any(part in key for part in live)}
        keys = {key for key in keys if f".{PREFIX}" not in key or key.endswith(f".{adapter}")}  # and the base weights
        for key in sorted(keys & present.keys()):
            new, old = state[key], present[key]
            if new.shape != old.shape or not torch.equal(new.to(old), old):
                raise ValueError(
                    f"a block is running that holds, scales or leaves out weights of the adapter {adapter!r}, and "
                    f"{key!r} would be replaced by other values: load them before or after the block"
                )


def check_saved(saved: dict[str, torch.Tensor], known: dict[str, torch.Tensor], adapter: str) -> None:
    """Raise an error unless the saved tensors are finite and match the adapter's tensors in the model.

    Tensors of the text tower are not compared if the file or the model has none.
    """
    expected_keys = {key for key in known if f".{PREFIX}" in key and key.endswith(f".{adapter}")}
    saved_keys = {key for key in saved if f".{PREFIX}" in key}
    if not any(map(in_text_tower, saved_keys)) or not any(map(in_text_tower, known)):
        expected_keys, saved_keys = (
            {key for key in keys if not in_text_tower(key)} for keys in (expected_keys, saved_keys)
        )
    if saved_keys and not expected_keys & saved_keys:
        raise MisfitError(f"none of its {len(saved_keys)} keys matches a layer: {min(saved_keys)!r}")
    if expected_keys != saved_keys:
        missing, unknown = sorted(expected_keys - saved_keys), sorted(saved_keys - expected_keys)
        raise MisfitError(f"keys missing {missing[:3]}, unknown {unknown[:3]}")
    # PEFT would load other keys, even into weights of the base model.
    foreign = sorted(key for key in saved if f".{PREFIX}" not in key and ".modules_to_save." not in key)
    if foreign:
        raise ValueError(f"the saved adapter holds {foreign[0]!r}, which is not a tensor of an adapter")
    for key in sorted(expected_keys):
        expected = known[key].shape
        if ".dulbe_history_" in key:
            expected = expected[:1] + saved[key].shape[1:2]
        if saved[key].shape != expected:
            shapes = f"{tuple(saved[key].shape)}, the model's {tuple(known[key].shape)}"
            raise MisfitError(f"{key!r} has shape {shapes}")
        if saved[key].dtype not in _FLOATS:
            raise ValueError(f"the saved adapter's {key!r} has dtype {saved[key].dtype}, expected floating point")
    for key in (key for key in expected_keys if ".dulbe_history_P" in key):
        down, up = saved[key], saved[key.replace(".dulbe_history_P", ".dulbe_history_B")]
        if not is_consistent(down, up):
            raise ValueError(f"the saved adapter's {key!r} does not fit its B: {tuple(down.shape)}, {tuple(up.shape)}")
    for key, tensor in saved.items():
        if not tensor.is_meta and not torch.isfinite(tensor).all():
            raise ValueError(f"the saved adapter's {key!r} holds NaN or infinity")
