"""Records of a run's finished tasks, one entry per task, and the results that are computed from them.

An entry has accuracies, details of the training, time and source.

If the learner had learned tasks before the run, they come first. Whatever was not measured is left empty.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Generic, Self, TypeVar

import numpy as np
from pydantic import Field, model_validator

from dulbe_peft.checkpoints.layout import PROGRESS_FILE, TIMINGS_FILE
from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.classifiers.registry import CLASSIFIERS, answering
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.metrics.accuracy import percent, summarize
from dulbe_peft.metrics.evaluation import BASELINES, Evaluation
from dulbe_peft.metrics.results import ClassMeasures, Cost, Measures, Results, StrategyPart, TaskFacts
from dulbe_peft.training.state import Estimates, Update
from dulbe_peft.utils.folders import CheckpointError, parse_manifest
from dulbe_peft.utils.records import Count, Fraction, Record, read_record
from dulbe_peft.utils.terminal import counted

SOURCES_FILE = "sources.json"
LINE = 8  # number of tasks whose accuracy is printed in the line after a task
Details = dict[str, Any]
T = TypeVar("T")


class Score(Record):
    """The accuracy of a classifier after a task, overall and per task, and its correct predictions per class."""

    accuracy: Fraction
    by_task: list[Fraction | None]
    right_by_class: dict[str, Count]


class Row(Record):
    """What was measured after a task; `classifiers` is empty if nothing was tested."""

    classifiers: dict[str, Score] = {}
    baselines: dict[str, Score] = {}
    images_by_class: dict[str, Annotated[int, Field(ge=1)]] = {}
    costs: dict[str, Cost] = {}  # what training the task cost the old classes
    changed: Fraction | None = None  # see `Before.changed`; measured if old classes have few test images

    @model_validator(mode="after")
    def _classes_are_the_tested_ones(self) -> Self:
        for score in (*self.classifiers.values(), *self.baselines.values()):
            if not score.right_by_class.keys() <= self.images_by_class.keys():
                raise ValueError("right_by_class must have only classes that are in images_by_class")
        return self


class Timing(Record):
    """The time and memory that a task took, and when it was finished."""

    seconds: float
    cpu_seconds: float
    phases: dict[str, float]
    peak_memory: int | None
    finished: str


class FinishedTask(Record, frozen=False):
    """The record of a finished task; `timing` and `source` are stored in separate files, written after its folder."""

    class_names: list[str]
    row: Row = Field(default_factory=Row)
    zero_shot: Fraction | None = None
    details: Details | None = None
    timing: Timing | None = Field(default=None, exclude=True)
    source: Details | None = Field(default=None, exclude=True)


class Progress(Record):
    """`progress.json` of a task's folder: the tasks since the previous folder, so that no task is stored twice."""

    tasks: Annotated[list[FinishedTask], Field(min_length=1)]


class Entries(Record, Generic[T]):
    """A file with an entry for each task, which is null if unknown."""

    tasks: list[T | None]


Timings, Sources = Entries[Timing], Entries[Details]  # contents of `timings.json` and `sources.json`


def known_tasks(learner: ClassIncrementalLearner) -> list[FinishedTask]:
    """Return a record of each task of a learner, with measurements if the learner comes from a run.

    If classes were merged or forgotten since the run, the old measurements are dropped.
    """
    names, records = [list(task) for task in learner.tasks], list[FinishedTask]()
    if learner.folder is not None and learner.folder.is_dir():  # the folder may have been removed
        saved = parse_manifest(learner.folder).notes.get("tasks", [])
        renames = renamed_classes(learner.state.updates)
        before = [{*task, *(renames.get(name, name) for name in task)} for task in saved]
        if len(saved) <= len(names) and all(set(now) <= task for now, task in zip(names, before, strict=False)):
            records = read_finished(learner.folder, saved)
            if saved != names[: len(saved)]:  # the accuracies are of other classes, so only the sources remain valid
                records = [FinishedTask(class_names=now, source=task.source) for now, task in zip(names, records)]
    return [*records, *(FinishedTask(class_names=task) for task in names[len(records) :])]


def renamed_classes(updates: Sequence[Update]) -> dict[str, str]:
    """Return the present name of each class that was renamed, keyed by every name that it once had."""
    present: dict[str, str] = {}
    for update in updates:
        for old, new in update.renamed.items():
            present = {name: new if now == old else now for name, now in present.items()} | {old: new}
    return present


def read_finished(folder: Path, names: Sequence[Sequence[str]]) -> list[FinishedTask]:
    """Read the records of the tasks `names` from a task's folder, the folders before it, and the run's files.

    The records of a removed folder are left empty.
    """
    tasks = [FinishedTask(class_names=list(task)) for task in names]
    left, here = len(names), folder
    while left:
        try:
            records = read_record(here / PROGRESS_FILE, Progress).tasks
        except (FileNotFoundError, ValueError) as error:
            if here == folder and isinstance(error, ValueError):
                raise CheckpointError(str(error)) from error
            break
        start = left - len(records)
        if start < 0 or [task.class_names for task in records] != [task.class_names for task in tasks[start:left]]:
            return [FinishedTask(class_names=list(task)) for task in names]
        tasks[start:left] = records
        left, here = start, folder.with_name(f"task-{start:03d}")
    for name, file, kind in (("timing", TIMINGS_FILE, Timings), ("source", SOURCES_FILE, Sources)):
        with suppress(OSError, ValueError):
            entries: Any = read_record(folder.parent / file, kind)
            for task, entry in zip(tasks, entries.tasks, strict=False):
                setattr(task, name, entry)
    return tasks


