"""example:
  dulbe-peft merge berlin paris --output both

Neither learner is changed. If both know a class, their photographs of it are combined. Classifiers that
only one learner has, or that keep no sums, are dropped and listed. Learners that have learned the same
photograph cannot be merged.
"""

from itertools import chain
from typing import Any

from dulbe_peft.photos.commands.correcting import drop_unsupported_classifiers, write_corrected
from dulbe_peft.photos.commands.flags import OVERWRITE, Folder
from dulbe_peft.photos.commands.options import Load, command, learner_options
from dulbe_peft.photos.commands.paths import FOLDER, check_given, claim
from dulbe_peft.utils.settings import setting
from dulbe_peft.utils.terminal import counted


@command()
@learner_options(encodes=False)
def merge(
    learner: str,
    load: Load,
    other: str = setting(..., "another learner of the same model", place=True),
    output: Folder = setting(..., "folder for the merged learner"),
    overwrite: bool = OVERWRITE,
) -> None:
    check_given(other)
    claim(("--output", output, FOLDER), apart=[learner, other], overwrite=overwrite)
    first, second = load(), load(learner=other)
    from dulbe_peft.classifiers.base import check_alike
    from dulbe_peft.classifiers.rule import check_can
    from dulbe_peft.streams.progress import known_tasks

    def check(classifier: Any) -> None:
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
