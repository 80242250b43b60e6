"""Run one cell of a comparison: train a stream once, keep its features, and evaluate every classifier on them.

The folder of a cell holds the usual files of a run and three more: `answers/` has the predictions of each classifier
for the test images, `log.txt` has the output of the run, and `cell.json` has the settings and the cost. `cell.json` is
written after training is complete.
"""

import json
import shutil
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from filelock import FileLock, Timeout
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError
from tqdm import tqdm
from transformers.utils import CONFIG_NAME

from dulbe_peft.checkpoints.layout import TIMINGS_FILE, task_folders
from dulbe_peft.classifiers.registry import CLASSIFIERS, parse_classifier
from dulbe_peft.data.images import LabelledImages, named_images
from dulbe_peft.encoders.loading import has_text
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.metrics.task_features import Answers, learn_from_features, read_features
from dulbe_peft.photos.cost import trainable_parameters
from dulbe_peft.photos.data.source import DataSource
from dulbe_peft.photos.runs.run_settings import validated
from dulbe_peft.photos.runs.setup import set_up
from dulbe_peft.strategies.base import Memory
from dulbe_peft.streams.retention import zero_shot_retention
from dulbe_peft.streams.tasks import Task
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.utils.files import damage, read_json
from dulbe_peft.utils.folders import MANIFEST, file_sha256, json_sha256
from dulbe_peft.utils.records import Record, read_record, write_record
from dulbe_peft.utils.specs import parse_spec
from dulbe_peft.utils.tensors import read_tensors, write_tensors
from research.comparison.comparison_file import Retention
from research.comparison.peak import peak_memory
from research.comparison.plan import LAST_TASK, Cell, Row

CELL_FILE, LOCK_FILE = "cell.json", ".comparison.lock"
TAKEN = "another process is running it"
# Settings that choose among the images of a data set.
_DRAWS = ("validation_fraction", "images_per_class", "test_images_per_class", "draw_seed")
# In the order of the fields of `Answers`.
_TYPES = {"truth": torch.int32, "predicted": torch.int32, "probability": torch.float32, "task": torch.int32}


class Cost(Record):
    """Cost of a run: seconds over all tasks, parameters trained per task, bytes kept between tasks, and use.

    `passes` counts how often the vision tower reads an image that is classified. `peak_bytes` is the largest memory of
    the process during the run, or of the accelerator; None where the system does not tell. `learning_rate` is None if
    nothing was trained.
    """

    seconds: float
    cpu_seconds: float
    trainable_parameters: int
    kept_bytes: int
    passes: int | None = None
    peak_bytes: int | None = None
    learning_rate: float | None = None


class CellRecord(Record):
    """Content of `cell.json`, which describes a run that has finished training."""

    stream: str
    method: str
    seed: int
    settings: dict[str, Any]
    arguments: dict[str, Any]  # the learner's arguments, with all defaults
    strategy: dict[str, Any]
    class_names: list[list[str]]
    logit_scale: float
    text_embeds: str
    cost: Cost
    text: bool
    images: list[str | None]  # of `images_fingerprint`
    model: str  # of `model_fingerprint`, taken before the training
    retention: Retention | None
    retention_of: list[Any]
    finished: str


class AnswersFacts(Record):
    """Metadata of a classifier's answers. `settings` identify the run and the classifier that produced them."""

    class_names: list[str]
    nbytes: int
    seconds: float
    cpu_seconds: float
    settings: dict[str, Any]


def finish_cell(
    cell: Cell, output: Path, rows: Sequence[Row], threads: int | None = None, wait: bool = False
) -> tuple[str, str | None]:
    """Run the missing parts of a cell, in a worker process. Return its folder, and an error message or None.

    If another process is running the cell, return the message `TAKEN`, or wait for it with `wait`.
    """
    if threads is not None:
        torch.set_num_threads(threads)
        tqdm.set_lock(threading.RLock())  # by default, a semaphore, which Ctrl-C would leave behind
    folder, problems = output / cell.folder, []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as held:
            held.enter_context(FileLock(folder / LOCK_FILE, blocking=wait))
            log = held.enter_context((folder / "log.txt").open("a", encoding="utf-8"))
            held.enter_context(redirect_stdout(log))
            held.enter_context(redirect_stderr(log))
            done = train(cell, folder)
            for row in _unanswered(folder, done, rows):
                try:
                    ask(folder, row, done)
                except Exception as error:  # for example, from a user's classifier; the other rows are still evaluated
                    problems.append(f"{row.title}: {type(error).__name__}: {error}")
    except Timeout:
        return cell.folder, TAKEN
    except Exception as error:  # no error of one run may stop the other runs
        problems.append(f"{type(error).__name__}: {error}")
    return cell.folder, "; ".join(problems) or None


def is_done(cell: Cell, output: Path, rows: Sequence[Row]) -> bool:
    """Return whether a cell is complete: it is trained, and all rows have answers."""
    folder = output / cell.folder
    done = _finished(cell, folder)
    return done is not None and not _unanswered(folder, done, rows)


