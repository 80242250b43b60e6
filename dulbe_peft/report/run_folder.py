"""What a run's folder holds, finished or not, in the form that a report needs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from dulbe_peft.checkpoints.layout import LEARNER_FILE, RESULTS_FILE, TIMINGS_FILE, newest_task
from dulbe_peft.checkpoints.learner_file import LearnerFile, Update
from dulbe_peft.metrics.evaluation import PREDICTIONS_FILE, ImageResult, read_predictions
from dulbe_peft.runs.progress import read_progress
from dulbe_peft.runs.results import stream_results
from dulbe_peft.utils.folders import CheckpointError
from dulbe_peft.utils.records import Fraction, Record, read_record

PICTURES_FOLDER = "pictures"
PICTURES_INDEX = "index.json"


class _PartRecord(Record):
    """The part of a file that a report needs; what else is in it is kept as it is."""

    model_config = ConfigDict(extra="allow")


class _Method(_PartRecord):
    """What a classifier, or a baseline, came to."""

    overall: list[Fraction | None]
    last_accuracy: Fraction | None
    average_accuracy: Fraction
    forgetting: float | None = None
    backward_transfer: float | None = None


class _Classifier(_Method):
    matrix: list[list[Fraction | None]]


class _ClassMeasures(_PartRecord):
    accuracy: dict[str, Fraction]
    forgetting: dict[str, float] = {}


class _TaskFacts(_PartRecord):
    """What learning a task showed."""

    images: dict[str, int] = {}
    loss: list[float] = []
    shared_capture: float | None = None
    residual_capture: float | None = None
    expected_depth: float | None = None


class _Results(_PartRecord):
    """`results.json`."""

    class_names: list[list[str]]
    configuration: dict[str, Any]
    strategy: dict[str, Any]
    versions: dict[str, str]
    tasks: list[_TaskFacts | None]
    classifiers: dict[str, _Classifier] = {}
    zero_shot: _Method | None = None
    text: _Method | None = None
    class_means: _Method | None = None
    classes: dict[str, _ClassMeasures] = {}


class _TaskTime(_PartRecord):
    seconds: float
    phases: dict[str, float] = {}
    peak_memory: int | None = None


class _Timings(_PartRecord):
    """`timings.json`."""

    tasks: list[_TaskTime | None]


class Example(Record):
    """A picture of a test image, and what it shows."""

    # A name without a folder: the index leads to no picture elsewhere.
    file: Annotated[str, Field(pattern=r"^[\w-]+\.jpg$")]
    image: str
    true: str = Field(alias="class")
    predicted: str
    probability: Fraction


class Examples(Record):
    """`pictures/index.json`: the most confident mistakes, and the least confident hits."""

    mistakes: list[Example] = []
    hits: list[Example] = []


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it: everything is of the finished tasks; what is not known is None or empty."""

    folder: Path
    name: str
    results: dict[str, Any]
    learned: list[list[str]]
    settings: dict[str, Any]
    predictions: list[ImageResult]
    timings: list[dict[str, Any] | None]
    examples: Examples
    finished: bool = True
    fingerprints: dict[str, Any] | None = None
    base_model: str | None = None
    updates: list[Update] = field(default_factory=list)

    @property
    def tested(self) -> bool:
        """Whether the stream had test data."""
        return bool(self.results.get("classifiers"))

    @property
    def first(self) -> str:
        """The classifier that `predict` uses."""
        return next(iter(self.results["classifiers"]))

    @property
    def strategy(self) -> str:
        """What was trained."""
        return str(self.settings["strategy"]["name"])

    @property
    def records(self) -> list[dict[str, Any]]:
        """What learning each finished task showed; empty where that was not recorded."""
        found = self.results["tasks"]
        return [found[t] if t < len(found) and found[t] else {} for t in range(len(self.learned))]


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read what `run` wrote into a folder, finished or not."""
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder; a report is made of a folder that run has written")
    results, task = _read(path / RESULTS_FILE, _Results), newest_task(path, lambda _: None)
    if task is None:  # somebody kept the small files alone
        if results is None:
            raise ValueError(f"{path} holds neither {RESULTS_FILE} nor a finished task's folder: nothing to report")
        settings = {"strategy": results["strategy"], **results["configuration"]}
        return _run(path, path, results, settings)
    newest, manifest = task
    learner, identity = read_record(newest / LEARNER_FILE, LearnerFile), manifest.notes["identity"]
    finished = results is not None and results["class_names"] == manifest.notes["tasks"]
    if results is None or not finished:
        try:
            found = stream_results(read_progress(newest), identity, learner.classifiers, manifest.versions)
            results = _Results.model_validate(found).model_dump(exclude_unset=True)
        except (ValueError, KeyError, CheckpointError) as error:
            raise ValueError(f"{newest} is not as a run writes it: {error}") from error
    settings = {name: identity[name] for name in ("strategy", "adapter", "arguments", "classifiers")}
    run = _run(path, newest, results, settings, learner.classifiers)
    return replace(
        run,
        finished=finished,
        fingerprints={name: identity[name] for name in ("base_model", "data")},
        base_model=learner.base_model.name,
        updates=learner.updates,
    )


def _run(path: Path, kept: Path, results: dict[str, Any], settings: dict[str, Any], order: Sequence[str] = ()) -> Run:
    """The run as its files tell it; `kept` has the predictions, `order` is that of the learner's classifiers."""
    learned = results["class_names"]
    blocks = results.get("classifiers", {})
    if blocks:  # JSON sorts them; the learner's own order is the one that counts
        names = [name for name in order if name in blocks]
        results = {**results, "classifiers": {name: blocks[name] for name in (*names, *blocks)}}
    timings = (_read(path / TIMINGS_FILE, _Timings) or {"tasks": []})["tasks"]
    return Run(
        folder=path,
        name=path.resolve().name,
        results=results,
        learned=learned,
        settings=settings,
        predictions=read_predictions(kept / PREDICTIONS_FILE) if (kept / PREDICTIONS_FILE).is_file() else [],
        timings=[timings[t] if t < len(timings) else None for t in range(len(learned))],
        examples=_examples(path / PICTURES_FOLDER),
    )


def _read(path: Path, kind: type[Record]) -> dict[str, Any] | None:
    """A file's content, checked; None where there is no such file."""
    return read_record(path, kind).model_dump(exclude_unset=True) if path.is_file() else None


def _examples(folder: Path) -> Examples:
    """The pictures of a finished run, but for those whose files are gone or links."""
    path = folder / PICTURES_INDEX
    found = read_record(path, Examples) if path.is_file() else Examples()

    def there(example: Example) -> bool:  # a link could lead to any picture of whoever makes the page
        return (folder / example.file).is_file() and not (folder / example.file).is_symlink()

    return Examples(mistakes=list(filter(there, found.mistakes)), hits=list(filter(there, found.hits)))
