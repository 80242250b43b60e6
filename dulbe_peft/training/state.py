"""What a learner is between two tasks: everything that is saved, and nothing else."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from peft import PeftModel, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn

from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.adapter.model import DualModeLoraModel
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.registry import answering
from dulbe_peft.data.images import LabelledImages, named_images
from dulbe_peft.data.known import KnownImages
from dulbe_peft.strategies.base import Memory, Strategy
from dulbe_peft.utils.records import Fraction, Record


@dataclass(frozen=True)
class Estimate:
    """The share of images that a classifier names right, each class alike, with its 95 % interval.

    It is of training images that were left out, and of `classes`, which may be fewer than the learner knows.
    """

    share: float
    low: float
    high: float
    classes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{100 * self.share:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"


class Estimates(Record):
    """The estimates of all classifiers, after so many tasks and updates, from so many images of these classes."""

    tasks: int = 0
    updates: int = 0
    images: int = 0
    classes: tuple[str, ...] = ()
    shares: dict[str, tuple[Fraction, Fraction, Fraction]] = {}


class Update(Record):
    """What a learner took in or lost without training, after so many tasks."""

    after: int
    images: dict[str, int] = {}  # class -> number of its further images, below 0 of those that went
    forgotten: int | None = None  # the number of the task that lost a class
    renamed: dict[str, str] = {}  # old name -> new one


@dataclass
class LearnerState:
    """A learner's state. A finished task replaces it as a whole.

    Attributes:
        model: the adapted model from `get_peft_model`, or the pristine model where nothing is trained.
        classifiers: name -> classifier; the first one is what `predict` uses.
        memory: what the strategy keeps of the finished tasks.
        tasks: the class names of every finished task, in order.
        step: how many training steps were made.
        source: `repo_id` and `commit` on the Hub that the learner was loaded from, or None.
        incomplete: the learner was saved without what its strategy needs to learn a further task.
        updates: what it took in or lost without training.
        class_texts: class -> the texts that stand for it in place of the prompt templates.
        graph: SHA-256 of the int8 graph that encodes its images, or None.
        known: which images it has learned and was tested on, by content.
        estimates: how many images it names right, see `ClassIncrementalLearner.estimate`; of no task where that is
            not known, as after an update.
    """

    model: nn.Module
    processor: Any
    args: LearnerArguments
    strategy: Strategy
    classifiers: dict[str, Classifier]
    memory: Memory | None = None
    tasks: list[tuple[str, ...]] = field(default_factory=list)
    step: int = 0
    source: dict[str, str] | None = None
    incomplete: bool = False
    updates: list[Update] = field(default_factory=list)
    class_texts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    graph: str | None = None
    known: KnownImages = field(default_factory=KnownImages)
    estimates: Estimates = field(default_factory=Estimates)

    @property
    def classifier(self) -> Classifier:
        """The classifier that answers."""
        return self.classifiers[answering(self.classifiers)]

    @property
    def class_names(self) -> tuple[str, ...]:
        """All seen classes, in the order they came."""
        return tuple(name for task in self.tasks for name in task)

    def image_counts(self) -> dict[str, int]:
        """Class -> how many of its images were learned, as a classifier counts them; empty where none does."""
        counts = next((c.counts.tolist() for c in self.classifiers.values() if "counts" in c.tensors()), [])
        return dict(zip(self.class_names, counts, strict=False))

    def places(self, names: Sequence[str]) -> list[int]:
        """Where each of some names stands among the seen classes; a `ValueError` names those that have no place."""
        place = {name: index for index, name in enumerate(self.class_names)}
        unknown = sorted({name for name in names if name not in place})
        if unknown:
            raise ValueError(
                f"{len(unknown)} classes have not been learned, the first are {unknown[:5]}; "
                f"seen are {list(place)[:5]} ..."
            )
        return [place[name] for name in names]

    def known_images(self, dataset: Any, class_names: Sequence[str] | None = None) -> LabelledImages:
        """A data set of seen classes, by `class_names` or its own, whose labels are their places among all of them."""
        images = named_images(dataset, class_names, default=self.class_names)
        places = self.places([images.class_names[label] for label in images.labels])
        return images.at(slice(None), np.array(places), self.class_names)

    @property
    def adapter(self) -> DualModeLoraModel | None:
        """The tuner, where the model has one."""
        return cast(DualModeLoraModel, self.model.base_model) if isinstance(self.model, PeftModel) else None

    @property
    def trained(self) -> bool:
        """Whether the model was trained on what the classifiers learned: left out, it is no stranger."""
        return self.strategy.adapts or self.adapter is not None

    def resting(self) -> AbstractContextManager[None]:
        """A block without the modes of an adapter that adds nothing now: the same outputs at a lower cost."""
        return nullcontext() if self.adapter is None else self.adapter.without_idle_modes()

    @property
    def config(self) -> DualModeLoraConfig | None:
        """The adapter's configuration, where the model has one."""
        return None if self.adapter is None else self.adapter.active_config

    @property
    def base(self) -> Any:
        """The model under the adapter."""
        return self.model.get_base_model() if isinstance(self.model, PeftModel) else self.model

    @property
    def base_name(self) -> tuple[str | None, str | None]:
        """Name or folder of the base model, and its revision on the Hub."""
        if self.config is not None:
            return self.config.base_model_name_or_path, self.config.revision
        config = getattr(self.model, "config", None)
        return getattr(config, "_name_or_path", "") or None, getattr(config, "_commit_hash", None)

    def adapter_tensors(self) -> dict[str, torch.Tensor]:
        """What PEFT saves of the adapter, as it is; nothing where the model has none."""
        return {} if self.adapter is None else get_peft_model_state_dict(self.model, save_embedding_layers=False)

    @contextmanager
    def adapter_kept(self) -> Iterator[None]:
        """A block after which, where it raises, the adapter's weights are what they were before."""
        restore = self._copied_adapter()
        try:
            yield
        except BaseException:
            restore()
            raise

    @contextmanager
    def adapter_restored(self) -> Iterator[None]:
        """A block after which the adapter's weights are what they were before."""
        restore = self._copied_adapter()
        try:
            yield
        finally:
            restore()

    def _copied_adapter(self) -> Callable[[], None]:
        """Copy the adapter's weights; the call puts the copy back."""
        before = {name: tensor.clone() for name, tensor in self.adapter_tensors().items()}

        def restore() -> None:
            if before:
                set_adapter_state(self.model, before)
                self.model.zero_grad(set_to_none=True)
                self.model.eval()

        return restore

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device


def set_adapter_state(model: Any, state: dict[str, torch.Tensor]) -> None:
    """Put saved tensors into the active adapter, whose history takes their length."""
    set_peft_model_state_dict(model, state)
    model.note_history()
