"""example:
  dulbe-peft learn june --data july-photos --output july

june is a saved learner or the folder of a run, and is not changed. july becomes the folder of a run,
with the results of june's tasks. New classes become a new task; images of known classes are added
without training. Images that june has learned are left out, even if their paths changed or, with the
feature store, they got a keyword. An image with another label than before is moved to that class.
Repeating the command continues it after a stop.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from dulbe_peft.photos.commands.flags import LABELS, OVERWRITE, Folder
from dulbe_peft.photos.commands.options import Load, command, data_settings, learner_options
from dulbe_peft.photos.commands.paths import FOLDER, check_given, claim
from dulbe_peft.photos.commands.run import close_run
from dulbe_peft.photos.data.source import SPLITS, DataSource
from dulbe_peft.photos.runs import setup
from dulbe_peft.photos.runs.learned_images import correct_tests, without_equal_features, without_tested
from dulbe_peft.utils.settings import AtLeastOne, setting
from dulbe_peft.utils.terminal import counted, print_once

if TYPE_CHECKING:
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.metrics.results import Results
    from dulbe_peft.streams.progress import Row
    from dulbe_peft.streams.tasks import Task


@command(kept="finished tasks are kept", settings=data_settings(*SPLITS))
@learner_options()
def learn(
    learner: str,
    load: Load,
    data: str | None = setting(None, "images, as for run"),
    labels: str | None = LABELS,
    output: Folder = setting(..., "folder of the new run, different from LEARNER"),
    increment: AtLeastOne | None = setting(None, "new classes per task (default: all in one task)"),
    no_update: bool = setting(False, "leave out images of known classes"),
    again: bool = setting(False, "learn images again that were learned or tested on before"),
    overwrite: bool = OVERWRITE,
    **flags: object,
) -> None:
    data = setup.data_or_labels(data, labels)
    source = DataSource.of({"data": data, **flags}).absolute()
    check_given(class_names=source.class_names, vocabulary=source.vocabulary)
    source.check()
    claim(("--output", output, FOLDER), apart=[learner, data], overwrite=overwrite)
    loaded = load()
    import numpy as np

    from dulbe_peft.data.names import check_class_names, similar_names
    from dulbe_peft.streams.progress import known_tasks, renamed_classes
    from dulbe_peft.streams.run import run_stream

    train, test, inventory = setup.open_source(source, setup.unreadable_finder(loaded), loaded.class_names)
    notes = inventory.lines(loaded.class_names)
    corrected = correct_tests(loaded, train, test)
    if not again:
        train = without_tested(train, loaded.state.known)
    setup.report_leaks(train, test, loaded.state.known)
    fixed = _move_relabelled(loaded, train, no_update)
    fresh = train.at(np.setdiff1d(np.arange(len(train)), fixed))
    if not again:
        fresh = without_equal_features(setup.new_images(train, loaded.state.known, " (--again)"), loaded)
    if not len(fresh) and not corrected:
        raise ValueError(
            f"{data!r} has nothing to learn: {learner!r} has learned all of its images, or is tested on them"
        )
    learned, gone = set(loaded.class_names), set(train.labels.tolist()) - set(fresh.labels.tolist())
    known = [name for name in train.class_names if name in learned]
    new = [name for label, name in enumerate(train.class_names) if name not in learned and label not in gone]
    if no_update and not new:
        raise ValueError(f"{data!r} has nothing to learn: its classes, {list(train.class_names)[:5]} ..., are known")
    if new:
        check_class_names(new, loaded.class_names)  # raises if a name is another spelling of a known one
        print_once(f"new: {', '.join(new)}")
        for name, near in similar_names(new, loaded.class_names):
            print_once(f"{name!r} is a new class, although {near!r} is known: if they are one, rename the class")
    renamed = renamed_classes(loaded.state.updates)
    for name in set(new) & set(renamed):
        earlier = f"the class that {learner!r} once called {name!r} is now {renamed[name]!r}"
        print_once(f"{name!r} is learned as a new class; {earlier}")
    tasks = _tasks(fresh, test, new, increment) if new else []
    past = known_tasks(loaded)
    tests = setup.reopen_tests(past, loaded.state.known, renamed)
    if known and no_update:
        print_once(f"left out: images of known classes ({', '.join(known)})")
    elif known:
        _update(loaded, fresh.select(known))
    before = past[-1].row if past else None
    results = run_stream(loaded, tasks, output, past=past, known_tests=tests, source=source.entry())
    if before is not None and not new:
        _report_gain(before, results)
    close_run(loaded, output, results, [*tests, *(task.test for task in tasks)], [train], notes)


def _move_relabelled(learner: ClassIncrementalLearner, images: LabelledImages, no_update: bool) -> list[int]:
    """Forget learned images that now have another label, so that they are learned again with it.

    Return the rows of those that are not moved: a classifier cannot forget them, or with `no_update`, their label is
    a known class, which gets no image. What is done is printed.
    """
    before = learner.state
    rows = before.known.new_rows(images)[1].get("of another class", [])
    names = [images.class_names[label] for label in images.labels.tolist()]
    kept = [row for row in rows if no_update and names[row] in learner.class_names]
    if kept:
        example = f"{images.item_name(kept[0])}, which is now {names[kept[0]]!r}"
        print_once(f"--no-update: {counted(len(kept), 'image')} left in the class learned before, such as {example}")
    rows = sorted(set(rows) - set(kept))
    if not rows:
        return kept
    class_of, counts = before.known.class_of(), before.image_counts()
    was = [class_of[content or b""] for content in images.at(rows).contents()]
    contents = {content or b"": name for content, name in zip(images.at(rows).contents(), was, strict=True)}
    emptied = [name for name, number in Counter(contents.values()).items() if counts[name] == number]
    example = f"{images.item_name(rows[0])} from {was[0]!r} to {names[rows[0]]!r}"
    try:
        stays = [row for row, name in zip(rows, was, strict=True) if name not in emptied]
        if stays:
            learner.forget_images([images.given(row) for row in stays])
        for name in emptied:
            learner.forget_class(name)
    except ValueError as error:
        learner.use_state(before)
        print_once(
            f"{counted(len(rows), 'image')} left in the class that it was learned as, such as {example}: {error}"
        )
        return [*kept, *rows]
    print_once(f"{counted(len(rows), 'image')} moved to another class, such as {example}")
    for name in emptied:
        print_once(f"the class {name!r} has no image left and is forgotten")
    return kept


def _report_gain(before: Row, results: Results) -> None:
    """Print how further images of known classes changed the accuracy, if the same tasks were tested before."""
    from dulbe_peft.metrics.accuracy import percent

    rows = []
    for name, score in before.classifiers.items():
        now = results.classifiers.get(name)
        if now is None or [a is None for a in score.by_task] != [a is None for a in now.matrix[-1]]:
            return
        rows.append(f"{name} {percent(score.accuracy, 2)} % before, {percent(now.last_accuracy, 2)} % after")
    if rows:
        print_once(f"with the further images: {'; '.join(rows)}")


def _update(learner: ClassIncrementalLearner, images: LabelledImages) -> None:
    """Update known classes with further images, if there are any, and print how many each class gets."""
    from dulbe_peft.classifiers.rule import check_can
    from dulbe_peft.photos.data.looking import count_images

    if not len(images):
        return
    try:
        for classifier in learner.classifiers.values():
            check_can(classifier.rule, "update")
    except ValueError as error:
        raise ValueError(f"{error}; --no-update leaves out the images of known classes") from error
    listed = ", ".join(f"{name} ({n})" for name, n in count_images({"": images})[""].items() if n)
    print_once(f"known classes get {counted(len(images), 'further image')}, without training: {listed}")
    learner.update_classes(images)


def _tasks(train: LabelledImages, test: LabelledImages | None, new: list[str], increment: int | None) -> list[Task]:
    from dulbe_peft.streams.tasks import class_incremental_tasks

    held_out = test.select(new) if test else None
    if test and held_out is not None and len(held_out) < len(test):
        left_out = len(test) - len(held_out)
        print_once(f"test images of known classes are not used: {left_out}; `evaluate` can test on them")
    return class_incremental_tasks(train.select(new), held_out or None, increment=min(increment or len(new), len(new)))
