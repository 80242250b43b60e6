"""The contents of `results.json`: what a stream measured, and the measures of continual learning."""

from collections.abc import Mapping, Sequence
from typing import Any

from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.classifiers.registry import CLASSIFIERS
from dulbe_peft.metrics.accuracy import summarize
from dulbe_peft.metrics.evaluation import BASELINES
from dulbe_peft.streams.progress import FinishedTask, Row, Score
from dulbe_peft.streams.training_cost import Cost
from dulbe_peft.training.state import Estimates
from dulbe_peft.utils.records import Fraction, Record


class _Part(Record, extra="allow"):
    """A part of the file; fields that another release wrote are kept as they are."""


class Measures(_Part):
    """The measures of a classifier or a baseline; None stands for what was not measured."""

    overall: list[Fraction | None]
    last_accuracy: Fraction | None
    average_accuracy: Fraction
    forgetting: float | None = None
    backward_transfer: float | None = None
    matrix: list[list[Fraction | None]] = []


class ClassMeasures(_Part):
    """The accuracy of each class after the last task, and its loss since its best accuracy."""

    accuracy: dict[str, Fraction]
    forgetting: dict[str, float] = {}


class TaskFacts(_Part):
    """Details of how a task was trained."""

    images: dict[str, int] = {}
    loss: list[float] = []
    shared_capture: float | None = None
    residual_capture: float | None = None
    expected_depth: float | None = None


class StrategyPart(_Part):
    """The strategy and its settings."""

    name: str


class Results(_Part):
    """The whole file."""

    class_names: list[list[str]]
    configuration: dict[str, Any]
    strategy: StrategyPart
    versions: dict[str, str]
    tasks: list[TaskFacts | None]
    known_tasks: int = 0
    classifiers: dict[str, Measures] = {}
    zero_shot: Measures | None = None
    text: Measures | None = None
    class_means: Measures | None = None
    classes: dict[str, ClassMeasures] = {}
    estimates: Estimates = Estimates()
    costs: list[dict[str, Cost]] = []  # for each task, what its training cost the old classes
    changed: list[Fraction | None] = []


def stream_results(
    tasks: Sequence[FinishedTask],
    settings: Mapping[str, Any],
    classifiers: Sequence[str],
    versions: Mapping[str, str],
    known: int = 0,
) -> dict[str, Any]:
    """Return the contents of `results.json` for the finished tasks, of which `known` were learned before the run."""
    results: dict[str, Any] = {
        "configuration": {"adapter": settings["adapter"], "arguments": settings["arguments"]},
        "class_names": [task.class_names for task in tasks],
        "seed": settings["arguments"]["seed"],
        "strategy": settings["strategy"],
        "tasks": [task.details for task in tasks],
        "versions": dict(versions),
    }
    if known:
        results["known_tasks"] = known
    rows = [task.row for task in tasks]
    if any(row.costs for row in rows):
        results["costs"] = [{name: cost.model_dump() for name, cost in row.costs.items()} for row in rows]
    if any(row.changed is not None for row in rows):
        results["changed"] = [row.changed for row in rows]
    tested = [row for row in rows if row.classifiers]
    if not tested:
        return results
    scores = {name: [row.classifiers.get(name) for row in rows] for name in classifiers}
    results["classifiers"] = {name: _summary(by_row) for name, by_row in scores.items() if any(by_row)}
    heads = [name for name in results["classifiers"] if issubclass(CLASSIFIERS.get(name, object), BridgeEnsembleHead)]
    if heads:
        results["head"] = results["classifiers"][heads[0]]
    for name in BASELINES:
        if all(name in row.baselines for row in tested):
            results[name] = _summary([row.baselines.get(name) for row in rows])
    zero_shot = [task.zero_shot for task in tasks]
    measured = [value for value in zero_shot if value is not None]
    if measured:
        average = sum(measured) / len(measured)
        results["zero_shot"] = {"overall": zero_shot, "average_accuracy": average, "last_accuracy": zero_shot[-1]}
    if all(name in rows[-1].classifiers for name in results["classifiers"]):
        results["classes"] = {name: _by_class(rows, name) for name in results["classifiers"]}
    return results


def _by_class(rows: Sequence[Row], classifier: str) -> dict[str, dict[str, float]]:
    """Return each class's accuracy after the last task, and its loss since its best accuracy before the last task."""
    *earlier, last = [
        {name: count / row.images_by_class[name] for name, count in row.classifiers[classifier].right_by_class.items()}
        if classifier in row.classifiers
        else {}
        for row in rows
    ]
    best = {name: max(row[name] for row in earlier if name in row) for row in earlier for name in row}
    return {"accuracy": last, "forgetting": {name: best[name] - last[name] for name in last if name in best}}


def _summary(scores: Sequence[Score | None]) -> dict[str, Any]:
    """Return the measures of a classifier from its score in every row, which is None if it was not tested."""
    rows = [[None] * step if score is None else score.by_task for step, score in enumerate(scores, 1)]
    return summarize(rows, [None if score is None else score.accuracy for score in scores])
