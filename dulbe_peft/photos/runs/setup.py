"""Open the data of a command, and set up a run: make its tasks, and load the model with its adapter.

The data is opened again later, as `sources.json` records it.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from dulbe_peft.arguments import AdapterSettings, LearnerArguments
from dulbe_peft.data.names import normalized
from dulbe_peft.data.tables import TABLES
from dulbe_peft.photos.data.source import VALIDATION, DataSource
from dulbe_peft.photos.runs.run_settings import ModelSettings, StreamSettings, read_yaml
from dulbe_peft.utils.extras import garbage_collection_off
from dulbe_peft.utils.terminal import counted, print_once, printable

if TYPE_CHECKING:
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.data.known import KnownImages
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.metrics.results import Results
    from dulbe_peft.photos.data.looking import Look
    from dulbe_peft.photos.data.splits import Opened
    from dulbe_peft.streams.progress import FinishedTask
    from dulbe_peft.streams.tasks import Task


def data_or_labels(data: str | None, labels: str | None, flag: str = "--data") -> str:
    """Return the value of `flag` or --labels; raise a ValueError if both or none are given."""
    if not data and labels is None:
        raise ValueError(f"{flag} is required, or --labels")
    if labels is None:
        return str(data)
    if data:
        raise ValueError(f"{flag} is {data!r} and --labels is {labels!r}: the table names the images, so omit {flag}")
    if not labels.lower().endswith(TABLES):
        raise ValueError(f"--labels is {labels!r}, expected a .csv file with the columns path,label, or another table")
    return labels


def open_source(source: DataSource, look: Look | None = None, known: Collection[str] = ()) -> Opened:
    """Open a data source and print its inventory; nothing is printed about `known` classes with few images.

    `look` finds the unreadable images, as in `DataSource.open`.
    """
    opened = source.open(look)
    train, test, inventory = opened
    print_once("\n".join([inventory.summary(), *inventory.problems(known=known)]))
    if inventory.unreadable:
        print_once("unreadable images are left out and not counted above; --strict makes them an error")
    if train.features is not None and train.features.note is None:
        print_once(f"{source.data} does not say which model its features are from: only their width is checked")
    given = next(iter(inventory.counts.values()))
    if len(inventory.counts) == 1 and given.keys() - {*known}:
        print_once(f"{source.data} has no test images; --test-fraction 0.2 holds out a fifth of the images")
    if source.class_names is not None:
        pairs = [f"{old!r} is {new!r}" for old, new in zip(given, train.class_names, strict=True)]
        print_once(f"names from {source.class_names}: {', '.join(pairs[:3])}" + (", ..." if len(pairs) > 3 else ""))
    elif all(re.fullmatch(r"\d+|n\d{8}", name) for name in train.class_names):
        print_once("the class names are numbers: --class-names FILE gives the classes names that a model can read")
    drawn = (source.validation_fraction, source.images_per_class, source.test_images_per_class)
    if any(each is not None for each in drawn):
        held_out = " held-out ones" if source.validation_fraction else ""
        tested = "" if test is None else f", testing on {len(test)}{held_out}"
        print_once(f"training on {counted(len(train), 'image')}{tested}")
    return opened


def open_images(source: DataSource, split: str | None, look: Look) -> LabelledImages:
    """Open the images of one split, see `DataSource.open_split`; print unreadable images, and what was grouped."""
    images, inventory = source.open_split(split, look)
    if inventory.unreadable or inventory.notes:
        print("\n".join([inventory.summary(), *inventory.problems()]), file=sys.stderr)
    return images


def reopen_tests(
    tasks: Sequence[FinishedTask], known: KnownImages, renamed: Mapping[str, str]
) -> list[LabelledImages | None]:
    """Return the test images of each earlier task, found by their content, or None for a task whose images are gone.

    A line is printed for each such task. `renamed` maps the folder names of classes to their present names.
    """
    reopened = cache(lambda entry: DataSource.of(json.loads(entry)).reopen())
    tests: list[LabelledImages | None] = []
    for number, task in enumerate(tasks, 1):
        test = None
        try:
            if task.source is None:
                raise ValueError("the run did not record where they came from")
            parts = reopened(json.dumps(task.source))
            test = _find_tests(parts, task.class_names, known, task.source["data"], renamed)
        except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
            print(f"the test images of task {number} are not used again: {error}", file=sys.stderr)
        tests.append(test)
    return tests


def _find_tests(
    parts: Sequence[LabelledImages],
    names: Sequence[str],
    known: KnownImages,
    data: str,
    renamed: Mapping[str, str],
) -> LabelledImages | None:
    """Return all images of the classes `names` that were tested on, or None if the classes had no test images."""
    import numpy as np

    from dulbe_peft.data.known import compared
    from dulbe_peft.photos.runs.learned_images import as_tested

    if not any(known.tested.get(name) for name in names):
        if known.complete:
            return None
        raise ValueError("this learner has no record of its images")
    for part in parts:
        part = as_tested(part, known)
        class_of, _, missing = compared(part, known.tested, names, renamed)
        if not missing:
            return part.at(list(class_of), np.array([names.index(name) for name in class_of.values()]), names)
    raise ValueError(f"the images in {data} are not those that the task was tested on")


def tests_of(source: Mapping[str, object] | None) -> dict[str, str]:
    """The flags with which `evaluate` finds the test images of a task's source, as far as they lie apart and here.

    Those that a run held out lie among those that it learned.
    """
    if source is not None and source.get("test_data"):
        return {"data": str(source["test_data"])}
    if source is not None and source.get("test_split") not in (None, "none") and not source.get("test_fraction"):
        folder = Path(str(source.get("data")))
        for split in (str(source["test_split"]), *VALIDATION):
            if (folder / split).is_dir():
                return {"data": str(folder)} | ({} if split == "test" else {"split": split})
    return {"data": "PHOTOS"}


def new_images(images: LabelledImages, known: KnownImages, advice: str = "") -> LabelledImages:
    """Return the training images without copies and without images learned before; print what is left out."""
    rows, repeated = known.new_rows(images)
    for reason, which in repeated.items():
        name, learned = images.item_name(which[0]), known.class_of().get(images.contents()[which[0]] or b"")
        was = f", learned as {learned!r} before" if reason == "of another class" else ""
        print_once(f"left out, because they would count twice: {len(which)} {reason}, such as {name}{was}{advice}")
    if not known.complete:
        print_once("this learner has no record of its images, so repeated images cannot be recognized")
    return images.at(rows)


def report_leaks(train: LabelledImages, test: LabelledImages | None, known: KnownImages) -> None:
    """Print how many training images were tested on in an earlier task, and how many test images were trained on."""
    tested = {content for contents in known.tested.values() for content in contents}
    for images, others, kind, earlier in (
        (train, tested, "training image", "test images"),
        (test, set(known.class_of()), "test image", "training images"),
    ):
        rows = [] if images is None else [row for row, content in enumerate(images.contents()) if content in others]
        if images is not None and rows:
            verb, name = "was" if len(rows) == 1 else "were", images.item_name(rows[0])
            leak = f"{counted(len(rows), kind)}, such as {name}, {verb} among the {earlier} of an earlier task"
            print_once(f"{leak}, so the accuracy on them is too optimistic")


@dataclass(frozen=True)
class Setup:
    """The tasks of a run, and an untrained learner."""

    source: DataSource
    stream: StreamSettings
    learner: ClassIncrementalLearner
    tasks: list[Task]  # empty if the settings name no data
    left_out: list[str]  # lines on the problems of the data, such as files that are left out

    def class_texts(self) -> dict[str, list[str]]:
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
        from dulbe_peft.streams.run import run_stream

        texts, given = self.class_texts(), (self.learner, self.tasks, self.stream.output)
        return run_stream(*given, source=self.source.entry(), class_texts=texts, keep_features=keep_features)


def unreadable_finder(learner: ClassIncrementalLearner) -> Look:
    """Return a function that finds unreadable images, for `open_source`.

    It encodes the images if the store keeps the features, and otherwise keeps their pixel values if they fit into
    memory, so that no image is decoded a second time later.
    """
    from dulbe_peft.photos.data.looking import undecodable

    encoder = learner.encoder
    stores = encoder.store is not None and not encoder.store.private and not encoder.adapted
    if not stores or learner.args.precision == "int8":  # an int8 graph is calibrated on the images of the first task

        def look(images: LabelledImages) -> Mapping[int, str]:
            pixels = encoder.kept_images(images)
            return undecodable(images, None if pixels is None else pixels.read, learner.args.progress)

        return look
    return lambda images: learner.readable_embeds(images)[1]


def set_up(
    source: DataSource,
    model: ModelSettings,
    stream: StreamSettings,
    adapter: AdapterSettings,
    args: LearnerArguments,
) -> Setup:
    """Open the data and load the model; add an adapter if the strategy trains one."""
    source, learner = source.absolute(), cache(partial(new_learner, model, adapter, args))

    def look(images: LabelledImages) -> Mapping[int, str]:
        return unreadable_finder(learner())(images)

    if not source.data:
        return Setup(source, stream, learner(), [], [])
    uses_few = stream.dry_run or source.images_per_class is not None  # encoding all images would be wasted
    # The data are opened first, so that their errors are raised before a model is loaded.
    opened = open_source(source, None if uses_few else look)
    tasks = stream_tasks(opened, stream)
    return Setup(source, stream, learner(), tasks, opened.inventory.lines())


def new_learner(model: ModelSettings, adapter: AdapterSettings, args: LearnerArguments) -> ClassIncrementalLearner:
    """Load a model, add an adapter if the strategy trains one, and return a learner that has learned nothing."""
    strategy, classifiers = model.methods
    with garbage_collection_off():
        import torch
        from peft import get_peft_model

        from dulbe_peft.adapter.config import DualModeLoraConfig
        from dulbe_peft.data.store import open_store
        from dulbe_peft.encoders.loading import load_dual_encoder
        from dulbe_peft.learner import ClassIncrementalLearner

        base, processor = load_dual_encoder(model.model, model.revision, model.attn_implementation)
    torch.manual_seed(args.seed)
    if strategy.adapts:
        config = DualModeLoraConfig(**vars(adapter))
        if config.target_modules is None and strategy.target_modules is not None:
            config.target_modules = sorted(strategy.target_modules)
        base = get_peft_model(base, config, revision=model.revision)
    learner = ClassIncrementalLearner(base, processor, args, strategy, classifiers)
    learner.use_store(open_store(model.store))
    return learner


def stream_tasks(opened: Opened, stream: StreamSettings) -> list[Task]:
    """Return the tasks of opened images in the order that the settings describe; copies of images are left out."""
    from dulbe_peft.data.known import KnownImages
    from dulbe_peft.streams.orders import NAMED_ORDERS
    from dulbe_peft.streams.tasks import class_incremental_tasks
    from dulbe_peft.utils.files import read_lines

    train = new_images(opened.train, KnownImages())
    names, order = train.class_names, stream.class_order
    numbers: list[int] | list[str] | str | None = order
    if order is not None and order not in NAMED_ORDERS:
        if not Path(order).is_file():
            raise FileNotFoundError(f"class order {order!r} is neither one of {', '.join(NAMED_ORDERS)} nor a file")
        numbers = lines = [line.strip() for line in read_lines(order)]
        if not set(lines) <= set(names) and all(line.isdecimal() for line in lines):
            numbers = [int(line) for line in lines]
    first_tasks = _finished_tasks(stream, names)
    learned = sum(map(len, first_tasks)) if first_tasks else stream.initial_increment or 0
    increment = stream.increment or max(1, len(names) - learned)
    if increment > len(names):
        print_once(f"increment is {increment}, but the data has {counted(len(names), 'class')}: one task learns all")
        increment = len(names)
    return class_incremental_tasks(
        train,
        opened.test,
        increment=increment,
        initial_increment=stream.initial_increment,
        class_order=numbers,
        seed=stream.order_seed,
        first_tasks=first_tasks,
    )


def _finished_tasks(stream: StreamSettings, names: Sequence[str]) -> list[tuple[str, ...]]:
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
