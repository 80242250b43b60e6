"""The contents of `results.json`: what a stream measured, and the measures of continual learning."""

from collections.abc import Mapping
from typing import Self

from pydantic import field_serializer
from pydantic_core import to_json

from dulbe_peft.metrics.accuracy import BESIDE_CLASSIFIERS
from dulbe_peft.training.state import Estimates
from dulbe_peft.utils.records import Count, Fraction, Record


class _Part(Record, extra="allow"):
    """A part of the file, with its fields in the order of the file; those of another release are kept as they are."""


class Measures(_Part):
    """The measures of a classifier or a baseline; None stands for what was not measured."""

    average_accuracy: Fraction
    last_accuracy: Fraction | None
    forgetting: float | None = None
    backward_transfer: float | None = None
    overall: list[Fraction | None]
    matrix: list[list[Fraction | None]] = []


class ClassMeasures(_Part):
    """The accuracy of each class after the last task, and its loss since its best accuracy."""

    accuracy: dict[str, Fraction]
    forgetting: dict[str, float] = {}


class TaskFacts(_Part):
    """Details of how a task was trained, as in `TaskRecord`."""

    images: dict[str, int] = {}
    learning_rate: float | None = None
    update_share: float | None = None
    loss: list[float] = []
    shared_capture: float | None = None
    residual_capture: float | None = None
    expected_depth: float | None = None


class StrategyPart(_Part):
    """The strategy and its settings."""

    name: str


class Cost(Record):
    """Counts of test images of old classes: all, right after the training, lost by it, and gained by it."""

    images: Count
    right: Count
    lost: Count
    gained: Count

    @property
    def points(self) -> float:
        """Return the loss of accuracy in percentage points."""
        return 100 * (self.lost - self.gained) / self.images


class Kept(Record):
    """After how many tasks `ClassIncrementalLearner.keep` kept which share of the model's whole update."""

    after: Count
    share: Fraction


class Results(_Part):
    """The whole file."""

    configuration: dict[str, object]
    class_names: list[list[str]]
    seed: int | None = None
    strategy: StrategyPart
    tasks: list[TaskFacts | None]
    versions: dict[str, str]
    known_tasks: int = 0
    costs: list[dict[str, Cost]] = []  # for each task, what its training cost the old classes
    changed: list[Fraction | None] = []
    classifiers: dict[str, Measures] = {}
    head: Measures | None = None  # of the first bridge ensemble
    text: Measures | None = None
    class_means: Measures | None = None
    zero_shot: Measures | None = None
    classes: dict[str, ClassMeasures] = {}
    estimates: Estimates = Estimates()
    kept: list[Kept] = []

    @classmethod
    def of(cls, results: Self | Mapping[str, object]) -> Self:
        """Return results as a record; a dict is checked as if it were read from the file."""
        return results if isinstance(results, cls) else cls.model_validate_json(to_json(results))

    def contents(self) -> dict[str, object]:
        """Return the contents of the file."""
        return self.model_dump(mode="json", exclude_unset=True)

    @field_serializer("zero_shot")
    def _zero_shot(self, measures: Measures | None) -> dict[str, object] | None:
        names = ("overall", "average_accuracy", "last_accuracy")
        return None if measures is None else {name: getattr(measures, name) for name in names}

    @field_serializer("estimates")
    def _estimates(self, estimates: Estimates) -> dict[str, object]:
        return estimates.model_dump(mode="json")

    @property
    def trained(self) -> bool:
        """Whether any task trained the model itself."""
        return any(task and task.loss for task in self.tasks)

    @property
    def rows(self) -> list[tuple[str, Measures]]:
        """The rows (name, measures) of a table of results: those of `BESIDE_CLASSIFIERS`, then all classifiers."""
        beside = [(name, getattr(self, name)) for name in BESIDE_CLASSIFIERS]
        return [*((name, row) for name, row in beside if row is not None), *self.classifiers.items()]
