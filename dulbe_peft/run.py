"""A whole class-incremental stream: learn, test, commit a folder per task, resume, write `results.json`."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from dulbe_peft import checkpoint
from dulbe_peft.adapter.registration import PREFIX
from dulbe_peft.checkpoint import CheckpointError, library_versions
from dulbe_peft.distributed import on_main_process, world
from dulbe_peft.files import write_json
from dulbe_peft.streams.fingerprint import fingerprint
from dulbe_peft.streams.metrics import accuracy_matrix, summarize
from dulbe_peft.streams.tasks import Task

RESULTS_FILE = "results.json"
TIMINGS_FILE = "timings.json"
PROGRESS_FILE = "progress.json"
LOCK_FILE = ".dulbe_peft.lock"
_TIME_FORMAT = "%Y-%m-%dT%H:%M:%S%z"
_TASK_FOLDER = r"task-\d{3,}"


def run_stream(learner: Any, tasks: Iterable[Task], output_dir: str | Path, resume: bool = True) -> dict[str, Any]:
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
        on_main_process(partial(_occupy, output, held))
        return _run(learner, stream, output, resume)


def _occupy(output: Path, held: ExitStack) -> None:
    """Keep other runs out of the folder, and remove what killed ones left in it."""
    held.enter_context(checkpoint.exclusive(output / LOCK_FILE, f"output_dir {str(output)!r}"))
    checkpoint.clear_leftovers(output, "|".join([_TASK_FOLDER, re.escape(RESULTS_FILE), re.escape(TIMINGS_FILE)]))


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


def _run(learner: Any, stream: list[Task], output: Path, resume: bool) -> dict[str, Any]:
    identity = _identity(learner, stream)
    progress = _resume(learner, output, identity) if resume else None
    if progress is None:
        if learner.tasks:
            raise ValueError(f"the learner has already learned {len(learner.tasks)} tasks: a stream starts with none")
        _refuse_old_folders(output, resume)
        progress = {"rows": [], "zero_shot": _zero_shot(learner, stream)}
        if progress["zero_shot"]:
            _say(f"zero-shot over all classes, before any training: {100 * progress['zero_shot'][-1]:.1f} %")
    timings = _read_timings(output, len(learner.tasks))
    for index in range(len(learner.tasks), len(stream)):
        started = time.perf_counter()
        learner.learn_task(stream[index].train, stream[index].class_names)
        with learner.profile.phase("test"):
            progress["rows"].append(_test(learner, stream[: index + 1]))
        with learner.profile.phase("save"):
            _commit(learner, output / f"task-{index + 1:03d}", progress, identity)
        seconds = time.perf_counter() - started
        done = {"seconds": seconds, "phases": dict(learner.profile.seconds), "finished": time.strftime(_TIME_FORMAT)}
        timings.append(done)
        on_main_process(partial(write_json, output / TIMINGS_FILE, {"tasks": timings}))
        _say(_line(progress, index, len(stream), len(learner.class_names)) + f", {seconds:.1f} s")
        if learner.args.profile:
            _say(learner.profile.table())
    results = _results(learner, progress, identity)
    on_main_process(partial(write_json, output / RESULTS_FILE, results))
    return results


def _read_timings(output: Path, finished: int) -> list[Any]:
    """Those of the finished tasks; unknown where the file is not there, or no longer whole."""
    try:
        tasks = list(json.loads((output / TIMINGS_FILE).read_text(encoding="utf-8"))["tasks"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        tasks = []
    return [*tasks[:finished], *[None] * (finished - len(tasks))]


def _identity(learner: Any, stream: list[Task]) -> dict[str, Any]:
    """What must be the same for a run to be the same run."""
    config = learner.model.active_peft_config.to_dict()
    for name in ("history_rank", "inference_mode", "peft_version"):
        config.pop(name)
    return {
        "adapter": {k: str(v) if k.endswith("_type") else v for k, v in config.items()},
        "arguments": learner.args.portable(),
        "classes": [list(task.class_names) for task in stream],
        "data": [[_fingerprint(learner, data) for data in (task.train, task.test)] for task in stream],
        "head": _head_settings(learner.head),
        "base_model": _base_model_sha256(learner),
    }


def _fingerprint(learner: Any, dataset: Any) -> str | None:
    # An online teacher is there for images that are augmented anew each time.
    return None if dataset is None else fingerprint(dataset, look=learner.args.teacher == "cached")


def _head_settings(head: Any) -> dict[str, Any]:
    settings = {name: getattr(head, name) for name in ("embed_dim", "reliability_temperature", "logit_scale")}
    return settings | {"depths": head.depths.tolist()}


def _base_model_sha256(learner: Any) -> str:
    """Of the pristine weights' names, shapes and first values."""
    digest = hashlib.sha256()
    for name, tensor in learner.clip.state_dict().items():
        if PREFIX not in name and "modules_to_save" not in name:
            first = tensor.flatten()[:64].double().cpu().numpy()
            digest.update(f"{name} {tuple(tensor.shape)}".encode() + first.tobytes())
    return digest.hexdigest()


