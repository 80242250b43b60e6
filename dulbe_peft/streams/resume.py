"""Whether a folder's run and the one that is asked for are the same: settings, beginning, and finished tasks.

Only what is finished has to be the same. The tasks that follow may be others than when the run began: classes were
added, or a damaged file was mended.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dulbe_peft.arguments import AdapterSettings
from dulbe_peft.checkpoints import layout, learner_file, loading
from dulbe_peft.checkpoints.base_models import digest
from dulbe_peft.checkpoints.layout import RESULTS_FILE, TIMINGS_FILE
from dulbe_peft.checkpoints.learner_file import LearnerFile
from dulbe_peft.data.known import KnownImages, compared
from dulbe_peft.data.names import check_class_names
from dulbe_peft.metrics.evaluation import PREDICTIONS_FILE
from dulbe_peft.streams.learning import StreamLearner
from dulbe_peft.streams.progress import SOURCES_FILE, FinishedTask, read_finished
from dulbe_peft.streams.tasks import Task
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils import folders
from dulbe_peft.utils.devices import has_bfloat16
from dulbe_peft.utils.folders import CheckpointError, library_versions
from dulbe_peft.utils.records import Record, first_problem
from dulbe_peft.utils.settings import flat_settings
from dulbe_peft.utils.tensors import whole_digest
from dulbe_peft.utils.terminal import counted, print_once

# What a run writes beside the task folders, and what its caller may draw from it.
FILES = (RESULTS_FILE, TIMINGS_FILE, SOURCES_FILE, PREDICTIONS_FILE, "accuracy.png", "tasks.png", "pictures")
# Of an adapter's file: no settings.
_GROWN = ("base_digests", "history_pattern", "history_rank", "inference_mode", "peft_version", "tower")
ELSEWHERE = "choose another output folder"
Texts = Mapping[str, Sequence[str]]
_SHOWN = 3  # images that a message names


class Beginning(Record):
    """What a run begins with: the tasks that its learner has learned, and a SHA-256 of adapter and classifiers."""

    tasks: list[list[str]]
    sha256: str | None


class Identity(Record):
    """What must be the same for a run to be the same one, beside its finished tasks."""

    adapter: dict[str, Any]
    arguments: dict[str, Any]
    base_model: str
    classifiers: dict[str, dict[str, Any]]
    strategy: dict[str, Any]
    start: Beginning


def identity_of(state: LearnerState) -> Identity:
    """The identity of a run that begins with a learner."""
    adapter = {} if state.config is None else state.config.to_dict()
    rules = state.classifiers.items()
    settings = {
        "adapter": {k: str(v) if k.endswith("_type") else v for k, v in adapter.items() if k not in _GROWN},
        "arguments": state.args.portable(),
        "base_model": digest(state.base),
        "classifiers": {n: {"embed_dim": c.embed_dim, "logit_scale": c.logit_scale, **c.settings()} for n, c in rules},
        "strategy": {"name": state.strategy.name, **state.strategy.settings()},
    }
    return Identity(**json.loads(json.dumps(settings)), start=beginning(state))


def beginning(state: LearnerState) -> Beginning:
    """What a run with this learner begins with."""
    if not state.tasks:
        return Beginning(tasks=[], sha256=None)
    tensors = {f"{name}.{key}": t for name, c in state.classifiers.items() for key, t in c.tensors().items()}
    sha256 = whole_digest(tensors | state.adapter_tensors())
    return Beginning(tasks=[list(task) for task in state.tasks], sha256=sha256)


def go_on(
    learner: StreamLearner, folder: Path, identity: Identity, before: Sequence[FinishedTask]
) -> list[FinishedTask]:
    """Give a learner the state in a run's newest folder, unless it took something in since; the finished tasks."""
    if learner.args.precision != identity.arguments["precision"]:
        learner.change_settings(replace(learner.args, precision=identity.arguments["precision"]))
    own = beginning(learner.state)
    with learner.transaction():
        restored = loading.restore(learner.state, folder)
        if learner.tasks == restored.tasks and own != beginning(restored):
            raise ValueError(
                f"this learner is not the one in {folder}, though both have learned the same tasks: it has taken in "
                "something else, by update_classes for instance. Load the folder to go on with what is in it, or "
                "choose another output_dir"
            )
        learner.use_state(restored)
    print_once(f"resuming after {folder.name}: {counted(len(learner.class_names), 'class')} learned")
    finished = read_finished(folder, learner.tasks)
    # What is written after a commit may be missing; of known tasks the learner may know it.
    for old, new in zip(before, finished, strict=False):
        new.timing, new.source = new.timing or old.timing, new.source or old.source
    return finished


def check_new(learner: StreamLearner, own: Sequence[Task], output: Path, resumes: bool) -> None:
    """Raise unless a run can start in a folder, and its tasks have new classes only."""
    old = layout.task_folders(output)
    if old:
        why = "none of them is valid" if resumes else "resume is off"
        raise ValueError(f"{str(output)!r} already holds {old[-1].name} and {why}: take another folder or remove them")
    taken = [name for name in FILES if (output / name).exists()]
    if taken:
        raise FileExistsError(f"{output / taken[0]} is there, and no task of a run: choose another folder or move it")
    seen = list(learner.class_names)
    for task in own:
        seen += check_class_names(task.class_names, seen)


