"""Check that a folder's run is the requested one, and continue it.

Settings, start and finished tasks must be the same. Later tasks may differ from those at the start of the run, for
example because classes were added or a damaged file was repaired.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dulbe_peft.arguments import AdapterSettings, LearnerArguments
from dulbe_peft.checkpoints import layout, learner_file, restoring
from dulbe_peft.checkpoints.base_models import digest
from dulbe_peft.checkpoints.layout import RESULTS_FILE, TIMINGS_FILE
from dulbe_peft.checkpoints.learner_file import LearnerFile
from dulbe_peft.data.known import KnownImages, compared
from dulbe_peft.data.names import check_class_names
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.metrics.evaluation import PREDICTIONS_FILE
from dulbe_peft.streams.progress import SOURCES_FILE, FinishedTask, read_finished
from dulbe_peft.streams.tasks import Task
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils import folders
from dulbe_peft.utils.folders import CheckpointError, library_versions
from dulbe_peft.utils.processes import has_bfloat16
from dulbe_peft.utils.records import Record, first_problem
from dulbe_peft.utils.settings import flat_settings
from dulbe_peft.utils.tensors import tensors_digest
from dulbe_peft.utils.terminal import counted, print_once

# Files that a run, or a report on it, writes beside the task folders.
FILES = (RESULTS_FILE, TIMINGS_FILE, SOURCES_FILE, PREDICTIONS_FILE, "accuracy.png", "tasks.png", "pictures")
# Entries of an adapter's configuration that are not settings.
_NO_SETTINGS = ("history_pattern", "history_rank", "inference_mode", "made_on", "peft_version")
ELSEWHERE = "choose another output folder"
Texts = Mapping[str, Sequence[str]]
_SHOWN = 3  # number of images that a message names


class Beginning(Record):
    """The start of a run: the tasks that its learner had learned, and a SHA-256 of adapter and classifiers."""

    tasks: list[list[str]]
    sha256: str | None


class Identity(Record):
    """What, besides its finished tasks, must be equal for two runs to count as the same."""

    adapter: dict[str, object]
    arguments: dict[str, Any]
    base_model: str
    classifiers: dict[str, dict[str, object]]
    strategy: dict[str, object]
    start: Beginning


def identity_of(state: LearnerState) -> Identity:
    """Return the identity of a run that starts with a learner in this state."""
    adapter = {} if state.config is None else state.config.to_dict()
    rules = state.classifiers.items()
    settings = {
        "adapter": {k: str(v) if k.endswith("_type") else v for k, v in adapter.items() if k not in _NO_SETTINGS},
        "arguments": state.args.portable(),
        "base_model": digest(state.base),
        "classifiers": {n: {"embed_dim": c.embed_dim, "logit_scale": c.logit_scale, **c.settings()} for n, c in rules},
        "strategy": {"name": state.strategy.name, **state.strategy.settings()},
    }
    return Identity(**json.loads(json.dumps(settings)), start=beginning(state))


def beginning(state: LearnerState) -> Beginning:
    """Return the start of a run with a learner in this state."""
    if not state.tasks:
        return Beginning(tasks=[], sha256=None)
    tensors = {f"{name}.{key}": t for name, c in state.classifiers.items() for key, t in c.tensors().items()}
    sha256 = tensors_digest(tensors | state.adapter_tensors())
    return Beginning(tasks=[list(task) for task in state.tasks], sha256=sha256)


def continue_run(
    learner: ClassIncrementalLearner, folder: Path, identity: Identity, before: Sequence[FinishedTask]
) -> list[FinishedTask]:
    """Restore a run's newest folder into a learner and return the finished tasks.

    Raises a `ValueError` if the learner has the same tasks but has learned something else since.
    """
    if learner.args.precision != identity.arguments["precision"]:
        learner.change_settings(replace(learner.args, precision=identity.arguments["precision"]))
    current = beginning(learner.state)
    with learner.transaction():
        restored = restoring.restore(learner.state, folder)
        if learner.tasks == restored.tasks and current != beginning(restored):
            raise ValueError(
                f"this learner differs from the one in {folder}, though both have learned the same tasks: one has "
                "learned something else, for example by update_classes. Load the folder to continue with its learner, "
                "or choose another output_dir"
            )
        learner.use_state(restored)
    print_once(f"resuming after {folder.name}: {counted(len(learner.class_names), 'class')} learned")
    finished = read_finished(folder, learner.tasks)
    # Files written after a commit may be missing; for tasks before the run, the learner may have their content.
    for old, new in zip(before, finished, strict=False):
        new.timing, new.source = new.timing or old.timing, new.source or old.source
    return finished


def check_new(learner: ClassIncrementalLearner, stream: Sequence[Task], output: Path, resumes: bool) -> None:
    """Raise unless a run can start in a folder and all classes of its tasks are new."""
    old = layout.task_folders(output)
    if old:
        why = "none of its task folders is valid" if resumes else "resume is off"
        raise ValueError(f"{str(output)!r} already has {old[-1].name} and {why}: choose another folder or remove them")
    taken = [name for name in FILES if (output / name).exists()]
    if taken:
        raise FileExistsError(
            f"{output / taken[0]} exists, but the folder has no task of a run: choose another folder or move the file"
        )
    seen = list(learner.class_names)
    for task in stream:
        seen += check_class_names(task.class_names, seen)


def newest_of_run(
    learner: ClassIncrementalLearner, stream: Sequence[Task], output: Path, texts: Texts
) -> tuple[Path, Identity] | None:
    """Return the newest valid task folder and its run's identity, if any; raises if it belongs to another run."""
    newest = layout.newest_task(output, print_once)
    if newest is None:
        return None
    folder, manifest = newest
    try:
        saved = Identity.model_validate(manifest.notes.get("identity"))
    except ValidationError as error:
        raise CheckpointError(f"{folder / folders.MANIFEST} is damaged or foreign: {first_problem(error)}") from error
    with folders.load_errors(folder):
        learned = learner_file.read(folder)
        known = restoring.read_known(folder, [n for task in learned.tasks for n in task], manifest.files)
    current, began = identity_of(learner.state), saved.arguments.get("precision")
    if learner.precision_chosen and (began == "float32" or (began == "bfloat16" and has_bfloat16(learner.device))):
        current.arguments["precision"] = began
    first = len(saved.start.tasks)
    finished = dict(enumerate(stream[: len(learned.tasks) - first], first + 1))
    differences = _differences(saved, current, learned, finished, texts)
    images = _other_images(finished, known, learner.args.teacher == "cached")
    reason = next(chain(differences, images, _other_groups(finished, known)), None)
    if reason is not None:
        raise ValueError(f"{folder} belongs to {reason}")
    others = sorted(name for name, now in library_versions().items() if manifest.versions.get(name) != now)
    if others:
        print_once(f"{folder.name} was written with other versions of {', '.join(others)}: the last bits may differ")
    return folder, saved


