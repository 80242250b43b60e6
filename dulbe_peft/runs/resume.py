"""Whether a folder's run and the one that is asked for are the same: settings, beginning, and finished tasks.

Only what is finished has to be the same. The tasks that follow may be others than when the run began: classes were
added, or a damaged file was mended.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict
from torch import nn

from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.adapter.registration import PREFIX
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.classifiers import CLASSIFIERS, Classifier
from dulbe_peft.data.fingerprint import Listing, differences, fingerprint, listing
from dulbe_peft.strategies import STRATEGIES
from dulbe_peft.strategies.dulbe import Dulbe
from dulbe_peft.streams.tasks import Task
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils import folders
from dulbe_peft.utils.files import damage, read_json
from dulbe_peft.utils.folders import CheckpointError, library_versions

DATA_FILE = "data.json"
SPLITS = {"train": "training images", "test": "test images"}
ELSEWHERE = "choose another output folder"


# ---------------------------------------------------------------------- what a run is


def run_settings(state: LearnerState) -> dict[str, Any]:
    """The settings that must be the same for a run to be the same run."""
    return {
        "adapter": {} if state.config is None else _adapter_settings(state.config),
        "arguments": state.args.portable(),
        "base_model": _base_model_sha256(state.base),
        "classifiers": {name: _classifier_settings(classifier) for name, classifier in state.classifiers.items()},
        "strategy": {"name": state.strategy.name, **state.strategy.settings()},
    }


def beginning(state: LearnerState) -> dict[str, Any]:
    """What a run begins with: the tasks that its learner has learned, and a SHA-256 of adapter and classifiers."""
    if not state.tasks:
        return {"tasks": [], "sha256": None}
    digest = hashlib.sha256()
    tensors = {f"{name}.{key}": t for name, c in state.classifiers.items() for key, t in c.tensors().items()}
    if state.adapter is not None:
        tensors |= get_peft_model_state_dict(state.model, save_embedding_layers=False)
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return {"tasks": [list(task) for task in state.tasks], "sha256": digest.hexdigest()}


def task_fingerprints(task: Task, look: bool) -> list[str | None]:
    """What tells a task's training and test data from others; see `fingerprint`."""
    return [None if data is None else fingerprint(data, look=look) for data in (task.train, task.test)]


def task_listing(task: Task | None) -> dict[str, Any]:
    """What `data.json` of a task folder holds: the images of each split, by what tells them from others."""
    return {split: None if task is None else listing(getattr(task, split)) for split in SPLITS}


def _adapter_settings(config: DualModeLoraConfig) -> dict[str, Any]:
    settings = config.to_dict()
    for name in ("history_rank", "inference_mode", "peft_version"):
        settings.pop(name)
    return {k: str(v) if k.endswith("_type") else v for k, v in settings.items()}


def _classifier_settings(classifier: Classifier) -> dict[str, Any]:
    return {"embed_dim": classifier.embed_dim, "logit_scale": classifier.logit_scale, **classifier.settings()}


def _base_model_sha256(base: nn.Module) -> str:
    """Of the pristine weights' names, shapes and first values."""
    digest = hashlib.sha256()
    for name, tensor in base.state_dict().items():
        if PREFIX not in name and "modules_to_save" not in name:
            first = tensor.flatten()[:64].double().cpu().numpy()
            digest.update(f"{name} {tuple(tensor.shape)}".encode() + first.tobytes())
    return digest.hexdigest()


# ---------------------------------------------------------------------- what a folder says


