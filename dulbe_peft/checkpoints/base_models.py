"""The base model of a saved learner: how it is identified, and where it is found."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from dulbe_peft.adapter.config import PREFIX
from dulbe_peft.adapter.saved import base_settings, differing
from dulbe_peft.encoders.loading import load_encoder
from dulbe_peft.encoders.registry import find_model
from dulbe_peft.utils.folders import CheckpointError
from dulbe_peft.utils.records import Record
from dulbe_peft.utils.tensors import weights_digest


class SavedBase(Record):
    """The record of the base model in a learner's file."""

    name: str | None  # folder or Hub id from which it was loaded
    revision: str | None
    folder: str | None  # absolute path, or only the folder's name in an uploaded learner; None for a Hub id
    type: str  # the model type in its configuration
    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    digest: str
    settings: dict[str, str]  # what outputs depend on besides weights, such as "vision hidden_act"


def describe(base: Any, name: str | None, revision: str | None, local: bool) -> SavedBase:
    """Return the record of a base model, pristine or under an adapter; with `local`, it has the folder's full path."""
    folder = None
    if name is not None and Path(name).is_dir():
        folder = str(Path(name).absolute()) if local else Path(name).absolute().name
    dtype: Any = str(next(base.parameters()).dtype).removeprefix("torch.")
    kind = base.config.model_type
    return SavedBase(
        name=name,
        revision=revision,
        folder=folder,
        type=kind,
        dtype=dtype,
        digest=digest(base),
        settings=base_settings(base),
    )


def digest(base: nn.Module) -> str:
    """Return the SHA-256 of the names, shapes and types of the pristine weights and of 256 values of each."""
    weights = {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): tensor
        for name, tensor in base.state_dict().items()
        if PREFIX not in name and "modules_to_save" not in name
    }
    return weights_digest(weights)


def find(folder: Path, saved: SavedBase, attention: str | None) -> Any:
    """Load the base model of the learner in `folder`; if it was a folder, the Hub is not searched for it."""
    name = saved.name
    if not name:
        raise ValueError(f"{folder} names no base model: pass base_model")
    if saved.folder is not None:
        candidates = [Path(saved.folder), Path(name), folder.parent / name, folder.parent / Path(name).name]
        existing = next((path for path in candidates if path.is_dir()), None)
        if existing is None:
            raise FileNotFoundError(
                f"the base model of {folder} was in the folder {saved.folder!r}, which does not exist: pass "
                "base_model (--model on the command line)"
            )
        name = str(existing)
    model = load_encoder(*find_model(name, saved.revision), saved.revision, attention)
    return model.to(getattr(torch, saved.dtype))


def check(base: object, saved: SavedBase, folder: Path) -> None:
    """Raise a `CheckpointError` unless the learner in `folder` was trained with this base model."""
    given = describe(base, None, None, local=False)
    wrong = f"the base model does not belong to the learner in {folder}"
    for key, expected in differing(saved.settings, given.settings).items():
        raise CheckpointError(f"{wrong}: its {key} is {given.settings[key]!r}, but the learner needs {expected!r}")
    for name in ("type", "dtype", "digest"):
        actual, expected = getattr(given, name), getattr(saved, name)
        if actual != expected:
            what = f"its {name} is {actual!r}, but the learner needs {expected!r}"
            what = (
                f"its weights are not those of {saved.name!r}, which the learner needs" if name == "digest" else what
            )
            raise CheckpointError(f"{wrong}: {what}")
