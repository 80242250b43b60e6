"""Drop the classifiers that a correction does not support, and write the corrected learner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dulbe_peft.photos.commands.advice import next_command, print_next_command

if TYPE_CHECKING:
    from dulbe_peft.classifiers.base import Classifier
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.streams.progress import FinishedTask


def drop_unsupported_classifiers(learner: ClassIncrementalLearner, check: Callable[[Classifier], None]) -> list[str]:
    """Remove the classifiers for which `check` raises an error from a learner; return lines with the reasons."""
    kept: list[str] = []
    lines = []
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
