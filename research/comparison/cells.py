"""One run of a comparison: train a stream once, keep its features, and ask every classifier about them.

Beside what every run leaves, its folder holds `answers/`, what each classifier says of the test images; `log.txt`,
what the run said; and `cell.json`, settings and cost, which is written when all is trained.
"""

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

from dulbe_peft.checkpoints.layout import TIMINGS_FILE, task_folders
from dulbe_peft.classifiers.registry import CLASSIFIERS, parse_classifier
from dulbe_peft.encoders.loading import has_text
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.metrics.features import Answers, learn_from_features, read_features
from dulbe_peft.metrics.retention import zero_shot_retention
from dulbe_peft.photos.cost import memory_bytes, trainable_parameters
from dulbe_peft.photos.runs.settings import validated
from dulbe_peft.photos.runs.setup import set_up
from dulbe_peft.photos.runs.sources import DATA_FIELDS, open_source, source_of
from dulbe_peft.streams.tasks import Task
from dulbe_peft.utils.files import damage, read_json
from dulbe_peft.utils.folders import MANIFEST
from dulbe_peft.utils.records import Record, read_record, write_record
from dulbe_peft.utils.specs import parse_spec
from dulbe_peft.utils.tensors import read_tensors, write_tensors
from research.comparison.comparison_file import Retention
from research.comparison.plan import Cell, Row

CELL_FILE = "cell.json"
# In the order of `Answers`.
_TYPES = {"truth": torch.int32, "predicted": torch.int32, "probability": torch.float32, "task": torch.int32}


class Cost(Record):
    """What a run took: seconds of all tasks, parameters that a task trains, bytes that are kept between tasks."""

    seconds: float
    cpu_seconds: float
    trainable_parameters: int
    kept_bytes: int


class CellRecord(Record):
    """`cell.json`: a run that is trained to its end."""

    stream: str
    method: str
    seed: int
    settings: dict[str, Any]
    arguments: dict[str, Any]  # what it learned by, with all defaults
    strategy: dict[str, Any]
    class_names: list[list[str]]
    logit_scale: float
    text_embeds: str
    cost: Cost
    text: bool
    data: list[str | None]
    retention: Retention | None
    retention_of: list[Any]
    finished: str


class AnswersFacts(Record):
    """What stands beside a classifier's answers; `settings` tell them from those of another run or classifier."""

    class_names: list[str]
    nbytes: int
    seconds: float
    cpu_seconds: float
    settings: dict[str, Any]


def finish_cell(cell: Cell, output: Path, rows: Sequence[Row], threads: int | None = None) -> tuple[str, str | None]:
    """Do what is missing of a cell, in a process of its own; returns its folder, and why it failed or None."""
    if threads is not None:
        torch.set_num_threads(threads)
    folder, problems = output / cell.folder, []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "log.txt").open("a", encoding="utf-8") as log, redirect_stdout(log), redirect_stderr(log):
            done = train(cell, folder)
            for row in _unasked(folder, done, rows):
                try:
                    ask(folder, row, done)
                except Exception as error:  # of a user's own classifier, for instance; the other rows are asked
                    problems.append(f"{row.title}: {type(error).__name__}: {error}")
    except Exception as error:  # whatever it is, the other runs go on
        problems.append(f"{type(error).__name__}: {error}")
    return cell.folder, "; ".join(problems) or None


def is_done(cell: Cell, output: Path, rows: Sequence[Row]) -> bool:
    """Whether nothing of a cell is missing."""
    folder = output / cell.folder
    done = _finished(cell, folder)
    return done is not None and not _unasked(folder, done, rows)


def _unasked(folder: Path, done: CellRecord, rows: Sequence[Row]) -> list[Row]:
    """The rows without answers that can be asked: without a text tower, no classifier that needs text."""
    able = [row for row in rows if done.text or not CLASSIFIERS[parse_spec(row.classifier)[0]].needs_text]
    return [row for row in able if not answers_path(folder, row).is_file()]


def read_cell(folder: Path) -> CellRecord | None:
    """What `cell.json` holds; None where the cell has not been trained to its end."""
    path = folder / CELL_FILE
    return read_record(path, CellRecord) if path.is_file() else None


def train(cell: Cell, folder: Path) -> CellRecord:
    """Train the stream where that is not done, and write `cell.json`; returns what it holds."""
    done = _finished(cell, folder)
    if done is None:
        done = _train(cell, folder)
        write_record(folder / CELL_FILE, done)
    # Keep the learner after the last task alone: with every task's, hundreds of runs would fill a disk.
    for task in task_folders(folder)[1:]:
        if (task / MANIFEST).is_file():  # else it is not a run's, or a stopped call has begun to remove it
            shutil.rmtree(task)
    return done


def _train(cell: Cell, folder: Path) -> CellRecord:
    # The run itself needs some classifier; those that the table shows learn from the features.
    own = {"classifiers": "prototype", "output": str(folder), "progress": False}
    setup = set_up(*validated(cell.settings | own))
    if any(task.test is None for task in setup.tasks):
        raise ValueError(f"{setup.stream.data} has no test images: the setting test_fraction holds some back")
    setup.run(keep_features=True)
    learner = setup.learner
    args, strategy = learner.args, learner.strategy
    # A run that was killed between a task's commit and its timing does not know that one.
    timings = [task for task in read_json(folder / TIMINGS_FILE)["tasks"] if task is not None]
    return CellRecord(
        stream=cell.stream,
        method=cell.method,
        seed=cell.seed,
        settings=as_json(cell.settings),
        arguments=arguments_of(cell),
        strategy={"name": strategy.name, **strategy.settings()},
        class_names=[list(task) for task in learner.tasks],
        logit_scale=learner.logit_scale,
        text_embeds=args.text_embeds,
        cost=Cost(
            seconds=sum(task["seconds"] for task in timings),
            cpu_seconds=sum(task["cpu_seconds"] for task in timings),
            trainable_parameters=trainable_parameters(learner.model, strategy)["total"] if strategy.adapts else 0,
            kept_bytes=memory_bytes(learner.memory),
        ),
        text=has_text(learner.clip),
        data=data_fingerprint(cell.settings),
        retention=_retention(learner, cell, setup.tasks),
        retention_of=list(cell.retention),
        finished=time.strftime("%Y-%m-%d"),
    )


