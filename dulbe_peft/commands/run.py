"""`dulbe-peft run`: learn a class-incremental stream."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.checks import check_int
from dulbe_peft.commands.data import check_run_folder, fit_increment
from dulbe_peft.commands.dry_run import describe_model, describe_stream, describe_tasks
from dulbe_peft.commands.loading import adapted
from dulbe_peft.commands.settings import StreamArguments, add_settings, settings_of, validated
from dulbe_peft.commands.sources import open_source, source_of

EXAMPLE = """example:
  dulbe-peft run --model openai/clip-vit-base-patch16 --data photos --increment 10 --output out

photos holds train/CLASS/*.jpg and test/CLASS/*.jpg, or CLASS/*.jpg and --test-fraction 0.2.
The same command goes on where a run was stopped, and where classes were added.
"""
# What `--help` shows; `--help-all` shows the rest.
ESSENTIAL = {
    "model",
    "data",
    "output",
    "strategy",
    "classifiers",
    "increment",
    "test_fraction",
    "class_order",
    "dry_run",
    "epochs",
    "learning_rate",
    "prompt_template",
    "seed",
    "num_workers",
    "device",
}


def add(commands: Any) -> None:
    """Add the command to the parser's commands."""
    usage = "dulbe-peft run --model MODEL --data DATA --output OUT [settings]"
    parser = commands.add_parser(
        "run", help="learn a class-incremental stream and write results.json", usage=usage, epilog=EXAMPLE
    )
    parser.add_argument("--config", help="YAML file with any of the settings, by their names")
    add_settings(parser, ESSENTIAL)
    parser.set_defaults(call=run, resumes=True)


@dataclass(frozen=True)
class Setup:
    """A run before it begins: its data, and the model with its adapter.

    Attributes:
        stream: where the stream comes from.
        args: the learner's settings.
        strategy: what is trained.
        model: the adapted model, or the pristine one where nothing is trained.
        tasks: the stream; None where no data is named.
        make_learner: makes the learner with some settings.
    """

    stream: StreamArguments
    args: LearnerArguments
    strategy: Any
    model: Any
    tasks: Any
    make_learner: Callable[[LearnerArguments], Any]

    def check_zero_shot(self, found: float | None) -> None:
        """Raise a `ValueError` where the pristine model's accuracy is not the expected one."""
        from dulbe_peft.streams.protocols import check_zero_shot

        if self.stream.expected_zero_shot is not None:
            check_zero_shot(found, self.stream.expected_zero_shot, self.stream.zero_shot_tolerance)


def set_up(settings: dict[str, Any]) -> Setup:
    """Open the data and load the model that the settings name."""
    stream, config, args = validated(settings)
    if stream.data and stream.output:
        check_run_folder(stream.data, stream.output)
    import torch

    from dulbe_peft.backbone import load_dual_encoder
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.specs import split_specs
    from dulbe_peft.strategies import make_strategy

    strategy = make_strategy(stream.strategy)
    classifiers = None if stream.classifiers is None else split_specs(stream.classifiers)
    tasks: Any = stream_tasks(stream) if stream.data else None
    base, processor = load_dual_encoder(stream.model, stream.revision, stream.attn_implementation)
    torch.manual_seed(args.seed)
    model = adapted(base, config, strategy, stream.revision)

    def make_learner(args: LearnerArguments) -> ClassIncrementalLearner:
        return ClassIncrementalLearner(model, processor, args=args, strategy=strategy, classifiers=classifiers)

    return Setup(stream, args, strategy, model, tasks, make_learner)


def run(arguments: argparse.Namespace) -> int:
    """Learn, or say what would be learned."""
    settings = settings_of(arguments)
    validated(settings)
    dry = settings.get("dry_run", False)
    for name in ("model",) if dry else ("model", "data", "output"):
        if not settings.get(name):
            raise ValueError(f"--{name} is required")
    setup = set_up(settings)
    from dulbe_peft.distributed import leave, world
    from dulbe_peft.report import format_summary

    stream = setup.stream
    if dry:
        if setup.tasks is not None:
            print(describe_tasks(setup.tasks))
        print(describe_model(setup.model, setup.strategy))
        if setup.tasks is not None:
            print(describe_stream(setup.make_learner, setup.args, setup.tasks))
        return 0
    learner = setup.make_learner(setup.args)
    results = learner.run(
        setup.tasks,
        stream.output,
        resume=stream.resume,
        source=source_of(stream),
        check_zero_shot=setup.check_zero_shot,
        test_ahead=stream.test_ahead,
    )
    if world()[0] == 0:
        if "classifiers" in results:
            print(format_summary(results))
        print(f"written: {Path(stream.output) / 'results.json'}")
    leave()
    return 0


def stream_tasks(stream: StreamArguments) -> Any:
    """The tasks of the stream that the settings describe."""
    from dulbe_peft.files import read_lines
    from dulbe_peft.streams.protocols import check_counts
    from dulbe_peft.streams.samples import carried_class_names
    from dulbe_peft.streams.tasks import class_incremental_tasks

    train, test = open_source(source_of(stream))
    check_counts(train, test, stream.expected_classes, stream.expected_train, stream.expected_test)
    names = carried_class_names(train)
    order: Any = stream.class_order
    if order is not None and order != "icarl":
        if not Path(order).is_file():
            raise FileNotFoundError(f"class order {order!r} is neither 'icarl' nor a file")
        order = [line.strip() for line in read_lines(order)]
        if not set(order) <= set(names) and all(line.isdecimal() for line in order):
            order = [int(line) for line in order]
    finished = _finished_tasks(stream)
    asked = _finished_increment(stream, finished) if stream.increment is None else stream.increment
    increment = fit_increment(asked, len(names))
    tasks = class_incremental_tasks(
        train,
        test,
        increment=increment,
        initial_increment=stream.initial_increment,
        class_order=order,
        seed=stream.order_seed,
        first_tasks=finished if _go_on(stream, increment, finished, names) else [],
    )
    if stream.max_tasks is not None:
        tasks = tasks[: check_int("max_tasks", stream.max_tasks, 1)]
    return tasks


def _finished_tasks(stream: StreamArguments) -> list[tuple[str, ...]]:
    """The tasks that a run in the output folder has finished; none where it is not to go on."""
    from dulbe_peft.resuming import finished_tasks

    return finished_tasks(Path(stream.output)) if stream.output and stream.resume else []


def _finished_increment(stream: StreamArguments, finished: list[tuple[str, ...]]) -> int | None:
    """How many classes a finished task had, so that a run whose increment is not set goes on with the same."""
    tasks = finished[0 if stream.initial_increment is None else 1 :]
    return len(tasks[0]) if tasks else None


def _go_on(stream: StreamArguments, increment: int, finished: list[tuple[str, ...]], names: Sequence[str]) -> bool:
    """Whether the finished tasks stay the first ones, also where classes were added to the data.

    An order that the user gave says itself which classes come first. A task may be smaller than the others: it was
    the last one once. Where a task is larger, or none has the full size, they are those of another run.
    """
    if not finished or stream.class_order is not None or stream.order_seed is not None:
        return False
    sizes = [stream.initial_increment or increment, *[increment] * len(finished)]
    pairs = [(len(task), size) for task, size in zip(finished, sizes, strict=False)]
    fits = all(found <= size for found, size in pairs)
    fits = fits and (len(pairs) == 1 or any(found == size for found, size in pairs))
    return fits and {name for task in finished for name in task} <= set(names)
