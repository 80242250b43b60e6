"""Set up a run: open its data, make its tasks, and load the model with its adapter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dulbe_peft.arguments import AdapterSettings, LearnerArguments
from dulbe_peft.data.names import normalized
from dulbe_peft.photos.runs.settings import StreamArguments, read_yaml
from dulbe_peft.photos.runs.sources import new_images, open_source
from dulbe_peft.utils.extras import garbage_collection_off
from dulbe_peft.utils.terminal import counted, print_once, printable

if TYPE_CHECKING:  # torch is only imported when a run is set up
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.metrics.results import Results
    from dulbe_peft.photos.data.looking import Look
    from dulbe_peft.streams.tasks import Task


@dataclass(frozen=True)
class Setup:
    """The tasks of a run, and an untrained learner."""

    stream: StreamArguments
    learner: ClassIncrementalLearner
    tasks: list[Task]  # empty if the settings name no data
    left_out: list[str]  # lines on the problems of the data, such as files that are left out

    def class_texts(self) -> dict[str, Any]:
        """Return the texts given for the stream's classes; print which other classes in the file are left out."""
        if self.stream.class_texts is None:
            return {}
        names = {name for task in self.tasks for name in task.class_names}
        texts = read_yaml(Path(self.stream.class_texts), "class texts")
        class_texts = {name: text for name, text in texts.items() if normalized(str(name)) in names}
        others = [printable(str(name)) for name in texts if name not in class_texts]
        print_once(f"{len(class_texts)} of {len(names)} classes have their own texts")
        if others:
            print_once(f"left out: texts of classes that the data does not have ({', '.join(others)})")
        return class_texts

    def run(self, keep_features: bool = False) -> Results:
        """Run the stream in its output folder."""
        from dulbe_peft.streams.run import RunOptions, run_stream

        source, texts = self.stream.source.entry(), self.class_texts()
        options = RunOptions(source=source, class_texts=texts, keep_features=keep_features)
        return run_stream(self.learner, self.tasks, self.stream.output, options)


def unreadable_finder(learner: ClassIncrementalLearner) -> Look:
    """Return a function that finds unreadable images, for `open_source`.

    It encodes the images if the store keeps the features, so that no image is decoded a second time later.
    """
    from dulbe_peft.photos.data.looking import undecodable

    encoder = learner.encoder
    stores = encoder.store is not None and not encoder.store.private and not encoder.adapted
    if not stores or learner.args.precision == "int8":  # an int8 graph is calibrated on the images of the first task
        return undecodable
    return lambda images: learner.readable_embeds(images)[1]


def set_up(stream: StreamArguments, adapter: AdapterSettings, args: LearnerArguments) -> Setup:
    """Open the data and load the model; add an adapter if the strategy trains one."""
    strategy, classifiers = stream.methods
    with garbage_collection_off():
        import torch
        from peft import get_peft_model

        from dulbe_peft.adapter.config import DualModeLoraConfig
        from dulbe_peft.data.store import open_store
        from dulbe_peft.encoders.loading import load_dual_encoder
        from dulbe_peft.learner import ClassIncrementalLearner

    @cache
    def make_learner() -> ClassIncrementalLearner:
        with garbage_collection_off():
            model, processor = load_dual_encoder(stream.model, stream.revision, stream.attn_implementation)
        torch.manual_seed(args.seed)
        if strategy.adapts:
            config = DualModeLoraConfig(**vars(adapter))
            if config.target_modules is None and strategy.target_modules is not None:
                config.target_modules = sorted(strategy.target_modules)
            model = get_peft_model(model, config, revision=stream.revision)
        learner = ClassIncrementalLearner(model, processor, args, strategy, classifiers)
        learner.use_store(open_store(stream.store))
        return learner

    def look(images: LabelledImages) -> Mapping[int, str]:
        return unreadable_finder(make_learner())(images)

    left_out: list[str] = []
    uses_few = stream.dry_run or stream.images_per_class is not None  # encoding all images would be wasted
    # The data are opened first, so that their errors are raised before a model is loaded.
    tasks = stream_tasks(stream, left_out, None if uses_few or strategy.adapts else look) if stream.data else []
    return Setup(stream, make_learner(), tasks, left_out)


def stream_tasks(stream: StreamArguments, notes: list[str] | None = None, look: Look | None = None) -> list[Task]:
    """Return the tasks of the stream that the settings describe; `notes` and `look` are those of `open_source`."""
    from dulbe_peft.data.known import KnownImages
    from dulbe_peft.streams.tasks import class_incremental_tasks
    from dulbe_peft.utils.files import read_lines

    train, test = open_source(stream.source, look, notes)
    train, names = new_images(train, KnownImages()), train.class_names
    order: Any = stream.class_order
    if order is not None and order != "icarl":
        if not Path(order).is_file():
            raise FileNotFoundError(f"class order {order!r} is neither 'icarl' nor a file")
        order = [line.strip() for line in read_lines(order)]
        if not set(order) <= set(names) and all(line.isdecimal() for line in order):
            order = [int(line) for line in order]
    first_tasks = _finished_tasks(stream, names)
    learned = sum(map(len, first_tasks)) if first_tasks else stream.initial_increment or 0
    increment = stream.increment or max(1, len(names) - learned)
    if increment > len(names):
        print_once(f"increment is {increment}, but the data has {counted(len(names), 'class')}: one task learns all")
        increment = len(names)
    options: dict[str, Any] = {"increment": increment, "initial_increment": stream.initial_increment}
    options |= {"class_order": order, "seed": stream.order_seed, "first_tasks": first_tasks}
    return class_incremental_tasks(train, test, **options)


def _finished_tasks(stream: StreamArguments, names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the class names of the finished tasks in the output folder, if the stream can begin with these tasks.

    Classes may have been added to the data since, and the last finished task may be smaller than the others.
    """
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
