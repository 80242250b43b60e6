"""What the commands that correct a learner have in common: what cannot follow is dropped, and the rest is written."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dulbe_peft.photos.commands.named import say_next

if TYPE_CHECKING:
    from dulbe_peft.classifiers.base import Classifier
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.streams.progress import FinishedTask


def drop_classifiers(learner: ClassIncrementalLearner, check: Callable[[Classifier], None]) -> list[str]:
    """Take out of a learner the classifiers for which a check raises an error; gives lines that say why."""
    left: list[str] = []
    said = []
    for name, classifier in learner.classifiers.items():
        try:
            check(classifier)
            left.append(name)
        except (ValueError, TypeError) as error:
            said.append(f"dropped: {name}: {error}")
    if not left:
        raise ValueError("; ".join(line.removeprefix("dropped: ") for line in said))
    if left[0] != learner.classifier.name:
        said.append(f"{left[0]} answers in place of {learner.classifier.name}")
    learner.keep_classifiers(left)
    return said


def write_corrected(
    learner: ClassIncrementalLearner, output: str, said: Sequence[str], past: Sequence[FinishedTask] | None = None
) -> None:
    """Say what was done, and commit a learner; of its tasks, or the `past` ones, only where images came from holds."""
    from dulbe_peft.streams.progress import FinishedTask, known_tasks

    print("\n".join(said))
    past = known_tasks(learner) if past is None else past
    sources = [FinishedTask(class_names=list(n), source=t.source) for n, t in zip(learner.tasks, past, strict=True)]
    learner.run([], output, past=sources)
    print(f"written: {output}")
    if any(learner.state.known.tested.values()):
        from dulbe_peft.photos.runs.sources import tests_of

        source = next((task.source for task in reversed(past) if task.source), None)
        again = shlex.join(["dulbe-peft", "evaluate", output, *tests_of(source)])
        print(f"what was measured before holds no more; {again} tests it anew")
    say_next("predict", output, "PHOTOS")
