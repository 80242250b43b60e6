"""A learner as one folder: adapter, head, statistics, processor, settings; written whole, checked before reading."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

from dulbe_peft import checkpoint
from dulbe_peft.arguments import MACHINE_SETTINGS, LearnerArguments
from dulbe_peft.backbone import load_clip, load_processor
from dulbe_peft.checkpoint import CheckpointError
from dulbe_peft.head import BridgeEnsembleHead
from dulbe_peft.statistics import OccupationStatistics

STATISTICS_FILE = "statistics.safetensors"
LEARNER_FILE = "learner.json"
PROCESSOR_FOLDER = "processor"


def save(learner: Any, folder: Path) -> None:
    """See `ClassIncrementalLearner.save_pretrained`."""
    checkpoint.commit_folder(folder, learner.write, {"tasks": [list(task) for task in learner.tasks]})


def write(learner: Any, folder: Path) -> None:
    """Write the learner's files into an existing folder, without a manifest."""
    learner.model.save_pretrained(str(folder), save_embedding_layers=False)
    learner.head.save_pretrained(folder)
    learner.statistics.save(folder / STATISTICS_FILE)
    learner.processor.save_pretrained(str(folder / PROCESSOR_FOLDER))
    state = {
        "arguments": asdict(learner.args),
        "attn_implementation": learner.clip.config._attn_implementation,
        "step": learner._step,
        "tasks": [list(task) for task in learner.tasks],
    }
    checkpoint.write_json(folder / LEARNER_FILE, state)


def push(learner: Any, repo_id: str, private: bool | None, token: str | None) -> Any:
    """See `ClassIncrementalLearner.push_to_hub`."""
    api = HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "learner"
        save(learner, folder)
        return api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload learner")


def restore(learner: Any, folder: Path) -> None:
    """See `ClassIncrementalLearner.restore`."""
    checkpoint.read_manifest(folder)
    saved = load_file(folder / "adapter_model.safetensors")
    _check_fits(saved, get_peft_model_state_dict(learner.model, save_embedding_layers=False), folder)
    restore_around(learner, folder)
    set_adapter_state(learner.model, saved)


def restore_around(learner: Any, folder: Path) -> None:
    """Head, statistics, tasks and step count of a folder that was checked, into a learner whose adapter fits it."""
    state = _read_state(folder / LEARNER_FILE)
    head = BridgeEnsembleHead.from_pretrained(folder).to(learner.accelerator.device)
    learner.statistics = OccupationStatistics.load(folder / STATISTICS_FILE)
    learner.head = head
    learner.tasks = [tuple(task) for task in state["tasks"]]
    learner._step = state["step"]


def load_model(folder: Path, base_model: nn.Module | None) -> tuple[PeftModel, Any, dict[str, Any]]:
    """Adapted model, processor and saved state of a folder, which is checked against its manifest first."""
    if not folder.is_dir():
        raise FileNotFoundError(f"learner folder {str(folder)!r} does not exist")
    checkpoint.read_manifest(folder)
    state = _read_state(folder / LEARNER_FILE)
    if base_model is None:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        name, revision = config["base_model_name_or_path"], config.get("revision")
        base_model, _ = load_clip(name, revision, attn_implementation=state["attn_implementation"])
    model = PeftModel.from_pretrained(base_model, str(folder), is_trainable=True)
    return model, load_processor(str(folder / PROCESSOR_FOLDER), base_model), state


def set_adapter_state(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Put saved tensors into the active adapter, whose history takes their length."""
    set_peft_model_state_dict(model, state)
    model.active_peft_config.history_rank = model.history_rank


def portable(saved: dict[str, Any]) -> LearnerArguments:
    """Saved settings without those of the machine."""
    return LearnerArguments(**{name: value for name, value in saved.items() if name not in MACHINE_SETTINGS})


def _check_fits(saved: dict[str, torch.Tensor], own: dict[str, torch.Tensor], folder: Path) -> None:
    """The adapter in a folder must be this learner's but for the length of its history."""
    strange = sorted(saved.keys() ^ own.keys())
    for name in sorted(saved.keys() & own.keys()):
        compared = slice(1) if "dulbe_history_" in name else slice(None)
        if saved[name].ndim != own[name].ndim or saved[name].shape[compared] != own[name].shape[compared]:
            strange.append(name)
    if strange:
        raise CheckpointError(
            f"the adapter in {folder} does not fit this learner's: {len(strange)} tensors differ in name or shape, "
            f"the first is {strange[0]!r}"
        )


def _read_state(path: Path) -> dict[str, Any]:
    state = json.loads(path.read_text(encoding="utf-8"))
    missing = {"arguments", "attn_implementation", "step", "tasks"} - set(state)
    if missing:
        raise CheckpointError(f"{path} misses {sorted(missing)}")
    return state
