"""Checkpoints during a task: besides the learner, they record the task and what was measured before it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dulbe_peft.checkpoints.layout import TASK_FILE
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.utils.tensors import read_tensors, write_tensors

FORMAT = "dulbe-task-1"


def record_of(images: LabelledImages, look: bool) -> dict[str, Any]:
    """Return what identifies a task: its classes and the fingerprint of its images, see `LabelledImages`."""
    return {
        "class_names": list(images.class_names),
        "images": len(images),
        "fingerprint": images.fingerprint(look),
    }


def write(folder: Path, images: LabelledImages, look: bool, tensors: Mapping[str, torch.Tensor | None]) -> None:
    """Write the file of an unfinished task into a folder."""
    record = json.dumps(record_of(images, look), ensure_ascii=False)
    measured = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_tensors(folder / TASK_FILE, measured, {FORMAT: record})


def read(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a folder's unfinished task, on the CPU, and its record; a `ValueError` if it has none."""
    if not (folder / TASK_FILE).is_file():
        raise ValueError(f"{folder} is not a checkpoint of a DualModeTrainer: it has no {TASK_FILE}")
    tensors, metadata = read_tensors(folder / TASK_FILE)
    if FORMAT not in metadata:
        raise ValueError(f"{folder / TASK_FILE} has format {sorted(metadata)}, expected {FORMAT!r}")
    return tensors, json.loads(metadata[FORMAT])