def newest_of_run(
    learner: StreamLearner, stream: Sequence[Task], output: Path, texts: Texts
) -> tuple[Path, Identity] | None:
    """The newest whole task folder and its run's identity, if any; raises where the run is another one."""
    found = layout.newest_task(output, print_once)
    if found is None:
        return None
    folder, manifest = found
    try:
        saved = Identity.model_validate(manifest.notes.get("identity"))
    except ValidationError as error:
        raise CheckpointError(f"{folder / folders.MANIFEST} is damaged or foreign: {first_problem(error)}") from error
    with folders.load_errors(folder):
        learned = learner_file.read(folder)
        known = loading.read_known(folder, [n for task in learned.tasks for n in task], manifest.files)
    current, began = identity_of(learner.state), saved.arguments.get("precision")
    if learner.precision_chosen and (began == "float32" or (began == "bfloat16" and has_bfloat16(learner.device))):
        current.arguments["precision"] = began
    first = len(saved.start.tasks)
    finished = dict(enumerate(stream[: len(learned.tasks) - first], first + 1))
    differences = _differences(saved, current, learned, finished, texts)
    images = _other_images(finished, known, learner.args.teacher == "cached")
    reason = next(chain(differences, images), None)
    if reason is not None:
        raise ValueError(f"{folder} belongs to {reason}")
    others = sorted(name for name, now in library_versions().items() if manifest.versions.get(name) != now)
    if others:
        print_once(f"{folder.name} was written with other versions of {', '.join(others)}: the last bits may differ")
    return folder, saved


def _differences(
    saved: Identity, current: Identity, learned: LearnerFile, finished: Mapping[int, Task], texts: Texts
) -> Iterator[str]:
    """Why a saved run is another one than is asked for, by settings, beginning, names and texts of finished tasks."""
    changed = _changes(saved, current)
    if changed:
        yield f"another run: {changed}; {ELSEWHERE}"
    first, own = len(saved.start.tasks), current.start.tasks
    if own != learned.tasks[: len(own)]:
        yield (
            f"another run: it holds the tasks {learned.tasks!r:.200}, this learner has learned {own!r:.200}; "
            f"{ELSEWHERE}"
        )
    if own and len(own) == first and current.start != saved.start:
        yield (
            "a run that began with another learner of the same classes; give the one that the run began with, or "
            f"{ELSEWHERE}"
        )
    for number, before in enumerate(learned.tasks[first:], first + 1):
        now = list(finished[number].class_names) if number in finished else None
        if before != now:
            yield (
                f"another run: task {number} has the classes {before!r:.200} there, and {now!r:.200} in the stream "
                f"now given. The stream must begin with the finished tasks; {ELSEWHERE}"
            )
        for name in before:
            then = learned.class_texts.get(name)
            if (then or []) != list(texts.get(name, [])):
                yield (
                    f"another run: the texts of the class {name!r}, which is learned, were {then}; give the same "
                    f"class texts, or {ELSEWHERE}"
                )


def _changes(saved: Identity, current: Identity) -> str:
    """What differs between two runs, in words; what may follow from it is not said. Empty where nothing differs."""
    for group in ("base_model", "strategy", "classifiers", "arguments", "adapter"):
        of = [getattr(identity, group) for identity in (saved, current)]
        if group == "adapter" and of[0]:  # a setting that came later had its default
            of[0] = {entry.name: entry.default for entry in fields(AdapterSettings) if entry.name in of[1]} | of[0]
        if group == "classifiers" and set(of[0]) != set(of[1]):
            of = [", ".join(sorted(names)) for names in of]
        old, new = (flat_settings({group: settings}) for settings in of)
        lines = [
            f"{re.sub('^(arguments|adapter).', '', name)} was {old.get(name)!r:.60} and is now {new.get(name)!r:.60}"
            for name in sorted({*old, *new})
            if old.get(name) != new.get(name)
        ]
        if lines:
            return ", ".join(lines)
    return ""


def _other_images(finished: Mapping[int, Task], known: KnownImages, look: bool) -> Iterator[str]:
    """The same by the finished tasks' images, class and content; without `look`, what is no file by class alone."""
    for number, task in finished.items():
        for kind, noted_of, images in (("training", known.learned, task.train), ("test", known.tested, task.test)):
            _, fresh, gone = compared(images, noted_of, task.class_names, look=look or images is None or images.stored)
            if fresh or gone:
                named = ", ".join(images.item_name(row) for row in fresh[:_SHOWN]) + ", ..." * (len(fresh) > _SHOWN)
                more = "; `dulbe-peft learn` takes in further images of known classes" if kind == "training" else ""
                yield (
                    f"another run: of the {kind} images of task {number}, which is finished, {gone} are gone or "
                    f"changed, and {len(fresh)} are new{f' ({named})' if fresh else ''}; put them back as they were, "
                    f"or {ELSEWHERE}{more}"
                )
