"""examples:
  dulbe-peft rename june gull "herring gull" --output june-2
  dulbe-peft rename june kitten cat --output june-2

The text classifier uses the new name. If the learner already knows the new name, the two classes become
one class with the photographs of both; classifiers that keep no sums are then dropped and listed. june
is not changed.
"""

from dulbe_peft.data.names import check_rename, normalized
from dulbe_peft.photos.commands.correcting import drop_unsupported_classifiers, write_corrected
from dulbe_peft.photos.commands.flags import OVERWRITE, Folder
from dulbe_peft.photos.commands.options import Load, command, learner_options
from dulbe_peft.photos.commands.paths import FOLDER, claim, saved_classes
from dulbe_peft.utils.settings import setting
from dulbe_peft.utils.terminal import counted


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
