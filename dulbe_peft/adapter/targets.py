"""Choose the layers to adapt: in the vision tower by `target_modules`, in the text tower by `text_target_modules`."""

import difflib
import re
import warnings
from typing import Any

from peft import NoMatchingPeftModuleError
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
from torch import nn

from dulbe_peft.adapter.base import DualModeLayer, is_linear
from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.encoders.registry import CLIP_TEXT_TARGETS, ENCODERS, find_record

# The text projection is not inside the text tower, but it counts as a part, because only texts pass through it.
_TEXT_PARTS = {record.text_tower for record in ENCODERS.values() if record.text_tower} | {"text_projection"}


# The default target of LLaVA, a language model whose vision tower is CLIP's or SigLIP's: keys, values and MLP of the
# tower's blocks. Names alone would also match layers of the language model.
LLAVA_TYPES = ("llava", "llava_next", "llava_onevision")
LLAVA_TARGETS = r".*vision_tower\..*layers\.\d+\.(self_attn\.(k|v)_proj|mlp\.fc[12])"


def in_text_tower(key: str) -> bool:
    """Return whether the module with this dotted name belongs to the text tower or is its projection."""
    return not _TEXT_PARTS.isdisjoint(key.split("."))


def find_target(config: DualModeLoraConfig, model: nn.Module, key: str) -> Any:
    """Return whether PEFT is to adapt a module, or PEFT's `_ExcludedModule` if the configuration excludes it."""
    match = check_target_module_exists(config, key)
    if isinstance(match, _ExcludedModule):
        return match
    record = find_record(model)
    if in_text_tower(key):
        if config.text_target_modules:
            targeted = any(f".{key}".endswith(f".{name}") for name in config.text_target_modules)
        else:
            endings = record.text_targets if record else CLIP_TEXT_TARGETS
            targeted = re.fullmatch(rf"(.*\.)?({endings})", key) is not None
        return config.text_rank > 0 and targeted
    # A list of names never selects the pooling head; a regular expression can.
    if not isinstance(config.target_modules, str) and record is not None and record.pooling_head in key.split("."):
        return False
    return match


def check_targets(config: DualModeLoraConfig, model: nn.Module) -> None:
    """Raise an error if a target cannot be adapted, or if no vision layer is a target.

    For a known encoder, "all-linear" is first replaced by the names of the linear layers in its vision blocks.
    """
    modules = {name: module for name, module in model.named_modules() if name and ".base_layer" not in name}
    if config.target_modules == "all-linear" and find_record(model) is not None:
        linear = [n for n, m in modules.items() if isinstance(m, DualModeLayer) or is_linear(m)]
        linear = [name for name in linear if not in_text_tower(name)]
        # A layer with a number in its name is inside a block.
        inside = [name for name in linear if any(part.isdigit() for part in name.split("."))]
        config.target_modules = sorted({name.rpartition(".")[2] for name in inside})
    every = config.target_modules == "all-linear"
    visual = False
    for name, module in modules.items():
        if every and not is_linear(module):
            continue
        targeted = find_target(config, model, name)
        if not isinstance(targeted, _ExcludedModule) and (targeted or every):
            _check_target(config, name, module)
            visual = visual or not in_text_tower(name)
    in_text = [name for name, module in modules.items() if in_text_tower(name) and is_linear(module)]
    unknown = [
        name for name in config.text_target_modules or [] if not any(f".{key}".endswith(f".{name}") for key in in_text)
    ]
    if in_text and unknown and config.text_rank:
        raise NoMatchingPeftModuleError(
            f"text_target_modules has {unknown}, but the text tower has no linear layers with these endings; it has "
            f"{sorted({name.rpartition('.')[2] for name in in_text})}"
        )
    if isinstance(config.target_modules, str) and not every and not config.text_rank:
        texts = [n for n, m in modules.items() if in_text_tower(n) and is_linear(m)]
        ignored = [name for name in texts if re.fullmatch(config.target_modules, name)]
        if ignored and visual:
            warnings.warn(
                f"target_modules={config.target_modules!r} also matches {len(ignored)} layers of the text tower, such "
                f"as {ignored[0]!r}. They are not adapted, because text_rank is 0",
                stacklevel=2,
            )
    if not visual and not every and not config.exclude_modules and not config.modules_to_save:
        raise NoMatchingPeftModuleError(_no_target_message(config, list(modules)))


def _check_target(config: DualModeLoraConfig, name: str, module: nn.Module) -> None:
    linear: Any = module.get_base_layer() if isinstance(module, DualModeLayer) else module
    if not is_linear(linear):
        hint = ""
        if isinstance(linear, nn.MultiheadAttention):
            hint = "; convert the model to the transformers layout, where q, k and v are linear layers"
        kind = f"{type(linear).__module__}.{type(linear).__qualname__}"
        raise ValueError(f"target {name!r} is a {kind}, but only torch.nn.Linear can be adapted{hint}")
    if type(linear) is nn.modules.linear.NonDynamicallyQuantizableLinear:
        raise ValueError(
            f"target {name!r} belongs to a torch.nn.MultiheadAttention, which uses its weight without calling it, so "
            "an adapter would have no effect: convert the model to the transformers layout, or exclude this layer"
        )
    if in_text_tower(name):
        ranks, rank = "text_rank", config.text_rank
    else:
        ranks, rank = "shared_rank + residual_rank", sum(config.ranks_of(name))
        if not rank:
            raise ValueError(f"shared_rank and the residual_rank of layer {name!r} are both 0: one must be positive")
    if rank > linear.in_features:
        raise ValueError(f"{ranks} = {rank} exceeds in_features = {linear.in_features} of layer {name!r}")


def _no_target_message(config: DualModeLoraConfig, names: list[str]) -> str:
    message = f"Target modules {config.target_modules} not found in the base model."
    if config.layers_to_transform is not None:
        message += f" Only layers_to_transform={config.layers_to_transform} were searched."
    if any(check_target_module_exists(config, name) for name in names):
        message += " They match only modules of the text tower: name those in text_target_modules."
    targets = [config.target_modules] if isinstance(config.target_modules, str) else config.target_modules or []
    endings = sorted({name.rpartition(".")[2] for name in names})
    close = sorted({match for target in targets for match in difflib.get_close_matches(target, endings)})
    return message + (f" Closest names: {close}." if close else "")
