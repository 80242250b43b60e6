"""example:
  dulbe-peft merge berlin paris --output both

Both stay as they are. Photographs of classes that both know count as further ones. Classifiers that
only one of them has, or that keep no sums, are dropped, and named. Where both have learned the same
photograph, nothing is merged.
"""

from itertools import chain
from typing import Any

from dulbe_peft.photos.commands.correcting import drop_classifiers, write_corrected
from dulbe_peft.photos.commands.named import FOLDER, check_given, claim
from dulbe_peft.photos.commands.options import OVERWRITE, Folder, Load, command, learner_options
from dulbe_peft.utils.settings import setting
from dulbe_peft.utils.terminal import counted


@command()
@learner_options(encodes=False)
def merge(
    learner: str,
    load: Load,
    other: str = setting(..., "another learner of the same model", place=True),
    output: Folder = setting(..., "folder for the learner that knows what both know"),
    overwrite: bool = OVERWRITE,
) -> None:
    check_given(other)
    claim(("--output", output, FOLDER), apart=[learner, other], overwrite=overwrite)
    one, two = load(), load(learner=other)
    from dulbe_peft.classifiers.checks import check_alike
    from dulbe_peft.streams.progress import known_tasks

    def check(mine: Any) -> None:
        if mine.name not in two.classifiers:
            raise ValueError(f"{learner} alone has it")
        mine.check_merges()
        check_alike(mine, two.classifiers[mine.name])

    alone, before = two.classifiers.keys() - one.classifiers.keys(), set(one.class_names)
    said = drop_classifiers(one, check) + [f"dropped: {name}: {other} alone has it" for name in sorted(alone)]
    two.keep_classifiers(one.classifiers)
    past = known_tasks(one) + [task for task in known_tasks(two) if set(task.class_names) - before]
    leaks = 0  # images that one was tested on, and the other has learned
    for mine, theirs in ((one.state.known, two.state.known), (two.state.known, one.state.known)):
        leaks += len({*chain.from_iterable(mine.tested.values())} & theirs.class_of().keys())
    one.merge(two)
    if leaks:
        which = "that tests one of them was" if leaks == 1 else "that test one of them were"
        said.append(f"{counted(leaks, 'image')} {which} learned by the other: later tests say too much")
    brought = f"{other} brought {len(one.class_names) - len(before)}"
    said.append(f"{counted(len(one.class_names), 'class')}, of which {brought}")
    write_corrected(one, output, said, past)
