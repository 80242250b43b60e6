"""Checkpoints during a task: besides the learner, they record the task and what was measured before it."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME

from dulbe_peft.checkpoints.layout import TASK_FILE
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.utils.files import read_json
from dulbe_peft.utils.folders import CheckpointError, read_manifest
from dulbe_peft.utils.tensors import read_tensors, write_tensors

FORMAT = "dulbe-task-1"
RNG_FILES = "rng_state*.pth"  # written by transformers, one per process


def begin(folder: Path) -> None:
    """Mark a checkpoint that is about to be overwritten as incomplete, by removing the file that is written last."""
    (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)


def check_whole(folder: Path) -> None:
    """Raise a `CheckpointError` unless a checkpoint is complete and none of its files is damaged."""
    read_manifest(folder)
    random = [path.name for path in sorted(folder.glob(RNG_FILES))] or [RNG_FILES]
    for name in (OPTIMIZER_NAME, SCHEDULER_NAME, *random, TRAINER_STATE_NAME):
        if not (folder / name).is_file():
            why = "it is incomplete or was saved with save_only_model, so training cannot resume from it"
            raise CheckpointError(f"{folder} has no {name}: {why}")
        try:
            if name == TRAINER_STATE_NAME:
                read_json(folder / name)
            else:  # torch writes zip archives with a checksum for each part
                with zipfile.ZipFile(folder / name) as archive:
                    if damaged := archive.testzip():
                        raise ValueError(f"the checksum of {damaged} differs")
        except (ValueError, zipfile.BadZipFile) as error:
            raise CheckpointError(f"{folder / name} is damaged: {error}") from error


def record_of(images: LabelledImages, look: bool) -> dict[str, object]:
    """Return what identifies a task: its classes and the fingerprint of its images, see `LabelledImages`."""
    return {"class_names": list(images.class_names), "images": len(images), "fingerprint": images.fingerprint(look)}


def write(folder: Path, images: LabelledImages, look: bool, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Write the file of an unfinished task into a folder."""
    record = json.dumps(record_of(images, look), ensure_ascii=False)
    measured = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_tensors(folder / TASK_FILE, measured, {FORMAT: record})


def read(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Return the tensors of a folder's unfinished task, on the CPU, and its record; a `ValueError` if it has none."""
    if not (folder / TASK_FILE).is_file():
        raise ValueError(f"{folder} is not a checkpoint of a DualModeTrainer: it has no {TASK_FILE}")
    tensors, metadata = read_tensors(folder / TASK_FILE)
    if FORMAT not in metadata:
        raise ValueError(f"{folder / TASK_FILE} has format {sorted(metadata)}, expected {FORMAT!r}")
    return tensors, json.loads(metadata[FORMAT])
