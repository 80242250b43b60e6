"""`dulbe-peft learn`: give a finished learner new classes, and further images of the classes it knows."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dulbe_peft.commands.flags import add_flags
from dulbe_peft.commands.loading import add_learner, load_learner
from dulbe_peft.commands.parser import Parser
from dulbe_peft.runs.settings import StreamArguments
from dulbe_peft.runs.setup import check_run_folder
from dulbe_peft.runs.sources import open_source, reopen_tests, say, source_of

if TYPE_CHECKING:
    from dulbe_peft.runs.progress import Row

EXAMPLE = """example:
  dulbe-peft learn june --data july-photos --output july

june is a saved learner or a run's folder, and stays as it is. july becomes a run's folder: it has
the results of june's tasks too. Classes of july-photos that june does not know become a new task.
Images of classes that it knows are taken in without training. The same command goes on where it
was stopped.
"""


def add(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser: Parser = commands.add_parser(
        "learn", help="give a finished learner new classes, and more images of known ones", epilog=EXAMPLE
    )
    add_learner(parser)
    parser.add_argument("--data", required=True, help="images, as for run")
    parser.add_argument("--output", required=True, help="folder of the new run; never that of LEARNER")
    parser.add_argument("--increment", type=int, help="new classes per task; without it all are one task")
    parser.add_argument("--no-update", action="store_true", help="leave out images of classes that are known")
    names = ("train_split", "test_split", "test_fraction", "skip_unreadable", "class_names")
    add_flags(parser, StreamArguments, names)
    parser.set_defaults(**{name: getattr(StreamArguments, name) for name in names})
    parser.set_defaults(call=learn, resumes=True)


def learn(arguments: argparse.Namespace) -> int:
    """Update known classes, learn new ones, and write the run."""
    from dulbe_peft.report import format_summary
    from dulbe_peft.report.pictures import write_pictures
    from dulbe_peft.runs.progress import known_tasks
    from dulbe_peft.utils.processes import leave, world

    check_other_folder(arguments.learner, arguments.output)
    check_run_folder(arguments.data, arguments.output)
    learner = load_learner(arguments)
    source = source_of(arguments)
    train, test = open_source(source)
    known = [name for name in train.class_names if name in set(learner.class_names)]
    new = [name for name in train.class_names if name not in set(known)]
    if not new and (not known or arguments.no_update):
        raise ValueError(
            f"{arguments.data!r} has nothing to learn: its classes, {list(train.class_names)[:5]} ..., are known"
        )
    past = known_tasks(learner)
    before = past[-1].row if past else None
    if known and not arguments.no_update:
        _check_known(learner, known)
        if any(task.source and task.source["data"] == source["data"] for task in past):
            raise ValueError(
                f"{arguments.learner!r} has learned from {arguments.data!r} before, and its images would count twice: "
                "go on with `dulbe-peft run` in its own folder, or leave known classes out with --no-update"
            )
        _update(learner, train, known)
    elif known:
        say(f"left out: images of known classes ({', '.join(known)})")
    tests = reopen_tests(past, look=learner.args.teacher == "cached")
    tasks = _tasks(train, test, new, arguments.increment) if new else []
    results = learner.run(tasks, arguments.output, known_tests=tests, source=source)
    if world()[0] == 0:
        write_pictures(arguments.output, [*tests, *(task.test for task in tasks)], results)
        if results.get("classifiers"):
            print(format_summary(results))
            gain = "" if new or not before else _gain(before, known_tasks(learner)[-1].row)
            if gain:
                print(gain)
        print(f"written: {Path(arguments.output) / 'results.json'}")
    leave()
    return 0


def check_other_folder(learner: str, output: str) -> None:
    """Raise a ValueError where the output is the learner's own folder, its run's, or inside them."""
    if not Path(learner).is_dir():
        return
    own, other = Path(learner).resolve(), Path(output).resolve()
    run = own.parent if own.name.startswith("task-") else own
    if run == other or own in (other, *other.parents):
        raise ValueError(
            f"--output {output!r} is where the learner {learner!r} is, which is never changed: name another folder "
            "(where classes were added to a run's own data, the same `dulbe-peft run` goes on in its folder)"
        )


def _gain(before: Row, after: Row) -> str:
    """What further images of known classes changed, where both rows are of tests of the same tasks."""
    from dulbe_peft.metrics.accuracy import percent

    def tested(row: Row) -> list[bool]:
        return [value is not None for score in [*row.classifiers.values()][:1] for value in score.by_task]

    if tested(before) != tested(after) or not tested(before):
        return ""
    rows = [
        f"{name} {percent(score.accuracy, 2)} % before, {percent(after.classifiers[name].accuracy, 2)} % after"
        for name, score in before.classifiers.items()
        if name in after.classifiers
    ]
    return f"with the further images: {'; '.join(rows)}"


def _check_known(learner: Any, known: list[str]) -> None:
    """Raise a ValueError where the learner cannot take in more images of known classes."""
    from dulbe_peft.training.updating import check_update

    try:
        check_update(learner.state, known)
    except ValueError as error:
        raise ValueError(f"{error}; --no-update leaves the images of known classes out") from error


def _update(learner: Any, train: Any, known: list[str]) -> None:
    """Take in the images of known classes, and say of which and how many."""
    import numpy as np

    from dulbe_peft.data.inventory import counted

    images = train.select(known)
    counts = np.bincount(images.labels, minlength=len(known))
    listed = ", ".join(f"{name} ({count})" for name, count in zip(known, counts, strict=True))
    say(f"known classes get {counted(len(images), 'further image')}, without training: {listed}")
    learner.update_classes(images)


def _tasks(train: Any, test: Any, new: list[str], increment: int | None) -> Any:
    """The tasks of the new classes."""
    from dulbe_peft.streams.tasks import class_incremental_tasks

    held_out = None if test is None else test.select(new)
    left_out = 0 if test is None or held_out is None else len(test) - len(held_out)
    if left_out:
        say(f"test images of known classes are not used: {left_out}; evaluate tests on them")
    size = len(new) if increment is None else min(increment, len(new))
    return class_incremental_tasks(train.select(new), held_out or None, increment=size)
