"""One run of a comparison: train a stream once, keep its features, and ask every classifier about them.

FOLDER/task-005        the learner after the last task
FOLDER/features/       what the classifiers see of each task
FOLDER/answers/        what each classifier says of the test images
FOLDER/log.txt         what the run said
FOLDER/cell.json       settings, cost, what is still known of classes in no stream; written when all is trained
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch

from dulbe_peft.classifiers import CLASSIFIERS, parse_classifier
from dulbe_peft.classifiers import spec as spec_of
from dulbe_peft.comparison.plan import Cell, Row
from dulbe_peft.data.fingerprint import fingerprint
from dulbe_peft.encoders.loading import has_text
from dulbe_peft.metrics.cost import memory_bytes, trainable_parameters
from dulbe_peft.metrics.features import FEATURES_FOLDER, SUFFIX, Answers, learn_from_features, read_features
from dulbe_peft.metrics.retention import zero_shot_retention
from dulbe_peft.report.views import write_views
from dulbe_peft.runs.settings import validated
from dulbe_peft.runs.setup import set_up
from dulbe_peft.runs.sources import DATA_FIELDS, open_source, source_of
from dulbe_peft.streams.tasks import Task
from dulbe_peft.utils.checks import check_int, check_number
from dulbe_peft.utils.files import damage, read_json, write_json
from dulbe_peft.utils.folders import MANIFEST, RESULTS_FILE, TIMINGS_FILE, file_sha256, json_sha256, task_folders
from dulbe_peft.utils.specs import parse_spec
from dulbe_peft.utils.tensors import read_tensors, write_tensors

CELL_FILE = "cell.json"
ANSWERS_FOLDER = "answers"
LOG_FILE = "log.txt"
# The run itself needs some classifier; those that the table shows learn from the features.
_OWN_CLASSIFIERS = "prototype"
# In the order of `Answers`.
_TYPES = {"truth": torch.int32, "predicted": torch.int32, "probability": torch.float32, "task": torch.int32}
_MOST_BYTES = 2**63 - 1


def finish_cell(cell: Cell, output: Path, rows: Sequence[Row], threads: int | None = None) -> str | None:
    """Do what is missing of a cell; called in a process of its own.

    Args:
        cell: the run.
        output: the comparison's folder.
        rows: the classifiers to ask.
        threads: how many threads torch uses; None leaves it as it is.

    Returns:
        None, or why it failed.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    folder = output / cell.folder
    problems = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / LOG_FILE).open("a", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
            done = train(cell, folder)
            for row in _askable(done, rows):
                try:
                    ask(folder, row)
                except Exception as error:  # of a user's own classifier, for instance; the other rows are asked
                    problems.append(f"{row.title}: {type(error).__name__}: {error}")
    except Exception as error:  # whatever it is, the other runs go on
        problems.append(f"{type(error).__name__}: {error}")
    return "; ".join(problems) or None


def _askable(done: dict[str, Any], rows: Sequence[Row]) -> list[Row]:
    """The rows that can be asked: without a text tower, no classifier that needs text."""
    return [row for row in rows if done["text"] or not CLASSIFIERS[parse_spec(row.classifier)[0]].needs_text]


def read_cell(folder: Path) -> dict[str, Any] | None:
    """What `cell.json` holds; None where the cell has not been trained to its end."""
    path = folder / CELL_FILE
    if not path.is_file():
        return None
    try:
        done = dict(read_json(path))
        for name, kind in (("settings", dict), ("cost", dict), ("data", list), ("retention_of", list), ("text", bool)):
            if not isinstance(done[name], kind):
                raise TypeError(f"{name} is {done[name]!r:.100}")
        check_number("seconds", done["cost"]["seconds"], least=0)
        for name in ("trainable_parameters", "kept_bytes"):
            check_int(name, done["cost"][name], 0, _MOST_BYTES)
        check_retention(done.get("retention"))
        return done
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(damage(path, error)) from error


def check_retention(found: Any) -> None:
    """Raise unless this is what `_retention` returns, as far as numbers tell."""
    if found is None:
        return
    points = [{"before": found["before"], "after": found["after"]}]
    points += [{name: point[name] for name in ("scale", "unlearned", "learned")} for point in found.get("scales", [])]
    for point in points:
        for name, value in point.items():
            check_number(name, value, least=0, most=1)


def train(cell: Cell, folder: Path) -> dict[str, Any]:
    """Train the stream where that is not done, and write `cell.json`; returns what it holds.

    Raises:
        ValueError: the folder holds a run with other settings; the message names them.
    """
    done = read_cell(folder)
    if done is not None:
        _check_same(done, cell, folder)
        _drop_earlier_tasks(folder)  # where an earlier call was stopped in the middle of it
        return done
    setup = set_up({**cell.settings, "classifiers": _OWN_CLASSIFIERS, "output": str(folder), "progress": False})
    if any(task.test is None for task in setup.tasks):
        raise ValueError(f"{setup.stream.data} has no test images: the setting test_fraction holds some back")
    learner = setup.make_learner(setup.args)
    source, check = source_of(setup.stream), setup.check_zero_shot
    ahead = setup.stream.test_ahead
    results = learner.run(
        setup.tasks, folder, source=source, keep_features=True, check_zero_shot=check, test_ahead=ahead
    )
    write_views(folder, [task.test for task in setup.tasks], results)
    content = {
        "stream": cell.stream,
        "method": cell.method,
        "seed": cell.seed,
        "settings": cell.settings,
        "strategy": {"name": learner.strategy.name, **learner.strategy.settings()},
        "logit_scale": learner.logit_scale,
        "text_embeds": learner.args.text_embeds,
        "bridge": {
            "num_depths": learner.args.num_depths,
            "reliability_temperature": learner.args.reliability_temperature,
        },
        "cost": _cost(learner, folder),
        "text": has_text(learner.clip),
        "data": data_fingerprint(cell.settings),
        "features": _digests(folder),
        "retention": _retention(learner, cell, setup.tasks),
        "retention_of": [cell.retention, *cell.retention_scales],
        "finished": time.strftime("%Y-%m-%d"),
    }
    write_json(folder / CELL_FILE, content)
    _drop_earlier_tasks(folder)
    return content


def has_settings_of(done: dict[str, Any], cell: Cell) -> bool:
    """Whether a finished run is the one that the cell asks for, as far as its settings tell."""
    return bool(done["settings"] == json.loads(json.dumps(cell.settings)))


def _check_same(done: dict[str, Any], cell: Cell, folder: Path) -> None:
    """Raise a ValueError where the finished run had other settings or other images than the cell asks for."""
    asked = json.loads(json.dumps(cell.settings)) | {"retention": [cell.retention, *cell.retention_scales]}
    settings = done["settings"] | {"retention": done["retention_of"]}
    other = "name another folder as output, remove this one, or give the stream or the method another name"
    for name in sorted({*settings, *asked}):
        before, now = settings.get(name), asked.get(name)
        if before != now:
            raise ValueError(f"{folder} was run with {name} = {before!r}, now it is {now!r}: {other}")
    if done["data"] != data_fingerprint(cell.settings):
        raise ValueError(f"{folder} was run on other images than are in {settings['data']!r} now: {other}")


def data_fingerprint(settings: dict[str, Any]) -> list[str | None]:
    """What tells the images of a run's data set from others: those to learn from, and those to test on."""
    return _fingerprints(json.dumps({name: settings[name] for name in DATA_FIELDS if name in settings}))


@cache
def _fingerprints(settings: str) -> list[str | None]:
    parts = open_source(source_of(validated(json.loads(settings))[0]), report=False)
    return [None if part is None else fingerprint(part) for part in parts]


def _cost(learner: Any, folder: Path) -> dict[str, Any]:
    """Seconds of all tasks, parameters that a task trains, and bytes that the method keeps between tasks."""
    timings = read_json(folder / TIMINGS_FILE)["tasks"]
    trained = trainable_parameters(learner.model, learner.strategy)["total"] if learner.strategy.adapts else 0
    return {
        # A run that was killed between a task's commit and its timing does not know that one.
        "seconds": sum(task["seconds"] for task in timings if task is not None),
        "trainable_parameters": trained,
        "kept_bytes": memory_bytes(learner.memory),
    }


def _retention(learner: Any, cell: Cell, tasks: Sequence[Task]) -> dict[str, Any] | None:
    """How well the model tells classes that it never learned by their names, before all tasks and after them.

    Where the cell names scales, it also has what each of them gives on those classes and on the learned ones.
    """
    if cell.retention is None:
        return None
    source = {"data": cell.retention, "train_split": "train", "test_split": "test", "test_fraction": None}
    train_images, test_images = open_source(source, report=False)
    images = train_images if test_images is None else test_images
    learned = [(task.test, task.class_names) for task in tasks] if cell.retention_scales else []
    found = zero_shot_retention(learner, images, scales=cell.retention_scales, learned=learned)
    return found if learned else {name: found[name] for name in ("before", "after")}


def _drop_earlier_tasks(folder: Path) -> None:
    """Keep the learner after the last task alone: with every task's, hundreds of runs would fill a disk."""
    for task in sorted(task_folders(folder))[:-1]:
        if (task / MANIFEST).is_file():  # else it is not a run's, or a stopped call has begun to remove it
            shutil.rmtree(task)


# ---------------------------------------------------------------------- classifiers


def answers_path(folder: Path, row: Row) -> Path:
    """Where a cell keeps what a classifier said."""
    drift = "" if row.drift == "none" else f" drift={row.drift}"
    return folder / ANSWERS_FOLDER / f"{quote(row.classifier, safe=':=,.')}{drift}.safetensors".replace(":", " ")


def ask(folder: Path, row: Row) -> None:
    """Teach a classifier the cell's features and write its answers, where that is not done."""
    path = answers_path(folder, row)
    if path.is_file():
        return
    cell = read_cell(folder)
    if cell is None:
        raise ValueError(f"{folder} is not trained to its end")
    again = f"remove {folder}, and the comparison trains the run again"
    if cell.get("features") not in (None, _digests(folder)):  # earlier versions did not note them
        raise ValueError(f"{folder / FEATURES_FOLDER} does not hold what the run wrote there: {again}")
    features, started = read_features(folder), time.perf_counter()
    scale, seed = cell["logit_scale"], cell["settings"]["seed"]
    how = (row.drift, cell["text_embeds"], seed, cell["bridge"])
    answers, classifier = learn_from_features(features, row.classifier, scale, *how)
    seconds = time.perf_counter() - started
    names = [name for task in features for name in task.closing.class_names]
    try:
        _check_answers(folder, answers, names)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{damage(folder / FEATURES_FOLDER, error)}; {again}") from error
    tensors = {}
    for step, found in enumerate(answers, 1):
        for name, values in vars(found).items():
            tensors[f"{name} {step}"] = values.to(_TYPES[name])
    facts = {"class_names": json.dumps(names), "nbytes": str(classifier.nbytes), "seconds": f"{seconds:.3f}"}
    path.parent.mkdir(exist_ok=True)
    facts |= {"classifier": spec_of(classifier), "of": _origin(cell, row)}
    write_tensors(path, tensors, facts)


def _digests(folder: Path) -> dict[str, str]:
    """The files of features that a run kept, and the SHA-256 of each."""
    return {path.name: file_sha256(path) for path in sorted((folder / FEATURES_FOLDER).glob(f"*{SUFFIX}"))}


def _origin(cell: dict[str, Any], row: Row) -> str:
    """What tells the answers of a run and a row from those of others, and from those that other defaults gave."""
    cls, settings = parse_classifier(row.classifier, cell["bridge"])
    made = {"classifier": [cls.name, cell["logit_scale"], settings], "drift": row.drift}
    return json_sha256({"run": cell["settings"], "text_embeds": cell["text_embeds"]} | made)


def _check_answers(folder: Path, answers: Sequence[Answers], names: Any) -> None:
    """Raise a ValueError where answers cannot be those of the stream of a run, as its `results.json` has it."""
    tasks = read_json(folder / RESULTS_FILE)["class_names"]
    if len(answers) != len(tasks) or names != [name for task in tasks for name in task]:
        raise ValueError(f"its tasks or classes are not those of {folder / RESULTS_FILE}")
    seen = torch.tensor([len(task) for task in tasks]).cumsum(0)
    before = torch.zeros(0)
    for step, found in enumerate(answers, 1):
        if any(tensor.shape != (len(found.truth),) for tensor in vars(found).values()):
            raise ValueError(f"it has not one answer for each image after task {step}")
        wrong = (found.truth < 0) | (found.truth >= seen[step - 1])
        wrong |= (found.predicted < 0) | (found.predicted >= seen[step - 1])
        wrong |= (found.probability < 0) | (found.probability > 1 + 1e-3)
        wrong |= found.task != torch.bucketize(found.truth.long(), seen, right=True) + 1
        if wrong.any() or len(found.truth) <= len(before) or not torch.equal(found.truth[: len(before)], before):
            raise ValueError(f"its numbers after task {step} cannot be answers")
        before = found.truth


def read_answers(folder: Path, row: Row) -> tuple[list[Answers], list[str], dict[str, Any]]:
    """What a classifier said after each task; the classes that its integers index; and its bytes and seconds.

    Raises:
        ValueError: the file is damaged.
    """
    path = answers_path(folder, row)
    try:
        tensors, facts = read_tensors(path)
        steps = sum(name.startswith("truth ") for name in tensors)
        answers = [Answers(*(tensors[f"{name} {step}"] for name in _TYPES)) for step in range(1, steps + 1)]
        cost = {"nbytes": int(facts["nbytes"]), "seconds": float(facts["seconds"])}
        check_int("nbytes", cost["nbytes"], 0, _MOST_BYTES)
        check_number("seconds", cost["seconds"], least=0)
        names = json.loads(facts["class_names"])
        if any(tensor.dtype != _TYPES[name] for found in answers for name, tensor in vars(found).items()):
            raise TypeError("its tensors are not of the types that a comparison writes")
        _check_answers(folder, answers, names)
        cell = read_cell(folder)
        if parse_spec(facts["classifier"])[0] != parse_spec(row.classifier)[0] or (
            cell is not None and facts.get("of", _origin(cell, row)) != _origin(cell, row)
        ):
            raise ValueError("it is of another run, classifier or version")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{damage(path, error)}; remove the file, and the comparison asks the classifier again"
        ) from error
    return answers, names, cost


def is_done(cell: Cell, output: Path, rows: Sequence[Row]) -> bool:
    """Whether nothing of a cell is missing."""
    folder = output / cell.folder
    done = read_cell(folder)
    if done is None:
        return False
    _check_same(done, cell, folder)
    return all(answers_path(folder, row).is_file() for row in _askable(done, rows))