def _task_folders(output: Path) -> list[Path]:
    """The newest first."""
    folders = [path for path in output.iterdir() if re.fullmatch(_TASK_FOLDER, path.name)]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("task-")), reverse=True)


def _refuse_old_folders(output: Path, resume: bool) -> None:
    old = _task_folders(output)
    if old:
        why = "none of them is valid" if resume else "resume is off"
        first = old[-1].name
        raise ValueError(f"{str(output)!r} already holds {first} and {why}: choose another folder or remove them")


def _resume(learner: Any, output: Path, identity: dict[str, Any]) -> dict[str, Any] | None:
    folder = on_main_process(partial(_newest_folder, output, identity))
    if folder is None:
        return None
    learner.restore(folder)
    _say(f"resuming after {folder.name}: {len(learner.class_names)} classes learned")
    progress: dict[str, Any] = json.loads((folder / PROGRESS_FILE).read_text(encoding="utf-8"))
    return progress


def _newest_folder(output: Path, identity: dict[str, Any]) -> Path | None:
    """The newest valid task folder, which must be of this run."""
    for folder in _task_folders(output):
        try:
            manifest = checkpoint.read_manifest(folder)
        except CheckpointError as error:
            _say(f"stepping over {folder}: {error}")
            continue
        different = _differences(manifest.get("identity", {}), _plain(identity))
        if different:
            names = ", ".join(different)
            raise ValueError(f"{folder} belongs to another run: {names} differ; choose another output_dir")
        changed = _differences({"of": manifest["versions"]}, {"of": library_versions()})
        if changed:
            names = ", ".join(name.removeprefix("of.") for name in changed)
            _say(f"{folder.name} was written with other versions of {names}: the last bits may differ")
        return folder
    return None


def _say(text: str) -> None:
    if world()[0] == 0:
        tqdm.write(text)


def _differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    names = []
    for part, value in current.items():
        old = saved.get(part)
        if isinstance(value, dict) and isinstance(old, dict):
            names += [f"{part}.{key}" for key in sorted({*value, *old}) if value.get(key) != old.get(key)]
        elif old != value:
            names.append(part)
    return names


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def _commit(learner: Any, folder: Path, progress: dict[str, Any], identity: dict[str, Any]) -> None:
    def write(temporary: Path) -> None:
        learner.write(temporary)
        write_json(temporary / PROGRESS_FILE, progress)

    fields = {
        "configuration_sha256": checkpoint.json_sha256([identity["adapter"], identity["arguments"]]),
        "identity": identity,
        "tasks": [list(task) for task in learner.tasks],
    }
    on_main_process(partial(checkpoint.commit_folder, folder, write, fields, replace=True))


def _test(learner: Any, seen: list[Task]) -> dict[str, Any]:
    """Accuracy over all seen test images and on each seen task's, for the head and for the text classifier."""
    rows = [learner.evaluate(task.test, task.class_names) for task in seen if task.test is not None]
    images = sum(row["num_images"] for row in rows)
    pooled: dict[str, Any] = {}
    for name in ("accuracy", "text_accuracy") if rows else ():
        pooled[name] = sum(row[name] * row["num_images"] for row in rows) / images
        pooled[f"{name}_by_task"] = [row[name] for row in rows]
    return pooled


def _zero_shot(learner: Any, stream: list[Task]) -> list[float]:
    """A_t of the pristine model with the text embeddings of the classes seen by task t."""
    if any(task.test is None for task in stream):
        return []
    return learner.zero_shot([(task.test, task.class_names) for task in stream])


def _line(progress: dict[str, Any], index: int, total: int, classes: int) -> str:
    row = progress["rows"][index]
    text = f"task {index + 1}/{total}: {classes} classes"
    if "accuracy" in row:
        by_task = " ".join(f"{100 * value:.1f}" for value in row["accuracy_by_task"])
        text += f", text {100 * row['text_accuracy']:.1f} %, head {100 * row['accuracy']:.1f} %, by task [{by_task}]"
    return text


def _results(learner: Any, progress: dict[str, Any], identity: dict[str, Any]) -> dict[str, Any]:
    results: dict[str, Any] = {
        "configuration": {"adapter": identity["adapter"], "arguments": identity["arguments"]},
        "class_names": identity["classes"],
        "seed": learner.args.seed,
        "versions": library_versions(),
    }
    rows = progress["rows"]
    if all("accuracy" in row for row in rows):
        for key, name in (("head", "accuracy"), ("text", "text_accuracy")):
            results[key] = summarize(
                accuracy_matrix([row[f"{name}_by_task"] for row in rows]), [row[name] for row in rows]
            )
        zero_shot = progress["zero_shot"]
        results["zero_shot"] = {
            "overall": zero_shot,
            "average_accuracy": sum(zero_shot) / len(zero_shot),
            "last_accuracy": zero_shot[-1],
        }
    return results
