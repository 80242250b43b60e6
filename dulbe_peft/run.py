"""A whole class-incremental stream: learn, test, commit a folder per task, resume, write `results.json`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import nn
from tqdm.auto import tqdm

from dulbe_peft import checkpoint, saving
from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.adapter.registration import PREFIX
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.backbone import has_text
from dulbe_peft.checkpoint import RESULTS_FILE, TIMINGS_FILE, CheckpointError, library_versions
from dulbe_peft.classifiers import CLASSIFIERS, Classifier
from dulbe_peft.distributed import on_main_process, world
from dulbe_peft.evaluation import PREDICTIONS_FILE, Evaluation, write_predictions
from dulbe_peft.files import write_json
from dulbe_peft.profiling import Profile, forget_peak_memory, peak_memory
from dulbe_peft.results import PROGRESS_FILE, add_task, new_progress, progress_row, read_progress, stream_results
from dulbe_peft.state import LearnerState
from dulbe_peft.strategies import STRATEGIES
from dulbe_peft.strategies.dulbe import Dulbe
from dulbe_peft.streams.fingerprint import fingerprint
from dulbe_peft.streams.tasks import Task
from dulbe_peft.training import TaskRecord
from dulbe_peft.views import VIEWS, write_views

LOCK_FILE = ".dulbe_peft.lock"
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S%z"


class StreamLearner(Protocol):
    """What a stream needs of a learner."""

    state: LearnerState

    @property
    def profile(self) -> Profile: ...
    @property
    def record(self) -> TaskRecord | None: ...
    def learn_task(self, dataset: Any, class_names: Sequence[str] | None = None) -> None: ...
    def evaluate_images(self, dataset: Any, class_names: Sequence[str] | None = None) -> Evaluation: ...
    def zero_shot(self, tests: Sequence[tuple[Any, Sequence[str]]]) -> list[float]: ...


def run_stream(
    learner: StreamLearner, tasks: Iterable[Task], output_dir: str | Path, resume: bool = True
) -> dict[str, Any]:
    """Learn `tasks` one after the other; see `ClassIncrementalLearner.run`."""
    stream, output = list(tasks), Path(output_dir)
    if not stream:
        raise ValueError("tasks is empty: a stream needs at least one task")
    for index, task in enumerate(stream):
        if not isinstance(task, Task):
            raise TypeError(f"tasks[{index}] must be a Task(train, test, class_names), got a {type(task).__name__}")
    if output.exists() and not output.is_dir():
        raise ValueError(f"output_dir {str(output)!r} is a file, expected a folder")
    untested = [index + 1 for index, task in enumerate(stream) if task.test is None]
    if 0 < len(untested) < len(stream):
        raise ValueError(f"task {untested[0]} has no test data, others have: give it to all tasks or to none")
    with ExitStack() as held:
        held.enter_context(_dead_readers_named(output))
        on_main_process(partial(_lock_folder, output, held))
        return _run(learner, stream, output, resume)


def _lock_folder(output: Path, held: ExitStack) -> None:
    """Keep other runs out of the folder, and remove what killed ones left in it."""
    held.enter_context(checkpoint.exclusive(output / LOCK_FILE, f"output_dir {str(output)!r}"))
    files = (RESULTS_FILE, TIMINGS_FILE, *VIEWS)
    checkpoint.clear_leftovers(output, "|".join([checkpoint.TASK_FOLDER, *(re.escape(name) for name in files)]))


@contextmanager
def _dead_readers_named(output: Path) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker (pid" not in str(error):
            raise
        raise ChildProcessError(
            f"a process that reads images died ({error}); finished tasks are kept in {output}, run again to go on"
        ) from error


def _run(learner: StreamLearner, stream: list[Task], output: Path, resume: bool) -> dict[str, Any]:
    identity = _identity(learner.state, stream)
    progress = _resume(learner, output, identity) if resume else None
    if progress is None:
        if learner.state.tasks:
            count = len(learner.state.tasks)
            raise ValueError(f"the learner has already learned {count} tasks: a stream starts with none")
        _refuse_old_folders(output, resume)
        progress = new_progress(_zero_shot(learner, stream))
        if progress["zero_shot"]:
            _print_once(f"zero-shot over all classes, before any training: {100 * progress['zero_shot'][-1]:.1f} %")
    timings = _read_timings(output, len(learner.state.tasks))
    for index in range(len(learner.state.tasks), len(stream)):
        started = time.perf_counter()
        forget_peak_memory(learner.state.device)
        learner.learn_task(stream[index].train, stream[index].class_names)
        with learner.profile.phase("test"):
            tests = _test(learner, stream[: index + 1])
            add_task(progress, progress_row(list(tests.values())), learner.record)
        with learner.profile.phase("save"):
            _commit(learner.state, _task_folder(output, index), progress, identity, tests)
        seconds = time.perf_counter() - started
        done = {
            "seconds": seconds,
            "phases": dict(learner.profile.seconds),
            "peak_memory": peak_memory(learner.state.device),
            "finished": time.strftime(_TIME_FORMAT),
        }
        timings.append(done)
        on_main_process(partial(write_json, output / TIMINGS_FILE, {"tasks": timings}))
        _print_once(_line(progress, index, len(stream), len(learner.state.class_names)) + f", {seconds:.1f} s")
        if learner.state.args.profile:
            _print_once(learner.profile.table())
    results = stream_results(progress, identity, list(learner.state.classifiers), library_versions())
    on_main_process(partial(write_json, output / RESULTS_FILE, results))
    newest = _task_folder(output, len(stream) - 1)
    on_main_process(partial(write_views, output, newest, [task.test for task in stream], results))
    return results


def _task_folder(output: Path, index: int) -> Path:
    return output / f"task-{index + 1:03d}"


def _read_timings(output: Path, finished: int) -> list[Any]:
    """Those of the finished tasks; unknown where the file is not there, or no longer whole."""
    try:
        tasks = list(json.loads((output / TIMINGS_FILE).read_text(encoding="utf-8"))["tasks"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        tasks = []
    return [*tasks[:finished], *[None] * (finished - len(tasks))]


def _identity(state: LearnerState, stream: list[Task]) -> dict[str, Any]:
    """What must be the same for a run to be the same run."""
    look = state.args.teacher == "cached"  # an online teacher is there for images that are augmented anew each time
    return {
        "adapter": {} if state.config is None else _adapter_settings(state.config),
        "arguments": state.args.portable(),
        "base_model": _base_model_sha256(state.base),
        "classes": [list(task.class_names) for task in stream],
        "classifiers": {name: _classifier_settings(classifier) for name, classifier in state.classifiers.items()},
        "data": [
            [None if data is None else fingerprint(data, look=look) for data in (task.train, task.test)]
            for task in stream
        ],
        "strategy": {"name": state.strategy.name, **state.strategy.settings()},
    }


def _adapter_settings(config: DualModeLoraConfig) -> dict[str, Any]:
    settings = config.to_dict()
    for name in ("history_rank", "inference_mode", "peft_version"):
        settings.pop(name)
    return {k: str(v) if k.endswith("_type") else v for k, v in settings.items()}


def _classifier_settings(classifier: Classifier) -> dict[str, Any]:
    return {"embed_dim": classifier.embed_dim, "logit_scale": classifier.logit_scale, **classifier.settings()}


def _with_defaults(identity: dict[str, Any]) -> dict[str, Any]:
    """A saved identity in today's form: a setting that was not there yet has its default."""
    old = dict(identity)
    if "classifiers" not in old and "head" in old:  # version 0.1 had one method and one classifier
        old["classifiers"], old["strategy"] = {"bridge": old.pop("head")}, {"name": Dulbe.name}
    old["classifiers"] = {name: _completed(name, saved) for name, saved in old.get("classifiers", {}).items()}
    name = old.get("strategy", {}).get("name")
    if name in STRATEGIES:
        usual = {f.name: f.default for f in dataclasses.fields(STRATEGIES[name])}
        old["strategy"] = _plain(usual) | old["strategy"]
    if old.get("adapter"):
        old["adapter"] = _plain(_adapter_settings(DualModeLoraConfig())) | old["adapter"]
    old["arguments"] = _plain(LearnerArguments().portable()) | old.get("arguments", {})
    return old


