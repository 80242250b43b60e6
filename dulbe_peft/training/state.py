"""The state of a learner between two tasks, which is exactly what is saved."""

from collections.abc import Iterator, Sequence
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
from dulbe_peft.encoders import loading
from dulbe_peft.encoders.encoding import Encoding, encoding_of
from dulbe_peft.encoders.pixels import jpeg_side
from dulbe_peft.strategies.base import Memory, Strategy
from dulbe_peft.utils.records import Fraction, Record
from dulbe_peft.utils.tensors import identity


@dataclass(frozen=True)
class Estimate:
    """Estimated accuracy of a classifier, with equal weight for each class, and its 95 % interval.

    It comes from training images that were held out, of `classes`, which may be fewer than the learner knows.
    """

    share: float
    low: float
    high: float
    classes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{100 * self.share:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"


LISTED = 10  # class names in a sentence


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(repr(name) for name in names[:LISTED]) + more


FEW_ITEMS = "too few items to say how many labels are wrong"
AGREEMENT = "accuracies and estimates with these labels are the agreement with the labels: the accuracy can be higher"
CORRECTED = (
    "the estimate is corrected as if {:.1f} % of the labels were of random classes, and fewer answers agree with the "
    "labels; if the wrong labels are those of similar classes, the accuracy can be higher"
)
LEAST_WRONG = 0.01  # fewer wrong labels are not told from a few unusual images: flowers with right labels have 0.001
WIDE = 0.05  # if no label is surely wrong, but more than this share can be, only the largest share is told


def about_labels(wrong: tuple[float, float, float], items: bool = False, corrected: float | None = None) -> list[str]:
    """Return sentences on the share of wrong labels, of images or items, with the ends of its interval, from 0 to 1.

    `corrected` is the share of labels of random classes for which estimates are corrected, if they are.
    """
    share, low, high = wrong
    what, unit = ("items' labels", "item") if items else ("labels", "image")
    if share == 0 and high > WIDE:
        return [f"at most {100 * high:.1f} % of the {what} are wrong: there are too few {unit}s to say more"]
    lines = [f"about {100 * share:.1f} % of the {what} look wrong ({100 * low:.1f} to {100 * high:.1f} %)"]
    return lines + [AGREEMENT if corrected is None else CORRECTED.format(100 * corrected)] * (share > 0)


def about_names(misnamed: Sequence[str], exchanged: Sequence[Sequence[str]] = ()) -> list[str]:
    """Return sentences on names that do not describe their images, and on pairs that describe each other's."""
    pairs = [
        f"{one!r} and {other!r} look exchanged: are the images of each in the folder of the other? 'bayes' uses "
        "neither name, and all answers and estimates take the folders as they are"
        for one, other in exchanged
    ]
    named = {name for pair in exchanged for name in pair}
    if rest := [name for name in misnamed if name not in named]:
        pairs.append(
            f"these names do not describe their images, and 'bayes' does not use them: {_listed(rest)}; rename them, "
            "or check the labels"
        )
    return pairs


class Estimates(Record):
    """Estimates of all classifiers, and when and from what they were made."""

    tasks: int = 0  # tasks that the learner had finished
    updates: int = 0  # updates that the learner had made
    images: int = 0  # number of held-out images
    items: int = 0  # number of the items that they show, or 0 if no groups were given
    few_items: bool = False  # whether these items are too few to tell wrong labels
    classes: tuple[str, ...] = ()
    shares: dict[str, tuple[Fraction, Fraction, Fraction]] = {}  # classifier -> accuracy and its 95 % interval
    # The shares of wrong labels with their intervals: of those of any class, if above 0, for which `shares` are
    # corrected, and of those of similar classes, see `classifiers.confusion`, of items if there are groups.
    wrong: tuple[Fraction, Fraction, Fraction] | None = None
    doubted: tuple[Fraction, Fraction, Fraction] | None = None
    alike: bool = False  # whether many images look like one another, and no groups were given
    misnamed: tuple[str, ...] = ()  # classes whose name does not describe their images
    exchanged: tuple[tuple[str, str], ...] = ()  # pairs of them whose names describe each other's images

    def remarks(self, known: int) -> tuple[str, ...]:
        """Return sentences on what the estimates mean, if `known` classes have been learned."""
        found = []
        if self.shares and len(self.classes) < known:
            found.append(f"the estimate speaks for {len(self.classes)} of {known} classes: {_listed(self.classes)}")
        told = max((each for each in (self.wrong, self.doubted) if each is not None), default=None)
        if told is not None and (told[0] >= LEAST_WRONG or self.items):
            found += about_labels(told, bool(self.items), None if self.wrong is None else self.wrong[0])
        if self.few_items:
            found.append(FEW_ITEMS)
        if self.alike:
            found.append(
                "many photographs look like one another; if they show the same items, give their groups (--group): "
                "the estimate, and the accuracy on held-out ones, may be much too high"
            )
        found += about_names(self.misnamed, self.exchanged)
        return tuple(found)

    @property
    def doubt(self) -> str:
        """A sentence that says why answers on further images can be worse than on those learned, or ""."""
        return (
            "many of the learned photographs look like one another; if they show the same items, probabilities of "
            "further items are too high, and predict --reject refuses more of them: learn with --group"
            if self.alike
            else ""
        )


class Update(Record):
    """A change of the learner without training."""

    after: int  # number of finished tasks at that time
    images: dict[str, int] = {}  # class -> number of added images, negative for removed ones
    forgotten: int | None = None  # the task, from 1, that lost a class
    renamed: dict[str, str] = {}  # old name -> new name
    kept: Fraction | None = None  # the share of the model's whole update that was kept


@dataclass
class LearnerState:
    """A learner's state. A finished task replaces it by a new one.

    Attributes:
        model: The adapted model from `get_peft_model`, or the plain model if nothing is trained.
        processor: The model's processor.
        args: The learner's settings.
        strategy: The strategy that trains a task.
        classifiers: Name -> classifier. `predict` uses the first one.
        adapter_name: The name of the adapter that the strategy trains. It must be the active one.
        memory: What the strategy remembers of the finished tasks.
        tasks: The class names of every finished task, in order.
        step: Number of training steps so far.
        source: `repo_id` and `commit` on the Hub that the learner was loaded from, or None.
        incomplete: Whether the learner was saved without the memory that its strategy needs to learn a further task.
        updates: Changes without training.
        class_texts: Class -> texts that replace the prompt templates for this class.
        graph: SHA-256 of the int8 graph that encodes its images, or None.
        known: The images that it has learned and was tested on, by content.
        estimates: Estimated accuracies, see `ClassIncrementalLearner.estimate`. Their `tasks` is 0 if there are none,
            for example after an update.
        planned: Number of tasks of the stream that `run` is learning; None outside `run`. It is not saved.
    """

    model: nn.Module
    processor: Any
    args: LearnerArguments
    strategy: Strategy
    classifiers: dict[str, Classifier]
    adapter_name: str = "default"
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
    planned: int | None = None
    # The encoding, after a key of all that it depends on, and the tensors of the memory, whose ids stay unique.
    _encoding: tuple[object, tuple[torch.Tensor, ...], Encoding | None] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def __getstate__(self) -> dict[str, object]:
        """Leave out the cached encoding, which is made again."""
        return {**vars(self), "_encoding": None}

    @property
    def jpeg_side(self) -> int:
        """How many pixels each side of a JPEG file needs when it is decoded, or 0 if it is decoded whole."""
        return jpeg_side(self.processor, self.base, self.args.whole_images)

    @property
    def classifier(self) -> Classifier:
        """The classifier that `predict` uses."""
        return self.classifiers[answering(self.classifiers)]

    @property
    def class_names(self) -> tuple[str, ...]:
        """All seen classes, in the order in which they were learned."""
        return tuple(name for task in self.tasks for name in task)

    def image_counts(self) -> dict[str, int]:
        """Return class -> number of its learned images, or nothing if no classifier counts images."""
        every = [classifier.state for classifier in self.classifiers.values()]
        counts = next((state.counts.tolist() for state in every if "counts" in state), [])
        return dict(zip(self.class_names, counts, strict=False))

    def places(self, names: Sequence[str]) -> list[int]:
        """Return the index of each name among the seen classes, or raise a `ValueError` that lists unknown names."""
        index_of = {name: index for index, name in enumerate(self.class_names)}
        unknown = sorted({name for name in names if name not in index_of})
        if unknown:
            raise ValueError(
                f"{len(unknown)} classes have not been learned, such as {unknown[:5]}; "
                f"the learned classes are {list(index_of)[:5]} ..."
            )
        return [index_of[name] for name in names]

    def known_images(self, dataset: object, class_names: Sequence[str] | None = None) -> LabelledImages:
        """Return a data set of seen classes with labels that index all seen classes.

        `class_names` names the data set's labels; None uses its own names.
        """
        images = named_images(dataset, class_names, default=self.class_names)
        places = self.places([images.class_names[label] for label in images.labels])
        return images.at(slice(None), np.array(places), self.class_names)

    @property
    def adapter(self) -> DualModeLoraModel | None:
        """The tuner of the model, or None if it has no adapter."""
        return cast(DualModeLoraModel, self.model.base_model) if isinstance(self.model, PeftModel) else None

    @property
    def trained(self) -> bool:
        """Whether the model was trained on the learned images, so that none of them is truly held out."""
        return self.strategy.adapts or self.adapter is not None

    @property
    def encoding(self) -> Encoding | None:
        """How images and texts are encoded; None: as the model does."""
        memory = tuple((self.memory or {}).values())
        key = self.strategy, self.args.features, tuple(self.memory or {}), identity(memory)
        if self._encoding is None or self._encoding[0] != key:  # its digest takes as long as reading all tensors
            by, asked = self.strategy.encoding(self.memory), encoding_of(self.args)
            if by is not None and asked is not None:
                raise ValueError(
                    f"features is {self.args.features!r}, but the strategy {self.strategy.name!r} defines the "
                    "features: leave features out"
                )
            self._encoding = key, memory, by or asked
        return self._encoding[2]

    @property
    def embed_dim(self) -> int:
        """Width of the features that the classifiers learn."""
        encoding = self.encoding
        return loading.embed_dim(self.base) if encoding is None else encoding.width(self.base)

    @property
    def text_dim(self) -> int:
        """Width of the text embeddings, if they are compared with projected features; 0 if with the features."""
        projection = None if self.encoding is None else self.encoding.projection(self.base)
        return 0 if projection is None else len(projection)

    @property
    def has_names(self) -> bool:
        """Whether class names have embeddings that can be compared with the image features or their projection."""
        encoding = self.encoding
        return loading.has_text(self.base) and (encoding is None or encoding.names)

    def check_plain(self, what: str) -> None:
        """Raise a `ValueError` that begins with `what` if the strategy changes how each image is encoded."""
        if self.encoding is not None:
            asked = encoding_of(self.args) is not None
            by = f"features={self.args.features!r}" if asked else f"the strategy {self.strategy.name!r}"
            raise ValueError(
                f"{what}: {by} changes how each image is encoded, which the weights of a model cannot hold"
            )

    @property
    def doubt(self) -> str:
        """A sentence that says why the probabilities of `classifier` can be far off, or ""."""
        return self.doubt_of(self.classifier)

    def doubt_of(self, classifier: Classifier) -> str:
        """Return a sentence that says why the probabilities of a classifier can be far off, or ""."""
        if classifier.doubt or not self.trained:
            return classifier.doubt
        return (
            "the images that calibrate the probabilities also trained the model, so the probabilities can be too "
            "high: compare them with the accuracy on test images"
        )

    def resting(self) -> AbstractContextManager[None]:
        """Return a context that skips adapter modes that are zero: the same outputs at a lower cost."""
        return nullcontext() if self.adapter is None else self.adapter.skip_zero_modes()

    @property
    def config(self) -> DualModeLoraConfig | None:
        """The adapter's configuration, or None if the model has no adapter."""
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
        """Return the adapter tensors that PEFT saves, without copying them; none if the model has no adapter."""
        if self.adapter is None:
            return {}
        return get_peft_model_state_dict(self.model, adapter_name=self.adapter_name, save_embedding_layers=False)

    def set_adapter_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load what `adapter_tensors` returns into the adapter."""
        set_peft_model_state_dict(self.model, tensors, adapter_name=self.adapter_name)

    @contextmanager
    def adapter_kept(self) -> Iterator[None]:
        """Restore the adapter's weights if the block raises."""
        before = {name: tensor.clone() for name, tensor in self.adapter_tensors().items()}
        try:
            yield
        except BaseException:
            if before:
                self.set_adapter_tensors(before)
                self.model.zero_grad(set_to_none=True)
                self.model.eval()
            raise

    @property
    def device(self) -> torch.device:
        """The device of the model."""
        return next(self.model.parameters()).device
