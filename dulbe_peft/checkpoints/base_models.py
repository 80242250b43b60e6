"""Which base model a saved learner belongs to: what tells it from others, and where it may be."""

from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from dulbe_peft.adapter.registration import PREFIX
from dulbe_peft.encoders.loading import load_dual_encoder
from dulbe_peft.utils.folders import CheckpointError
from dulbe_peft.utils.records import Record
from dulbe_peft.utils.tensors import weights_digest


class BaseModel(Record):
    """What a learner's file says of its base model."""

    name: str | None  # folder or Hub id, as it was loaded
    revision: str | None
    folder: str | None  # absolute path, or the name alone where the learner is published; None for a Hub id
    type: str  # the configuration's model type
    dtype: Literal["float32", "bfloat16", "float16", "float64"]
    digest: str


def describe(base: Any, name: str | None, revision: str | None, local: bool) -> BaseModel:
    """The record of a base model, pristine or under an adapter; with `local` it says where a folder lies here."""
    folder = None
    if name is not None and Path(name).is_dir():
        folder = str(Path(name).absolute()) if local else Path(name).absolute().name
    dtype: Any = str(next(base.parameters()).dtype).removeprefix("torch.")
    kind = base.config.model_type
    return BaseModel(name=name, revision=revision, folder=folder, type=kind, dtype=dtype, digest=digest(base))


def digest(base: nn.Module) -> str:
    """SHA-256 of the pristine weights' names, shapes, types and 256 values of each."""
    weights = {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): tensor
        for name, tensor in base.state_dict().items()
        if PREFIX not in name and "modules_to_save" not in name
    }
    return weights_digest(weights)


def find(folder: Path, saved: BaseModel, attention: str | None) -> Any:
    """Load the base model of the learner in `folder`; the Hub is not asked for one that was a folder."""
    name = saved.name
    if not name:
        raise ValueError(f"{folder} names no base model: pass base_model")
    if saved.folder is not None:
        places = [Path(saved.folder), Path(name), folder.parent / name, folder.parent / Path(name).name]
        there = next((place for place in places if place.is_dir()), None)
        if there is None:
            raise FileNotFoundError(
                f"the base model of {folder} was in the folder {saved.folder!r}, which is not there: pass "
                "base_model (--model on the command line)"
            )
        name = str(there)
    model = load_dual_encoder(name, saved.revision, attn_implementation=attention)[0]
    return model.to(getattr(torch, saved.dtype))


def check(base: Any, saved: BaseModel, folder: Path) -> None:
    """Raise a `CheckpointError` unless a base model is the one that the learner in a folder was made with."""
    found = describe(base, None, None, local=False)
    for name in ("type", "dtype", "digest"):
        own, wanted = getattr(found, name), getattr(saved, name)
        if own != wanted:
            what = f"its {name} is {own!r}, the learner was made with {wanted!r}"
            what = f"its weights are not those of {saved.name!r}, which it was made with" if name == "digest" else what
            raise CheckpointError(f"the base model does not belong to the learner in {folder}: {what}")
