"""What the commands that correct a learner have in common: what cannot follow is dropped, and the rest is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dulbe_peft.commands.outputs import say_next

if TYPE_CHECKING:
    from dulbe_peft.classifiers import Classifier
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.runs.progress import FinishedTask


def reasons_of(learner: ClassIncrementalLearner, check: Callable[[Classifier], None]) -> dict[str, str]:
    """The classifiers of a learner for which a check raises an error -> what it says."""
    reasons = {}
    for name, classifier in learner.classifiers.items():
        try:
            check(classifier)
        except (ValueError, TypeError) as error:
            reasons[name] = str(error)
    return reasons


def drop_classifiers(learner: ClassIncrementalLearner, reasons: Mapping[str, str]) -> list[str]:
    """Take classifiers out of a learner; gives lines that say why, to be printed once all is done."""
    left = {name: one for name, one in learner.classifiers.items() if name not in reasons}
    if not left:
        raise ValueError("; ".join(reasons.values()))
    said = [f"dropped: {name}: {why}" for name, why in reasons.items()]
    if next(iter(left)) != learner.classifier.name:
        said.append(f"{next(iter(left))} answers in place of {learner.classifier.name}")
    learner.state = replace(learner.state, classifiers=left)
    return said


def write_corrected(learner: ClassIncrementalLearner, output: str, past: Sequence[FinishedTask] | None = None) -> None:
    """Commit a learner that was corrected. What runs have measured holds no more, but for where images came from.

    `past` is what was known of its tasks, where another learner was merged in.
    """
    from dulbe_peft.runs.progress import FinishedTask, known_tasks

    past = known_tasks(learner) if past is None else past
    sources = [FinishedTask(class_names=list(n), source=t.source) for n, t in zip(learner.tasks, past, strict=True)]
    learner.run([], output, past=sources)
    print(f"written: {output}")
    if any(learner.state.known.tested.values()):
        print("what was measured before holds no more: dulbe-peft evaluate tests it anew")
    say_next("predict", output, "PHOTOS")
