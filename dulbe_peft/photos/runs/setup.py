"""A run before it begins: its data, its tasks, and the model with its adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dulbe_peft.arguments import AdapterSettings, LearnerArguments
from dulbe_peft.data.names import normalized
from dulbe_peft.photos.runs.settings import StreamArguments, read_yaml
from dulbe_peft.photos.runs.sources import new_images, open_source, source_of
from dulbe_peft.utils.extras import uncollected
from dulbe_peft.utils.terminal import counted, print_once, printable

if TYPE_CHECKING:  # torch is imported when a run is set up
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.photos.data.inventory import Look
    from dulbe_peft.streams.tasks import Task


@dataclass(frozen=True)
class Setup:
    """A run before it begins: its data, and a learner that has learned nothing."""

    stream: StreamArguments
    learner: ClassIncrementalLearner
    tasks: list[Task]  # none where no data is named
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

    def run(self, **options: Any) -> dict[str, Any]:
        """Run the stream in its folder as its settings say; `options` are others of the learner's `run`."""
        options |= {"source": source_of(self.stream), "class_texts": self.class_texts()}
        return self.learner.run(self.tasks, self.stream.output, **options)


def look_by(learner: ClassIncrementalLearner) -> Look:
    """The `look` of `open_source` that decodes no image twice: it encodes, where the store keeps what comes out."""
    from dulbe_peft.photos.data.inventory import undecodable

    encoder = learner.encoder
    kept = encoder.store is not None and not encoder.store.private and not encoder.adapted
    if not kept or learner.args.precision == "int8":  # whose graph is made on the images of the first task
        return undecodable
    return lambda images: learner.readable_embeds(images)[1]


def set_up(stream: StreamArguments, adapter: AdapterSettings, args: LearnerArguments) -> Setup:
    """Open the data, and load the model that the settings name, with an adapter where something is trained."""
    strategy, classifiers = stream.methods
    with uncollected():
        import torch
        from peft import get_peft_model

        from dulbe_peft.adapter.config import DualModeLoraConfig
        from dulbe_peft.data.store import open_store
        from dulbe_peft.encoders.loading import load_dual_encoder
        from dulbe_peft.learner import ClassIncrementalLearner

    @cache
    def learner() -> ClassIncrementalLearner:
        with uncollected():
            model, processor = load_dual_encoder(stream.model, stream.revision, stream.attn_implementation)
        torch.manual_seed(args.seed)
        if strategy.adapts:
            config = DualModeLoraConfig(**vars(adapter))
            if config.target_modules is None and strategy.target_modules is not None:
                config.target_modules = sorted(strategy.target_modules)
            model = get_peft_model(model, config, revision=stream.revision)
        made = ClassIncrementalLearner(model, processor, args, strategy, classifiers)
        made.use_store(open_store(stream.store))
        return made

    def look(images: LabelledImages) -> Mapping[int, str]:
        return look_by(learner())(images)

    left_out: list[str] = []
    some = stream.dry_run or stream.images_per_class is not None
    # What is wrong with the data is said before a model is loaded.
    tasks = stream_tasks(stream, left_out, None if some or strategy.adapts else look) if stream.data else []
    return Setup(stream, learner(), tasks, left_out)


def stream_tasks(stream: StreamArguments, notes: list[str] | None = None, look: Look | None = None) -> list[Task]:
    """The tasks of the stream that the settings describe; `notes` and `look` as in `open_source`."""
    from dulbe_peft.data.known import KnownImages
    from dulbe_peft.streams.tasks import class_incremental_tasks
    from dulbe_peft.utils.files import read_lines

    train, test = open_source(source_of(stream), notes=notes, look=look)
    train, names = new_images(train, KnownImages()), train.class_names
    order: Any = stream.class_order
    if order is not None and order != "icarl":
        if not Path(order).is_file():
            raise FileNotFoundError(f"class order {order!r} is neither 'icarl' nor a file")
        order = [line.strip() for line in read_lines(order)]
        if not set(order) <= set(names) and all(line.isdecimal() for line in order):
            order = [int(line) for line in order]
    begun = _begun(stream, names)
    learned = sum(map(len, begun)) if begun else stream.initial_increment or 0
    increment = stream.increment or max(1, len(names) - learned)
    if increment > len(names):
        print_once(f"increment is {increment}, and the data has {counted(len(names), 'class')}: one task learns all")
        increment = len(names)
    how: dict[str, Any] = {"increment": increment, "initial_increment": stream.initial_increment}
    how |= {"class_order": order, "seed": stream.order_seed, "first_tasks": begun}
    return class_incremental_tasks(train, test, **how)


def _begun(stream: StreamArguments, names: Sequence[str]) -> list[tuple[str, ...]]:
    """The finished tasks where they stay the first ones, also when classes were added; the last one may be smaller."""
    from dulbe_peft.checkpoints.layout import newest_task

    if not stream.output or stream.class_order is not None or stream.order_seed is not None:
        return []
    newest = newest_task(Path(stream.output), lambda _: None) if Path(stream.output).is_dir() else None
    finished = [] if newest is None else [tuple(task) for task in newest[1].notes["tasks"]]
    if finished and stream.increment is not None:
        sizes = [stream.initial_increment or stream.increment, *[stream.increment] * len(finished)]
        short = [size - len(task) for task, size in zip(finished, sizes, strict=False)]
        if min(short) < 0 or (len(short) > 1 and min(short) > 0):
            return []
    return finished if set().union(*finished) <= set(names) else []
