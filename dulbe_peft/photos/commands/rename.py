"""examples:
  dulbe-peft rename june gull "herring gull" --output june-2
  dulbe-peft rename june kitten cat --output june-2

The text classifier is asked for the new name. Where the new name is known, the photographs of both
classes are those of one; classifiers that keep no sums are dropped then, and named. june stays as it
is.
"""

from dulbe_peft.data.names import check_rename, normalized
from dulbe_peft.photos.commands.correcting import drop_classifiers, write_corrected
from dulbe_peft.photos.commands.named import FOLDER, claim, noted_classes
from dulbe_peft.photos.commands.options import OVERWRITE, Folder, Load, command, learner_options
from dulbe_peft.utils.settings import setting
from dulbe_peft.utils.terminal import counted


@command()
@learner_options(encodes=False)
def rename(
    learner: str,
    load: Load,
    old: str = setting(..., "a class that the learner knows", place=True),
    new: str = setting(..., "its new name; a class that the learner knows, too, becomes one with it", place=True),
    output: Folder = setting(..., "folder for the learner with the new name"),
    overwrite: bool = OVERWRITE,
) -> None:
    new = new.strip()  # as labels of a table are
    if known := noted_classes(learner):
        check_rename(old, new, known)
    claim(("--output", output, FOLDER), apart=[learner], overwrite=overwrite)
    loaded = load()
    joins = normalized(new) in {*loaded.class_names} - {normalized(old)}
    said = drop_classifiers(loaded, lambda one: one.check_merges()) if joins else []
    loaded.rename_class(old, new)
    both = f", which has the photographs of both; {counted(len(loaded.class_names), 'class')}" * joins
    write_corrected(loaded, output, [*said, f"{old} is {new} by now{both}"])