def _retention(learner: ClassIncrementalLearner, cell: Cell, tasks: Sequence[Task]) -> Retention | None:
    """How well the model tells classes that it never learned by their names, before all tasks and after them."""
    data, *scales = cell.retention
    if data is None:
        return None
    source = {"data": data, "train_split": "train", "test_split": "test", "test_fraction": None}
    train_images, test_images = open_source(source, report=False)
    images = train_images if test_images is None else test_images
    learned = [(task.test, task.class_names) for task in tasks] if scales else []
    found = zero_shot_retention(learner, images, scales=scales, learned=learned)
    return Retention.model_validate(found if learned else {name: found[name] for name in ("before", "after")})


def arguments_of(cell: Cell) -> dict[str, Any]:
    """What a cell's run learns by, with all defaults, as a JSON file gives it back."""
    return as_json(validated(cell.settings)[2].portable())


def as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as a JSON file gives them back."""
    return dict(json.loads(json.dumps(settings)))


def _finished(cell: Cell, folder: Path) -> CellRecord | None:
    """As `read_cell`; raises a ValueError where the run had other settings or other images than the cell asks for."""
    done = read_cell(folder)
    if done is None:
        return None
    asked, settings = as_json(cell.settings), dict(done.settings)
    asked["retention"], settings["retention"] = list(cell.retention), done.retention_of
    asked, settings = asked | arguments_of(cell), settings | done.arguments  # a default may have changed since
    other = "name another folder as output, remove this one, or give the stream or the method another name"
    for name in sorted({*settings, *asked}):
        before, now = settings.get(name), asked.get(name)
        if before != now:
            raise ValueError(f"{folder} was run with {name} = {before!r}, now it is {now!r}: {other}")
    if done.data != data_fingerprint(cell.settings):
        raise ValueError(f"{folder} was run on other images than are in {settings['data']!r} now: {other}")
    return done


def data_fingerprint(settings: dict[str, Any]) -> list[str | None]:
    """What tells the images of a run's data set from others: those to learn from, and those to test on."""
    return _fingerprints(json.dumps({name: settings[name] for name in DATA_FIELDS if name in settings}))


@cache
def _fingerprints(settings: str) -> list[str | None]:
    parts = open_source(source_of(validated(json.loads(settings))[0]), report=False)
    return [None if part is None else part.fingerprint() for part in parts]


def answers_path(folder: Path, row: Row) -> Path:
    """Where a cell keeps what a classifier said."""
    drift = "" if row.drift == "none" else f" drift={row.drift}"
    return folder / "answers" / f"{quote(row.classifier, safe=':=,.')}{drift}.safetensors".replace(":", " ")


def ask(folder: Path, row: Row, cell: CellRecord) -> None:
    """Teach a classifier the cell's features and write its answers."""
    path = answers_path(folder, row)
    features, started, cpu = read_features(folder), time.perf_counter(), time.process_time()
    if [list(task.closing.class_names) for task in features] != cell.class_names:
        raise ValueError(f"{folder / 'features'} does not hold the tasks of this run: remove {folder}")
    how = (cell.logit_scale, row.drift, cell.text_embeds, cell.settings["seed"])
    answers, classifier = learn_from_features(features, row.classifier, *how)
    facts = AnswersFacts(
        class_names=[name for task in cell.class_names for name in task],
        nbytes=classifier.nbytes,
        seconds=time.perf_counter() - started,
        cpu_seconds=time.process_time() - cpu,
        settings=_answer_settings(cell, row),
    )
    tensors = {
        f"{name} {step}": values.to(_TYPES[name])
        for step, found in enumerate(answers, 1)
        for name, values in vars(found).items()
    }
    path.parent.mkdir(exist_ok=True)
    write_tensors(path, tensors, {"facts": facts.model_dump_json()})


def _answer_settings(cell: CellRecord, row: Row) -> dict[str, Any]:
    """What tells the answers of a run and a row from those of others, and from those that other defaults gave."""
    recipe = parse_classifier(row.classifier)
    made = {"classifier": [recipe.kind.name, cell.logit_scale, recipe.settings], "drift": row.drift}
    return as_json({"run": cell.settings, "text_embeds": cell.text_embeds} | made)


def read_answers(folder: Path, row: Row, cell: CellRecord) -> tuple[list[Answers], AnswersFacts]:
    """What a classifier said after each task; and the classes that its integers index, its bytes and seconds."""
    path = answers_path(folder, row)
    try:
        tensors, metadata = read_tensors(path)
        facts = AnswersFacts.model_validate_json(metadata["facts"])
        steps = range(1, len(cell.class_names) + 1)
        answers = [Answers(*(tensors[f"{name} {step}"] for name in _TYPES)) for step in steps]
        if facts.settings != _answer_settings(cell, row):
            raise ValueError("it is of another run, classifier or version")
    except (ValueError, KeyError) as error:
        raise ValueError(f"{damage(path, error)}; remove the file, and it is asked again") from error
    return answers, facts
