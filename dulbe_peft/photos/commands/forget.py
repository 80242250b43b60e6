"""examples:
  dulbe-peft forget june "great auk" dodo --output june-without
  dulbe-peft forget june --image photos/train/puffin/17.jpg --output june-without

No image is called by a forgotten class any more. A photograph is known by its content, and goes out of
the sums as if it had not been learned; classifiers that keep no sums are dropped then, and named. The
model stays as it is. june stays, too.
"""

from dulbe_peft.data.names import learned_name
from dulbe_peft.photos.commands.correcting import drop_classifiers, write_corrected
from dulbe_peft.photos.commands.named import FOLDER, check_images, claim, noted_classes
from dulbe_peft.photos.commands.options import OVERWRITE, File, Folder, Load, command, learner_options
from dulbe_peft.utils.settings import setting
from dulbe_peft.utils.terminal import counted


@command()
@learner_options()
def forget(
    learner: str,
    load: Load,
    classes: tuple[str, ...] = setting((), "names of classes that the learner knows", place=True),
    image: tuple[File, ...] = setting((), "photographs that were learned, wherever they lie now"),
    output: Folder = setting(..., "folder for the learner without them"),
    overwrite: bool = OVERWRITE,
) -> None:
    if not classes and not image:
        raise ValueError("nothing to forget: name classes, or photographs with --image FILE")
    known = noted_classes(learner)
    for name in classes if known else ():
        learned_name(name, known, "forgotten")
    for one in image:
        check_images([one])
    claim(("--output", output, FOLDER), apart=[learner], overwrite=overwrite)
    loaded = load()
    from dulbe_peft.data.store import store_path

    said = []
    if image:
        said = drop_classifiers(loaded, lambda one: one.check_forgets_images())
        loaded.forget_images(list(image))
    for name in dict.fromkeys(classes):
        loaded.forget_class(name)
    said.append(f"left: {counted(len(loaded.class_names), 'class')}")
    if (store := store_path()).exists():
        said.append(
            f"features of the forgotten photographs may still stand in {store}; deleting the file removes them"
        )
    write_corrected(loaded, output, said)