def _completed(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """A classifier's saved settings with those that were not there yet at their defaults."""
    if name not in CLASSIFIERS:
        return settings
    known = {
        key: settings[key]
        for key in settings
        if key in ("embed_dim", "logit_scale", *CLASSIFIERS[name].setting_names())
    }
    return settings if len(known) < len(settings) else _plain(_classifier_settings(CLASSIFIERS[name](**known)))


def _base_model_sha256(base: nn.Module) -> str:
    """Of the pristine weights' names, shapes and first values."""
    digest = hashlib.sha256()
    for name, tensor in base.state_dict().items():
        if PREFIX not in name and "modules_to_save" not in name:
            first = tensor.flatten()[:64].double().cpu().numpy()
            digest.update(f"{name} {tuple(tensor.shape)}".encode() + first.tobytes())
    return digest.hexdigest()


def _refuse_old_folders(output: Path, resume: bool) -> None:
    old = checkpoint.task_folders(output)
    if old:
        why = "none of them is valid" if resume else "resume is off"
        first = old[-1].name
        raise ValueError(f"{str(output)!r} already holds {first} and {why}: choose another folder or remove them")


def _resume(learner: StreamLearner, output: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    folder = on_main_process(partial(_newest_folder, output, identity))
    if folder is None:
        return None
    learner.state = saving.restore(learner.state, folder)
    _print_once(f"resuming after {folder.name}: {len(learner.state.class_names)} classes learned")
    return read_progress(folder)


def _newest_folder(output: Path, identity: dict[str, Any]) -> Path | None:
    """The newest valid task folder, which must be of this run."""
    for folder in checkpoint.task_folders(output):
        try:
            manifest = checkpoint.read_manifest(folder)
        except CheckpointError as error:
            _print_once(f"stepping over {folder}: {error}")
            continue
        different = _differences(_with_defaults(manifest.get("identity", {})), _plain(identity))
        if different:
            names = ", ".join(different)
            raise ValueError(f"{folder} belongs to another run: {names} differ; choose another output_dir")
        changed = _differences({"of": manifest["versions"]}, {"of": library_versions()})
        if changed:
            names = ", ".join(name.removeprefix("of.") for name in changed)
            _print_once(f"{folder.name} was written with other versions of {names}: the last bits may differ")
        return folder
    return None


def _print_once(text: str) -> None:
    if world()[0] == 0:
        tqdm.write(text)


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


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _commit(
    state: LearnerState,
    folder: Path,
    progress: dict[str, Any],
    identity: dict[str, Any],
    tests: dict[int, Evaluation],
) -> None:
    def write(temporary: Path) -> None:
        saving.write(state, temporary)
        write_json(temporary / PROGRESS_FILE, progress)
        if tests:
            write_predictions(temporary / PREDICTIONS_FILE, tests)

    fields = {
        "configuration_sha256": checkpoint.json_sha256([identity["adapter"], identity["arguments"]]),
        "identity": identity,
        "tasks": [list(task) for task in state.tasks],
    }
    on_main_process(partial(checkpoint.commit_folder, folder, write, fields, replace=True))


def _test(learner: StreamLearner, seen: list[Task]) -> dict[int, Evaluation]:
    """Number of a task -> what is predicted for its test images."""
    return {
        number: learner.evaluate_images(task.test, task.class_names)
        for number, task in enumerate(seen, 1)
        if task.test is not None
    }


def _zero_shot(learner: StreamLearner, stream: list[Task]) -> list[float]:
    """A_t of the pristine model with the text embeddings of the classes seen by task t."""
    if any(task.test is None for task in stream) or not has_text(learner.state.base):
        return []
    return learner.zero_shot([(task.test, task.class_names) for task in stream])


def _line(progress: dict[str, Any], index: int, total: int, classes: int) -> str:
    """What is said after a task. The numbers by task are the first classifier's."""
    row = progress["rows"][index]
    text = f"task {index + 1}/{total}: {classes} classes"
    if "accuracy" in row:
        if "text_accuracy" in row and "text" not in row["classifiers"]:
            text += f", text {100 * row['text_accuracy']:.1f} %"
        text += "".join(f", {name} {100 * part['accuracy']:.1f} %" for name, part in row["classifiers"].items())
        text += f", by task [{' '.join(f'{100 * value:.1f}' for value in row['accuracy_by_task'])}]"
    return text