def _differences(
    saved: Identity, current: Identity, learned: LearnerFile, finished: Mapping[int, Task], texts: Texts
) -> Iterator[str]:
    """Yield how a saved run differs from this one in settings, start, or names and texts of its finished tasks."""
    changed = _changes(saved, current)
    if changed:
        yield f"another run: {changed}; {ELSEWHERE}"
    first, known = len(saved.start.tasks), current.start.tasks
    if known != learned.tasks[: len(known)]:
        yield (
            f"another run: its tasks are {learned.tasks!r:.200}, but this learner has learned {known!r:.200}; "
            f"{ELSEWHERE}"
        )
    if known and len(known) == first and current.start != saved.start:
        yield (
            "a run that began with another learner of the same classes; pass the learner that the run began with, or "
            f"{ELSEWHERE}"
        )
    for number, before in enumerate(learned.tasks[first:], first + 1):
        now = list(finished[number].class_names) if number in finished else None
        if before != now:
            yield (
                f"another run: task {number} has the classes {before!r:.200} there, and {now!r:.200} in the given "
                f"stream. The stream must begin with the finished tasks; {ELSEWHERE}"
            )
        for name in before:
            then = learned.class_texts.get(name)
            if (then or []) != list(texts.get(name, [])):
                yield (
                    f"another run: the texts of the learned class {name!r} were {then}; pass the same class texts, or "
                    f"{ELSEWHERE}"
                )


def _changes(saved: Identity, current: Identity) -> str:
    """Describe how the settings of two runs differ; empty if they are equal.

    Only the first group that differs is described, because later groups may differ as a consequence.
    """
    for group in ("base_model", "strategy", "classifiers", "arguments", "adapter"):
        both = [getattr(identity, group) for identity in (saved, current)]
        kinds: dict[str, type] = {"adapter": AdapterSettings, "arguments": LearnerArguments}
        if group in kinds and both[0]:  # a setting that did not exist yet had its default value
            defaults = {entry.name: entry.default for entry in fields(kinds[group]) if entry.name in both[1]}
            both[0] = defaults | both[0]
        if group == "classifiers" and set(both[0]) != set(both[1]):
            both = [", ".join(sorted(names)) for names in both]
        old, new = (flat_settings({group: settings}) for settings in both)
        lines = [
            f"{re.sub('^(arguments|adapter).', '', name)} was {old.get(name)!r:.60} and is now {new.get(name)!r:.60}"
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
        ]
        if lines:
            return ", ".join(lines)
    return ""


def _other_groups(finished: Mapping[int, Task], known: KnownImages) -> Iterator[str]:
    """Yield a sentence if the training images of the finished tasks form other groups than those that were recorded.

    Without groups, each image is a group of its own. The names of groups do not matter.
    """
    parts = [task.train for task in finished.values()]
    if not known.groups and all(part.groups is None for part in parts):
        return
    then, now = list[object](), list[object]()
    for part in parts:
        groups = [None] * len(part) if part.groups is None else part.groups.tolist()
        for content, group in zip(part.contents(), groups, strict=True):
            then.append(known.groups.get(content or b"", content))
            now.append(content if group is None else group)
    if not len({*zip(then, now, strict=True)}) == len({*then}) == len({*now}):
        yield (
            f"another run: the training images of the finished tasks form {counted(len({*now}), 'group')} now, and "
            f"{len({*then})} then; give the same --group and --group-seconds, or {ELSEWHERE}"
        )


def _other_images(finished: Mapping[int, Task], known: KnownImages, look: bool) -> Iterator[str]:
    """Yield the differences between recorded images and those of the finished tasks, by class and content.

    Without `look`, contents are compared only if the images are files.
    """
    for number, task in finished.items():
        for kind, recorded, images in (("training", known.learned, task.train), ("test", known.tested, task.test)):
            _, fresh, gone = compared(images, recorded, task.class_names, look=look or images is None or images.stored)
            if fresh or gone:
                named = ", ".join(images.item_name(row) for row in fresh[:_SHOWN]) + ", ..." * (len(fresh) > _SHOWN)
                more = (
                    "; to learn further images of known classes, use `dulbe-peft learn`" if kind == "training" else ""
                )
                yield (
                    f"another run: of the {kind} images of the finished task {number}, {gone} are missing or changed, "
                    f"and {len(fresh)} are new{f' ({named})' if fresh else ''}; restore the images, or "
                    f"{ELSEWHERE}{more}"
                )
