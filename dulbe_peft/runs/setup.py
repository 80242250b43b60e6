"""A run before it begins: its data, its tasks, and the model with its adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dulbe_peft.data.names import normalized
from dulbe_peft.runs.settings import StreamArguments, read_yaml, validated
from dulbe_peft.runs.sources import open_source, print_once, source_of
from dulbe_peft.utils.terminal import printable

if TYPE_CHECKING:  # torch is imported when a run is set up
    from peft import PeftModel
    from transformers import PreTrainedModel

    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.data.inventory import Look
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.strategies import Strategy
    from dulbe_peft.streams.tasks import Task


@dataclass(frozen=True)
class Setup:
    """A run before it begins: its data, and the model, with its adapter where something is trained."""

    stream: StreamArguments
    strategy: Strategy
    model: PreTrainedModel | PeftModel
    tasks: list[Task]  # none where no data is named
    make_learner: Callable[[], ClassIncrementalLearner]
    left_out: list[str]  # what the data holds beside its images, line by line

    def class_texts(self) -> dict[str, Any]:
        """The texts of the stream's classes; those of other classes in the file are left out, and named."""
        if self.stream.class_texts is None:
            return {}
        names = {name for task in self.tasks for name in task.class_names}
        texts = read_yaml(Path(self.stream.class_texts), "class texts")
        found = {name: text for name, text in texts.items() if normalized(str(name)) in names}
        others = [printable(str(name)) for name in texts if name not in found]
        print_once(f"{len(found)} of {len(names)} classes have texts of their own")
        if others:
            print_once(f"left out: texts of classes that are not there ({', '.join(others)})")
        return found

    def run(self, learner: ClassIncrementalLearner, output: str | Path, **options: Any) -> dict[str, Any]:
        """Run the stream in a folder as its settings say; `options` are others of the learner's `run`."""
        own: dict[str, Any] = {"source": source_of(self.stream), "class_texts": self.class_texts()}
        own["test_ahead"] = self.stream.test_ahead
        return learner.run(self.tasks, output, **own, **options)


def look_by(learner: ClassIncrementalLearner) -> Look:
    """The `look` of `open_source` that decodes no image twice: it encodes, where the store keeps what comes out."""
    from dulbe_peft.data.inventory import undecodable

    encoder = learner.encoder
    kept = encoder.store is not None and not encoder.store.private and not encoder.adapted
    if not kept or learner.args.precision == "int8":  # whose graph is made on the images of the first task
        return undecodable
    return lambda images: learner.readable_embeds(images)[1]


def set_up(settings: dict[str, Any]) -> Setup:
    """Open the data and load the model that the settings name."""
    stream, adapter, args = validated(settings)
    strategy, classifiers = stream.methods
    import torch
    from peft import get_peft_model

    from dulbe_peft.adapter.config import DualModeLoraConfig
    from dulbe_peft.data.store import open_store
    from dulbe_peft.encoders.loading import load_dual_encoder
    from dulbe_peft.learner import ClassIncrementalLearner

    store = open_store(stream.store)

    @cache
    def load() -> Any:
        base, processor = load_dual_encoder(stream.model, stream.revision, stream.attn_implementation)
        torch.manual_seed(args.seed)
        if not strategy.adapts:
            return base, processor
        config = DualModeLoraConfig(**vars(adapter))
        if config.target_modules is None and strategy.target_modules is not None:
            config.target_modules = sorted(strategy.target_modules)
        return get_peft_model(base, config, revision=stream.revision), processor

    @cache
    def make_learner() -> ClassIncrementalLearner:
        model, processor = load()
        learner = ClassIncrementalLearner(model, processor, args, strategy, classifiers)
        learner.encoder.store = store
        return learner

    def look(images: LabelledImages) -> Mapping[int, str]:
        return look_by(make_learner())(images)

    left_out: list[str] = []
    some = stream.dry_run or stream.images_per_class is not None or stream.max_tasks is not None
    tasks = stream_tasks(stream, left_out, None if some or strategy.adapts else look) if stream.data else []
    return Setup(stream, strategy, load()[0], tasks, make_learner, left_out)


def stream_tasks(stream: StreamArguments, notes: list[str] | None = None, look: Look | None = None) -> list[Task]:
    """The tasks of the stream that the settings describe; `notes` and `look` as in `open_source`."""
    from dulbe_peft.runs.resume import finished_tasks
    from dulbe_peft.streams.tasks import class_incremental_tasks
    from dulbe_peft.utils.files import read_lines

    train, test = open_source(source_of(stream), notes=notes, look=look)
    names = train.class_names
    order: Any = stream.class_order
    if order is not None and order != "icarl":
        if not Path(order).is_file():
            raise FileNotFoundError(f"class order {order!r} is neither 'icarl' nor a file")
        order = [line.strip() for line in read_lines(order)]
        if not set(order) <= set(names) and all(line.isdecimal() for line in order):
            order = [int(line) for line in order]
    begun = finished_tasks(Path(stream.output)) if stream.output and stream.resume else []
    begun = begun if _go_on(stream, begun, names) else []
    learned = sum(map(len, begun)) if begun else stream.initial_increment or 0
    increment = stream.increment or max(1, len(names) - learned)
    if increment > len(names):
        print_once(f"increment is {increment}, there are {len(names)} classes: they are learned as one task")
        increment = len(names)
    first: dict[str, Any] = {"initial_increment": stream.initial_increment, "first_tasks": begun}
    tasks: list[Task] = class_incremental_tasks(
        train, test, increment=increment, class_order=order, seed=stream.order_seed, **first
    )
    return tasks[: stream.max_tasks]


def _go_on(stream: StreamArguments, finished: list[tuple[str, ...]], names: Sequence[str]) -> bool:
    """Whether the finished tasks stay the first ones, also where classes were added; the last one may be smaller."""
    if not finished or stream.class_order is not None or stream.order_seed is not None:
        return False
    if stream.increment is not None:
        sizes = [stream.initial_increment or stream.increment, *[stream.increment] * len(finished)]
        short = [size - len(task) for task, size in zip(finished, sizes, strict=False)]
        if min(short) < 0 or (len(short) > 1 and min(short) > 0):
            return False
    return {name for task in finished for name in task} <= set(names)