def measured_row(tests: Sequence[Evaluation | None]) -> Row:
    """Return the row after a task. `tests` has the predictions for each task's test images; None means untested."""
    tested = [test for test in tests if test is not None]
    if not tested:
        return Row()
    sizes = np.array([len(test.truth) for test in tested])
    truth = np.concatenate([test.truth.numpy() for test in tested])
    labels, place, counts = np.unique(truth, return_inverse=True, return_counts=True)
    names = [tested[-1].class_names[label] for label in labels]

    def score(kind: str, name: str) -> Score:
        right = np.concatenate([getattr(test, kind)[name].numpy() for test in tested]) == truth
        shares = iter((np.add.reduceat(right, np.cumsum(sizes) - sizes, dtype=np.int64) / sizes).tolist())
        by_class = np.bincount(place[right], minlength=len(names)).tolist()
        return Score(
            accuracy=float(right.mean()),
            by_task=[None if test is None else next(shares) for test in tests],
            right_by_class=dict(zip(names, by_class, strict=True)),
        )

    kinds = ("classifiers", "baselines")
    scores: dict[str, Any] = {kind: {name: score(kind, name) for name in getattr(tested[0], kind)} for kind in kinds}
    return Row(**scores, images_by_class=dict(zip(names, counts.tolist(), strict=True)))


def progress_line(row: Row, number: int, total: int, classes: int) -> str:
    """Return the line printed after task `number` of `total`; accuracies by task are those of the first classifier."""
    text = f"task {number}/{total}: {counted(classes, 'class')}"
    if not row.classifiers:
        return text
    by_task = row.classifiers[answering(row.classifiers)].by_task
    tested = [str(task) for task, value in enumerate(by_task, 1) if value is not None]
    if len(tested) < len(by_task):
        text += f", tested on the images of task{'s' * (len(tested) > 1)} {', '.join(tested)} only"
    shown = {name: score for name, score in row.baselines.items() if name == "text"} | row.classifiers
    text += "".join(f", {name} {percent(score.accuracy, 2)} %" for name, score in shown.items())
    more = "... " * (len(by_task) > LINE)
    return f"{text}, by task [{more}{' '.join(percent(value, 2) for value in by_task[-LINE:])}]"


# ---------------------------------------------------------------------- results


def stream_results(
    tasks: Sequence[FinishedTask],
    settings: Mapping[str, Any],
    classifiers: Sequence[str],
    versions: Mapping[str, str],
    estimates: Estimates,
    known: int = 0,
) -> Results:
    """Return the results of the finished tasks, of which `known` were learned before the run."""
    rows = [task.row for task in tasks]
    parts: dict[str, Any] = {"known_tasks": known} if known else {}
    if any(row.costs for row in rows):
        parts["costs"] = [row.costs for row in rows]
    if any(row.changed is not None for row in rows):
        parts["changed"] = [row.changed for row in rows]
    return Results(
        configuration={"adapter": settings["adapter"], "arguments": settings["arguments"]},
        class_names=[task.class_names for task in tasks],
        seed=settings["arguments"]["seed"],
        strategy=StrategyPart(**settings["strategy"]),
        tasks=[None if task.details is None else TaskFacts(**task.details) for task in tasks],
        versions=dict(versions),
        estimates=estimates,
        **parts,
        **_measured(tasks, rows, classifiers),
    )


def _measured(tasks: Sequence[FinishedTask], rows: Sequence[Row], classifiers: Sequence[str]) -> dict[str, Any]:
    """Return the parts of the results that the tests measured; empty without tests."""
    tested = [row for row in rows if row.classifiers]
    if not tested:
        return {}
    scores = {name: [row.classifiers.get(name) for row in rows] for name in classifiers}
    summaries = {name: _summary(by_row) for name, by_row in scores.items() if any(by_row)}
    parts: dict[str, object] = {"classifiers": summaries}
    heads = [name for name in summaries if issubclass(CLASSIFIERS.get(name, object), BridgeEnsembleHead)]
    if heads:
        parts["head"] = summaries[heads[0]]
    for name in BASELINES:
        if all(name in row.baselines for row in tested):
            parts[name] = _summary([row.baselines.get(name) for row in rows])
    zero_shot = [task.zero_shot for task in tasks]
    measured = [value for value in zero_shot if value is not None]
    if measured:
        average = sum(measured) / len(measured)
        parts["zero_shot"] = Measures(overall=zero_shot, average_accuracy=average, last_accuracy=zero_shot[-1])
    if all(name in rows[-1].classifiers for name in summaries):
        parts["classes"] = {name: _by_class(rows, name) for name in summaries}
    return parts


def _by_class(rows: Sequence[Row], classifier: str) -> ClassMeasures:
    """Return each class's accuracy after the last task, and its loss since its best accuracy before the last task."""
    *earlier, last = [
        {name: count / row.images_by_class[name] for name, count in row.classifiers[classifier].right_by_class.items()}
        if classifier in row.classifiers
        else {}
        for row in rows
    ]
    best = {name: max(row[name] for row in earlier if name in row) for row in earlier for name in row}
    lost = {name: best[name] - accuracy for name, accuracy in last.items() if name in best}
    return ClassMeasures(accuracy=last, forgetting=lost)


def _summary(scores: Sequence[Score | None]) -> Measures:
    """Return the measures of a classifier from its score in every row, which is None if it was not tested."""
    rows = [[None] * step if score is None else score.by_task for step, score in enumerate(scores, 1)]
    return Measures(**summarize(rows, [None if score is None else score.accuracy for score in scores]))