def _unanswered(folder: Path, done: CellRecord, rows: Sequence[Row]) -> list[Row]:
    """Return the rows without answers, except those that need text embeddings if the model has no text tower."""
    evaluable = [row for row in rows if done.text or not CLASSIFIERS[parse_spec(row.classifier)[0]].needs_text]
    return [row for row in evaluable if not answers_path(folder, row).is_file()]


def read_cell(folder: Path) -> CellRecord | None:
    """Read `cell.json`; return None if the cell has not finished training."""
    path = folder / CELL_FILE
    return read_record(path, CellRecord) if path.is_file() else None


def train(cell: Cell, folder: Path) -> CellRecord:
    """Train the stream and write `cell.json`, unless both are done already. Return the content of `cell.json`."""
    done = _finished(cell, folder)
    if done is None:
        done = _train(cell, folder)
        write_record(folder / CELL_FILE, done)
    # Keep only the learner of the last task. Hundreds of runs with the learners of all tasks would fill a disk.
    for task in task_folders(folder)[1:]:
        if (task / MANIFEST).is_file():  # otherwise the folder is foreign, or an interrupted call was removing it
            shutil.rmtree(task)
    return done


def _train(cell: Cell, folder: Path) -> CellRecord:
    # A run needs at least one classifier. The classifiers of the table learn later, from the features of the run.
    fixed = {"classifiers": "prototype", "output": str(folder), "progress": False}
    model = model_fingerprint(cell.settings["model"])
    setup = set_up(*validated(cell.settings | fixed))
    if any(task.test is None for task in setup.tasks):
        raise ValueError(f"{setup.source.data} has no test images; set test_fraction to hold some images out")
    never = _never_learned(cell, setup.tasks)
    if cell.retention[0] == LAST_TASK:
        setup = replace(setup, tasks=setup.tasks[:-1])
    learner = setup.learner
    with peak_memory(learner.encoder.device) as peak:
        setup.run(keep_features=True)
    args, strategy = learner.args, learner.strategy
    trained = trainable_parameters(learner.model, strategy, learner.memory)["total"] if strategy.adapts else 0
    # If a run was killed after it committed a task and before it wrote the timing, the timing is None.
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
            trainable_parameters=trained,
            kept_bytes=memory_bytes(learner.memory),
            passes=2 if learner.encoder.encoding is not None and learner.encoder.encoding.queries else 1,
            peak_bytes=peak(),
            learning_rate=strategy.rate(args) if strategy.adapts else None,
        ),
        text=has_text(learner.clip),
        images=images_fingerprint(cell),
        model=model,
        retention=None if never is None else _retention(learner, never, cell.retention[1:], setup.tasks),
        retention_of=list(cell.retention),
        finished=time.strftime("%Y-%m-%d"),
    )


def _never_learned(cell: Cell, tasks: Sequence[Task]) -> LabelledImages | None:
    """Return test images of classes that are never learned; those of the last task have the names of all tasks."""
    data, last = cell.retention[0], tasks[-1]
    if data is None:
        return None
    if data != LAST_TASK:
        return _never_learned_images(data)
    if len(tasks) == 1:
        raise ValueError(f"retention is {data!r}, but the stream has a single task; choose a smaller increment")
    names = [name for task in tasks for name in task.class_names]
    images = named_images(last.test)
    return images.at(slice(None), images.labels + len(names) - len(last.class_names), tuple(names))


def _never_learned_images(data: str) -> LabelledImages:
    train, test, _ = DataSource(data).open()
    return train if test is None else test


def _retention(
    learner: ClassIncrementalLearner, never: LabelledImages, scales: Sequence[float], tasks: Sequence[Task]
) -> Retention:
    """Return the zero-shot accuracy on classes that are never learned, before all tasks and after them."""
    learned = [(task.test, task.class_names) for task in tasks] if scales else []
    retention = zero_shot_retention(learner, never, scales=scales, learned=learned)
    return Retention.model_validate(retention if learned else {name: retention[name] for name in ("before", "after")})


def arguments_of(cell: Cell) -> dict[str, Any]:
    """Return the learner's arguments for a cell, with all defaults, as they are read from a JSON file."""
    return as_json(validated(cell.settings).learner.portable())