def newest_of_run(
    output: Path, state: LearnerState, stream: Sequence[Task], look: bool, say: Callable[[str], None]
) -> tuple[Path, dict[str, Any]] | None:
    """The newest whole task folder, after a check that its run is the one that is asked for.

    Args:
        output: the run's folder.
        state: the learner as it is.
        stream: the run's own tasks, those after what the learner had learned before the run.
        look: whether fingerprints look at images.
        say: called with what a user should know.

    Returns:
        The folder, and its run's identity: the settings, `start`, and of the finished tasks `classes` and `data`.
        None where no task folder is whole.

    Raises:
        ValueError: the run in the folder is another one; the message says what differs.
    """
    found = folders.newest_task(output, say)
    if found is None:
        return None
    folder, manifest = found
    settings = run_settings(state)
    try:
        identity = _read_identity(manifest)
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        raise CheckpointError(damage(folder / folders.MANIFEST, error)) from error
    different = _differences(identity, plain(settings))
    if different:
        raise ValueError(f"{folder} belongs to another run: {', '.join(different)} differ; {ELSEWHERE}")
    known = identity["start"]["tasks"]
    _check_beginning(folder, manifest.notes["tasks"], identity["start"], state)
    finished = len(manifest.notes["tasks"]) - len(known)
    for name in ("classes", "data"):
        identity[name] = identity[name][:finished]  # earlier versions wrote those of the whole stream
    identity = settings | {name: identity[name] for name in ("classes", "data", "start")}
    _check_finished(folder, identity, stream, look)
    changed = _differences({"of": manifest.versions}, {"of": library_versions()})
    if changed:
        names = ", ".join(name.removeprefix("of.") for name in changed)
        say(f"{folder.name} was written with other versions of {names}: the last bits may differ")
    return folder, identity


def finished_tasks(output: Path) -> list[tuple[str, ...]]:
    """The class names of the tasks that a run has finished in a folder; none where it has not begun."""
    found = folders.newest_task(output, lambda _: None) if output.is_dir() else None
    return [] if found is None else [tuple(task) for task in found[1].notes["tasks"]]


def _check_beginning(folder: Path, tasks: list[list[str]], start: dict[str, Any], state: LearnerState) -> None:
    """Raise unless a run that began as `start` can be the one that this learner goes on with."""
    own, known = [list(task) for task in state.tasks], start["tasks"]
    if own != tasks[: len(own)]:
        raise ValueError(
            f"{folder} belongs to another run: it holds the tasks {tasks!r:.200}, this learner has learned "
            f"{own!r:.200}; {ELSEWHERE}"
        )
    if known and len(own) == len(known) and beginning(state)["sha256"] != start["sha256"]:
        raise ValueError(
            f"{folder} belongs to a run that began with another learner of the same classes; give the one that the "
            f"run began with, or {ELSEWHERE}"
        )


def _check_finished(folder: Path, identity: dict[str, Any], stream: Sequence[Task], look: bool) -> None:
    """Raise unless the stream begins with the finished tasks, by class names and by data."""
    before, first = identity["classes"], len(identity["start"]["tasks"])
    for index, names in enumerate(before[: len(stream)]):
        if names != list(stream[index].class_names):
            raise ValueError(
                f"{folder} belongs to another run: task {first + index + 1} has the classes {names!r:.200} there, and "
                f"{list(stream[index].class_names)!r:.200} in the stream now given. The stream must begin with the "
                f"finished tasks; {ELSEWHERE}"
            )
    if len(stream) < len(before):
        raise ValueError(
            f"{folder} belongs to a run of at least {len(before)} tasks, the stream has {len(stream)}: the stream "
            f"must begin with the finished tasks; give all of them, or {ELSEWHERE}"
        )
    for index, saved in enumerate(identity["data"]):
        current = task_fingerprints(stream[index], look)
        for split, was, now in zip(SPLITS, saved, current, strict=True):
            if was != now:
                number = first + index + 1
                task_folder = folder.with_name(f"task-{number:03d}")
                what = _what_changed(task_folder, split, getattr(stream[index], split))
                more = "; `dulbe-peft learn` takes in further images of known classes" if split == "train" else ""
                raise ValueError(
                    f"{folder} belongs to another run: the {SPLITS[split]} of task {number}, which is finished, "
                    f"differ{what}; put them back as they were, or {ELSEWHERE}{more}"
                )


