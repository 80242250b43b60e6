"""Which base model a saved learner belongs to: what tells it from others, and where it may be."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dulbe_peft.adapter.registration import PREFIX
from dulbe_peft.encoders.loading import load_dual_encoder
from dulbe_peft.utils.folders import CheckpointError

KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = {str(kind).removeprefix("torch."): kind for kind in KINDS}
SAMPLES = 256  # values of each weight that are compared


def describe(base: Any, name: str | None, revision: str | None, local: bool) -> dict[str, str | None]:
    """What a learner's file says of its base model.

    Args:
        base: the pristine model, or the model under an adapter.
        name: its folder or Hub id, as it was loaded.
        revision: its revision on the Hub.
        local: note where a folder lies on this machine; else its name alone.

    Returns:
        `name`, `revision`; `folder`: the folder's absolute path or name, None for a Hub id; `type`: the
        configuration's model type; `dtype` of the weights; `digest`: SHA-256 of 256 values of every weight.
    """
    folder = None
    if name is not None and Path(name).is_dir():
        folder = str(Path(name).absolute()) if local else Path(name).absolute().name
    return {
        "name": name,
        "revision": revision,
        "folder": folder,
        "type": base.config.model_type,
        "dtype": _dtype(base),
        "digest": digest(base),
    }


def digest(base: nn.Module) -> str:
    """SHA-256 of the pristine weights' names, shapes, types and 256 values of each."""
    found = hashlib.sha256()
    weights = {}
    for name, tensor in base.state_dict().items():
        if PREFIX not in name and "modules_to_save" not in name:
            weights[name.replace(".base_layer.", ".").replace(".original_module.", ".")] = tensor
    for name in sorted(weights):
        flat = weights[name].flatten()
        some = flat[:: max(1, len(flat) // SAMPLES)].double().cpu().numpy()
        found.update(f"{name} {tuple(weights[name].shape)} {weights[name].dtype}".encode() + some.tobytes())
    return found.hexdigest()


def find(folder: Path, saved: dict[str, Any], name: str | None, revision: str | None, attention: str | None) -> Any:
    """Load the base model that a learner's file names, from wherever it is.

    Args:
        folder: the learner's.
        saved: what `describe` gave; version 0.1 left most of it out.
        name: the base model's folder or Hub id.
        revision: its revision on the Hub.
        attention: the attention kernel.

    Raises:
        ValueError: the learner names no base model.
        FileNotFoundError: the base model was a folder, and is not where it may be. The Hub is not asked for it.
    """
    if not name:
        raise ValueError(f"{folder} names no base model: pass base_model")
    if saved.get("folder") is not None:
        places = [Path(saved["folder"]), Path(name), folder.parent / name, folder.parent / Path(name).name]
        there = next((place for place in places if place.is_dir()), None)
        if there is None:
            raise FileNotFoundError(
                f"the base model of {folder} was in the folder {saved['folder']!r}, which is not there: pass "
                "base_model (--model on the command line)"
            )
        name = str(there)
    model = load_dual_encoder(name, revision, attn_implementation=attention)[0]
    return model.to(DTYPES.get(str(saved.get("dtype")), torch.float32))


def check(base: Any, saved: dict[str, Any], folder: Path) -> None:
    """Raise a `CheckpointError` unless a base model is the one that the learner in a folder was made with."""
    if saved.get("digest") is None:  # written by version 0.1
        return
    present = {"type": base.config.model_type, "dtype": _dtype(base)}
    for fact, found in present.items():
        if found != saved.get(fact):
            raise CheckpointError(
                f"the base model does not belong to the learner in {folder}: its {fact} is {found!r}, the learner was "
                f"made with {saved.get(fact)!r}"
            )
    if digest(base) != saved["digest"]:
        raise CheckpointError(
            f"the base model does not belong to the learner in {folder}: its weights are not those of "
            f"{repr(saved['name']) if saved.get('name') else 'the model'}, which the learner was made with"
        )


def _dtype(base: nn.Module) -> str:
    return str(next(base.parameters()).dtype).removeprefix("torch.")
