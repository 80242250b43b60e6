"""examples:
  dulbe-peft forget june "great auk" dodo --output june-without
  dulbe-peft forget june --image photos/train/puffin/17.jpg --output june-without

A forgotten class is never predicted again. A photograph is identified by its content, and removed from
the sums as if it had not been learned; classifiers that keep no sums are then dropped and listed. The
model is not changed, and neither is june.
"""

from pathlib import Path

from dulbe_peft.data.names import learned_name
from dulbe_peft.photos.commands.correcting import drop_unsupported_classifiers, write_corrected
from dulbe_peft.photos.commands.flags import OVERWRITE, File, Folder
from dulbe_peft.photos.commands.options import Load, command, learner_options
from dulbe_peft.photos.commands.paths import FOLDER, check_images, claim, saved_classes
from dulbe_peft.utils.settings import setting
from dulbe_peft.utils.terminal import counted


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
