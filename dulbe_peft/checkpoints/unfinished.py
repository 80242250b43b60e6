"""What a checkpoint in the middle of a task holds beside the learner: which task, and what was measured before it."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from dulbe_peft.checkpoints.layout import TASK_FILE
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.utils.files import read_json
from dulbe_peft.utils.folders import CheckpointError, read_manifest
from dulbe_peft.utils.tensors import read_tensors, write_tensors

FORMAT = "dulbe-task-1"
RNG_FILES = "rng_state*.pth"  # transformers', one of each process


def begin(folder: Path) -> None:
    """Make a checkpoint that is about to be written anew an incomplete one: its last file goes first."""
    (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)


def check_whole(folder: Path) -> None:
    """Raise a `CheckpointError` unless a checkpoint was written to its end and each of its files is whole."""
    read_manifest(folder)
    random = [path.name for path in sorted(folder.glob(RNG_FILES))] or [RNG_FILES]
    for name in (OPTIMIZER_NAME, SCHEDULER_NAME, *random, TRAINER_STATE_NAME):
        if not (folder / name).is_file():
            why = "it was not written to its end, or with save_only_model, and training cannot go on with it"
            raise CheckpointError(f"{folder} holds no {name}: {why}")
        try:
            if name == TRAINER_STATE_NAME:
                read_json(folder / name)
            else:  # torch writes zip archives with a checksum of each part
                with zipfile.ZipFile(folder / name) as archive:
                    if damaged := archive.testzip():
                        raise ValueError(f"the checksum of {damaged} differs")
        except (ValueError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{folder / name} is damaged: {error}") from error


def record_of(images: LabelledImages, look: bool) -> dict[str, Any]:
    """What tells a task from others: its classes and images, see `LabelledImages.fingerprint`."""
    return {
        "class_names": list(images.class_names),
        "images": len(images),
        "fingerprint": images.fingerprint(look),
    }


def write(folder: Path, images: LabelledImages, look: bool, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Add the file of an unfinished task to a folder."""
    record = json.dumps(record_of(images, look), ensure_ascii=False)
    measured = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_tensors(folder / TASK_FILE, measured, {FORMAT: record})


def read(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of a folder's unfinished task, on the CPU, and its record; a `ValueError` where there is none."""
    if not (folder / TASK_FILE).is_file():
        raise ValueError(f"{folder} is no checkpoint of a DualModeTrainer: it holds no {TASK_FILE}")
    tensors, metadata = read_tensors(folder / TASK_FILE)
    if FORMAT not in metadata:
        raise ValueError(f"{folder / TASK_FILE} has format {sorted(metadata)}, expected {FORMAT!r}")
    return tensors, json.loads(metadata[FORMAT])
