"""The interface through which streams use a learner, so that they need not import `ClassIncrementalLearner`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.closing import ClosingPass
from dulbe_peft.data.store import FeatureStore
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.metrics.evaluation import Evaluation
from dulbe_peft.training.state import Estimate, LearnerState
from dulbe_peft.training.trainer import Log, TaskRecord


class StreamLearner(Protocol):
    """What a stream uses of a learner; the members are documented in `ClassIncrementalLearner`."""

    state: LearnerState
    encoder: Encoder
    device: torch.device
    precision_chosen: bool
    record: TaskRecord | None
    closing: ClosingPass | None
    folder: Path | None
    log: Log | None

    @property
    def args(self) -> LearnerArguments: ...

    @property
    def classifiers(self) -> dict[str, Classifier]: ...

    @property
    def tasks(self) -> list[tuple[str, ...]]: ...

    @property
    def class_names(self) -> tuple[str, ...]: ...

    def learn_task(self, dataset: Any, class_names: Sequence[str] | None = None) -> None: ...

    def evaluations(self, tests: Sequence[tuple[Any, Sequence[str] | None]]) -> list[Evaluation]: ...

    def estimate(self) -> dict[str, Estimate]: ...

    def zero_shot(self, tests: Sequence[tuple[Any, Sequence[str]]]) -> list[float | None]: ...

    def text_embeds(self, class_names: Sequence[str]) -> torch.Tensor: ...

    def change_settings(self, args: LearnerArguments) -> None: ...

    def use_state(self, state: LearnerState) -> None: ...

    def use_store(self, store: FeatureStore | None) -> None: ...

    def transaction(self) -> AbstractContextManager[None]: ...