def _what_changed(task_folder: Path, split: str, dataset: Any) -> str:
    """Which images differ from those that a task was learned from, as far as its folder tells."""
    try:
        folders.read_manifest(task_folder)
        saved = read_listing(task_folder)[split]
    except (CheckpointError, FileNotFoundError):
        return ""
    found = differences(saved, listing(dataset)) if saved is not None else ""
    return f": {found}" if found else " in labels, class names or pixels"


def read_listing(task_folder: Path) -> dict[str, Any]:
    """What `task_listing` gave when a task folder was written.

    Raises:
        FileNotFoundError: an earlier version wrote the folder, without a listing.
        CheckpointError: the file does not have the form that `task_listing` makes.
    """
    path = task_folder / DATA_FILE
    try:
        saved = read_json(path)
        return {split: _check_listing(saved[split]) for split in SPLITS}
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(damage(path, error)) from error


def _check_listing(value: Any) -> Listing:
    if value is not None and not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
        raise ValueError(f"a listing of images must be a list of texts or null, got {value!r:.100}")
    return value


# ---------------------------------------------------------------------- older folders


def _read_identity(manifest: folders.Manifest) -> dict[str, Any]:
    """The identity in a task folder's manifest, in today's form.

    Raises:
        ValueError: it is not as a run writes it. `TypeError`, `AttributeError` or `LookupError` likewise.
    """
    identity = _with_defaults(manifest.notes.get("identity", {}))
    lists = (manifest.notes["tasks"], identity["start"]["tasks"], identity["classes"])
    if not all(isinstance(n, list) for rows in lists for n in [rows, *rows]) or not isinstance(identity["data"], list):
        raise ValueError("tasks, start, classes and data must be lists")
    if not all(isinstance(entry, list) and len(entry) == len(SPLITS) for entry in identity["data"]):
        raise ValueError(f"data must have {len(SPLITS)} entries for each task, got {identity['data']!r:.100}")
    if "sha256" not in identity["start"]:
        raise ValueError("start must have a sha256")
    return identity


def _with_defaults(identity: dict[str, Any]) -> dict[str, Any]:
    """A saved identity in today's form: a setting that was not there yet has its default."""
    old = {"classes": [], "data": [], "start": {"tasks": [], "sha256": None}} | identity
    if "classifiers" not in old and "head" in old:  # version 0.1 had one method and one classifier
        old["classifiers"], old["strategy"] = {"bridge": old.pop("head")}, {"name": Dulbe.name}
    old["classifiers"] = {name: _completed(name, saved) for name, saved in old.get("classifiers", {}).items()}
    name = old.get("strategy", {}).get("name")
    if name in STRATEGIES:
        usual = {f.name: f.default for f in dataclasses.fields(STRATEGIES[name])}
        old["strategy"] = plain(usual) | old["strategy"]
    if old.get("adapter"):
        old["adapter"] = plain(_adapter_settings(DualModeLoraConfig())) | old["adapter"]
    old["arguments"] = plain(LearnerArguments().portable()) | old.get("arguments", {})
    return old


def _completed(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A classifier's saved settings with those that were not there yet at their defaults."""
    if name not in CLASSIFIERS:
        return settings
    known = {
        key: settings[key]
        for key in settings
        if key in ("embed_dim", "logit_scale", *CLASSIFIERS[name].setting_defaults())
    }
    return settings if len(known) < len(settings) else plain(_classifier_settings(CLASSIFIERS[name](**known)))


def _differences(saved: Any, current: Any, path: str = "") -> list[str]:
    """Where two nested dictionaries differ, as dotted paths; parts that only `saved` has are left out at the top."""
    if not (isinstance(saved, dict) and isinstance(current, dict)):
        return [] if saved == current else [path]
    keys = {*saved, *current} if path else current
    return [
        name
        for key in sorted(keys)
        for name in _differences(saved.get(key), current.get(key), f"{path}.{key}" if path else key)
    ]


def plain(value: Any) -> Any:
    """A value as JSON gives it back."""
    return json.loads(json.dumps(value))