def as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as they are read from a JSON file."""
    return dict(json.loads(json.dumps(settings)))


def _finished(cell: Cell, folder: Path) -> CellRecord | None:
    """Read `cell.json`; raise a ValueError if the run used other settings, images or another model than required."""
    done = read_cell(folder)
    if done is None:
        return None
    required, settings = as_json(cell.settings), dict(done.settings)
    required["retention"], settings["retention"] = list(cell.retention), done.retention_of
    required, settings = required | arguments_of(cell), settings | done.arguments  # defaults may have changed since
    remedy = "use another output folder, remove this one, or give the stream or the method another name"
    for name in sorted({*settings, *required}):
        before, now = settings.get(name), required.get(name)
        if before != now:
            raise ValueError(f"{folder} was run with {name} = {before!r}, now it is {now!r}: {remedy}")
    for before, now, data in zip(done.images, images_fingerprint(cell), (settings["data"],) * 2 + cell.retention[:1]):
        if before != now:
            raise ValueError(f"{folder} was run on other images than are in {data!r} now: {remedy}")
    if done.model != cached_model_fingerprint(cell.settings["model"]):
        raise ValueError(f"{folder} was run with another model than is in {settings['model']!r} now: {remedy}")
    return done


def model_fingerprint(model: str) -> str:
    """Return a fingerprint of a model's folder, or the name and the commit of a model on the Hub.

    The fingerprint covers the names and contents of all files except pages of text (`*.md`). The commit is the one
    that would be loaded now. It is left out if the Hub does not answer and nothing was downloaded before.
    """
    folder = Path(model)
    if model == "demo" and not folder.exists():
        folder = demo_model_folder()
    if not folder.is_dir():
        try:
            return f"{model}@{Path(hf_hub_download(model, CONFIG_NAME)).parent.name}"
        except (OSError, HFValidationError):
            return model
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix != ".md"]
    return json_sha256({path.name: file_sha256(path) for path in files})


cached_model_fingerprint = cache(model_fingerprint)  # for many cells, before any of them is run


def images_fingerprint(cell: Cell) -> list[str | None]:
    """Return fingerprints of the training, the test, and the never learned images of a run."""
    entry = DataSource.of(cell.settings).entry()
    drawn_from = json.dumps({name: value for name, value in entry.items() if name not in _DRAWS})
    return [*_fingerprints(drawn_from), _never_learned_fingerprint(cell.retention[0])]


@cache
def _fingerprints(entry: str) -> list[str | None]:
    train, test, _ = DataSource.of(json.loads(entry)).open()
    return [None if part is None else part.fingerprint() for part in (train, test)]


@cache
def _never_learned_fingerprint(data: str | None) -> str | None:
    return data if data in (None, LAST_TASK) else _never_learned_images(data).fingerprint()


def answers_path(folder: Path, row: Row) -> Path:
    """Return the file in which a cell keeps the answers of a classifier."""
    drift = "" if row.drift == "none" else f" drift={row.drift}"
    return folder / "answers" / f"{quote(row.classifier, safe=':=,.')}{drift}.safetensors".replace(":", " ")


def ask(folder: Path, row: Row, cell: CellRecord) -> None:
    """Train a classifier on the features of the cell and write its answers."""
    path = answers_path(folder, row)
    features, started, cpu = read_features(folder), time.perf_counter(), time.process_time()
    if [list(task.closing.class_names) for task in features] != cell.class_names:
        raise ValueError(f"{folder / 'features'} does not contain the tasks of this run; remove {folder}")
    settings = (cell.logit_scale, row.drift, cell.text_embeds, cell.settings["seed"])
    answers, classifier = learn_from_features(features, row.classifier, *settings)
    facts = AnswersFacts(
        class_names=[name for task in cell.class_names for name in task],
        nbytes=classifier.nbytes,
        seconds=time.perf_counter() - started,
        cpu_seconds=time.process_time() - cpu,
        settings=_answer_settings(cell, row),
    )
    tensors = {
        f"{name} {step}": values.to(_TYPES[name])
        for step, answer in enumerate(answers, 1)
        for name, values in vars(answer).items()
    }
    path.parent.mkdir(exist_ok=True)
    write_tensors(path, tensors, {"facts": facts.model_dump_json()})


def _answer_settings(cell: CellRecord, row: Row) -> dict[str, Any]:
    """Return the settings, including defaults, that identify the answers of a run and a row."""
    recipe = parse_classifier(row.classifier)
    classifier = {"classifier": [recipe.kind.name, cell.logit_scale, recipe.settings], "drift": row.drift}
    return as_json({"run": cell.settings, "text_embeds": cell.text_embeds} | classifier)


def read_answers(folder: Path, row: Row, cell: CellRecord) -> tuple[list[Answers], AnswersFacts]:
    """Return the answers of a classifier after each task, and their metadata: class names, bytes and seconds."""
    path = answers_path(folder, row)
    try:
        tensors, metadata = read_tensors(path)
        facts = AnswersFacts.model_validate_json(metadata["facts"])
        steps = range(1, len(cell.class_names) + 1)
        answers = [Answers(*(tensors[f"{name} {step}"] for name in _TYPES)) for step in steps]
        if facts.settings != _answer_settings(cell, row):
            raise ValueError("it belongs to another run, classifier or version")
    except (ValueError, KeyError) as error:
        raise ValueError(f"{damage(path, error)}; remove the file, and the classifier is evaluated again") from error
    return answers, facts


def memory_bytes(memory: Memory | None) -> int:
    """Return the size in bytes of what a strategy keeps between tasks."""
    if isinstance(memory, OccupationStatistics):
        return memory.nbytes
    return sum(tensor.nbytes for tensor in (memory or {}).values())
