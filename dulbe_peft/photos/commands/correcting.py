"""Commands that correct a learner: forget, merge and rename. Classifiers that do not support it are dropped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from dulbe_peft.data.names import check_rename, learned_name, normalized
from dulbe_peft.photos.commands.advice import next_command, print_next_command
from dulbe_peft.photos.commands.flags import OVERWRITE, File, Folder
from dulbe_peft.photos.commands.options import Load, command, learner_options
from dulbe_peft.photos.commands.paths import FOLDER, check_given, check_images, claim, saved_classes
from dulbe_peft.utils.settings import setting
from dulbe_peft.utils.terminal import counted

if TYPE_CHECKING:
    from dulbe_peft.classifiers.base import Classifier
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.streams.progress import FinishedTask


@command()
@learner_options()
def forget(
    learner: str,
    load: Load,
    classes: tuple[str, ...] = setting((), "names of classes that the learner knows", place=True),
    image: tuple[File, ...] = setting((), "learned photographs, even if they were moved since"),
    output: Folder = setting(..., "folder for the corrected learner"),
    overwrite: bool = OVERWRITE,
) -> None:
    """examples:
      dulbe-peft forget june "great auk" dodo --output june-without
      dulbe-peft forget june --image photos/train/puffin/17.jpg --output june-without

    A forgotten class is never predicted again. A photograph is identified by its content, and removed from
    the sums as if it had not been learned; classifiers that keep no sums are then dropped and listed. The
    model is not changed, and neither is june.
    """
    if not classes and not image:
        raise ValueError("nothing to forget: name classes, or photographs with --image FILE")
    known = saved_classes(learner)
    for name in classes if known else ():
        learned_name(name, known, "forgotten")
    for path in image:
        check_images([path])
    claim(("--output", output, FOLDER), apart=[learner], overwrite=overwrite)
    loaded = load()
    from dulbe_peft.data.images import content_of
    from dulbe_peft.data.store import store_path
    from dulbe_peft.photos.serving.label_table import carry_labels

    lines, before = [], loaded.state.known.class_of()
    if image:
        from dulbe_peft.classifiers.rule import check_can

        lines = drop_unsupported_classifiers(loaded, lambda each: check_can(each.rule, "forget images"))
        was = [(path, before.get(content_of(Path(path)) or b"")) for path in image if Path(path).is_file()]
        loaded.forget_images(list(image))
        lines += [f"forgotten: {path}, of the class {name!r}" for path, name in was if name is not None]
    for name in dict.fromkeys(classes):
        loaded.forget_class(name)
    lines.append(f"left: {counted(len(loaded.class_names), 'class')}")
    if (store := store_path()).exists():
        lines.append(f"features of the forgotten photographs may still be in {store}; deleting the file removes them")
    write_corrected(loaded, output, lines)
    carry_labels(learner, output, dict.fromkeys(classes), before.keys() - loaded.state.known.class_of().keys())


@command()
@learner_options(encodes=False)
def merge(
    learner: str,
    load: Load,
    other: str = setting(..., "another learner of the same model", place=True),
    output: Folder = setting(..., "folder for the merged learner"),
    overwrite: bool = OVERWRITE,
) -> None:
    """example:
      dulbe-peft merge berlin paris --output both

    Neither learner is changed. If both know a class, their photographs of it are combined. Classifiers that
    only one learner has, or that keep no sums, are dropped and listed. Learners that have learned the same
    photograph cannot be merged.
    """
    check_given(other)
    claim(("--output", output, FOLDER), apart=[learner, other], overwrite=overwrite)
    first, second = load(), load(learner=other)
    from dulbe_peft.classifiers.base import check_alike
    from dulbe_peft.classifiers.rule import check_can
    from dulbe_peft.streams.progress import known_tasks

    def check(classifier: Classifier) -> None:
        if classifier.name not in second.classifiers:
            raise ValueError(f"only {learner} has it")
        check_can(classifier.rule, "merge")
        check_alike(classifier, second.classifiers[classifier.name])

    only_second, before = second.classifiers.keys() - first.classifiers.keys(), set(first.class_names)
    lines = drop_unsupported_classifiers(first, check)
    lines += [f"dropped: {name}: only {other} has it" for name in sorted(only_second)]
    second.keep_classifiers(first.classifiers)
    past = known_tasks(first) + [task for task in known_tasks(second) if set(task.class_names) - before]
    leaks = 0  # images that one learner was tested on and the other has learned
    for a, b in ((first.state.known, second.state.known), (second.state.known, first.state.known)):
        leaks += len({*chain.from_iterable(a.tested.values())} & b.class_of().keys())
    first.merge(second)
    if leaks:
        images, verb = counted(leaks, "test image"), "was" if leaks == 1 else "were"
        lines.append(f"{images} of one learner {verb} learned by the other: the accuracy on them is too optimistic")
    added = len(first.class_names) - len(before)
    lines.append(f"{counted(len(first.class_names), 'class')}, of which {other} added {added}")
    write_corrected(first, output, lines, past)


@command()
@learner_options(encodes=False)
def rename(
    learner: str,
    load: Load,
    old: str = setting(..., "a class that the learner knows", place=True),
    new: str = setting(..., "its new name; if this is also a known class, the two are merged", place=True),
    output: Folder = setting(..., "folder for the learner with the new name"),
    overwrite: bool = OVERWRITE,
) -> None:
    """examples:
      dulbe-peft rename june gull "herring gull" --output june-2
      dulbe-peft rename june kitten cat --output june-2

    The text classifier uses the new name. If the learner already knows the new name, the two classes become
    one class with the photographs of both; classifiers that keep no sums are then dropped and listed. june
    is not changed.
    """
    new = new.strip()  # labels in a table are stripped as well
    if known := saved_classes(learner):
        check_rename(old, new, known)
    claim(("--output", output, FOLDER), apart=[learner], overwrite=overwrite)
    loaded = load()
    from dulbe_peft.classifiers.rule import check_can

    joins = normalized(new) in {*loaded.class_names} - {normalized(old)}
    lines = drop_unsupported_classifiers(loaded, lambda each: check_can(each.rule, "merge")) if joins else []
    loaded.rename_class(old, new)
    both = f", which has the photographs of both classes; {counted(len(loaded.class_names), 'class')}" * joins
    write_corrected(loaded, output, [*lines, f"{old} is now {new}{both}"])
    from dulbe_peft.photos.serving.label_table import carry_labels

    carry_labels(learner, output, {old: new})


def drop_unsupported_classifiers(learner: ClassIncrementalLearner, check: Callable[[Classifier], None]) -> list[str]:
    """Remove the classifiers for which `check` raises an error from a learner; return lines with the reasons."""
    kept, lines = list[str](), list[str]()
    for name, classifier in learner.classifiers.items():
        try:
            check(classifier)
            kept.append(name)
        except (ValueError, TypeError) as error:
            lines.append(f"dropped: {name}: {error}")
    if not kept:
        raise ValueError("; ".join(line.removeprefix("dropped: ") for line in lines))
    if kept[0] != learner.classifier.name:
        lines.append(f"{kept[0]} now predicts instead of {learner.classifier.name}")
    learner.keep_classifiers(kept)
    return lines


def write_corrected(
    learner: ClassIncrementalLearner, output: str, lines: Sequence[str], past: Sequence[FinishedTask] | None = None
) -> None:
    """Print `lines`, and write the learner to `output` with the class names and sources of its finished tasks.

    Their results are left out, because they no longer hold after the correction. `past` replaces the learner's tasks.
    """
    from dulbe_peft.streams.progress import FinishedTask, known_tasks
    from dulbe_peft.streams.run import run_stream

    print("\n".join(lines))
    past = known_tasks(learner) if past is None else past
    sources = [FinishedTask(class_names=list(n), source=t.source) for n, t in zip(learner.tasks, past, strict=True)]
    run_stream(learner, [], output, past=sources)
    print(f"written: {output}")
    if any(learner.state.known.tested.values()):
        from dulbe_peft.photos.runs.setup import tests_of

        source = next((task.source for task in reversed(past) if task.source), None)
        command = next_command("evaluate", output, **tests_of(source))
        print(f"earlier results no longer hold; test the corrected learner: {command}")
    print_next_command("predict", output, "PHOTOS")
