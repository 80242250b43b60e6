"""`dulbe-peft forget`: take classes out of a learner."""

from collections.abc import Callable
from typing import Any

from dulbe_peft.commands.options import argument, command, learner_options, option
from dulbe_peft.commands.outputs import FOLDER, claim, overwrite_option, say_next


@command()
@learner_options(encodes=False)
@argument("classes", "names of classes that the learner knows", nargs=-1, required=True, metavar="CLASS...")
@option("--output", required=True, metavar="FOLDER", help="folder for the learner without them")
@overwrite_option
def forget(learner: str, load: Callable[[], Any], classes: tuple[str, ...], output: str, overwrite: bool) -> int:
    """example:
      dulbe-peft forget june "great auk" dodo --output june-without

    No image is called by a forgotten class any more. The model stays as it is. june stays, too.
    """
    from dulbe_peft.data.store import store_path

    claim(("--output", output, FOLDER), apart=[learner], overwrite=overwrite)
    loaded = load()
    for name in dict.fromkeys(classes):
        loaded.forget_class(name)
    loaded.run([], output)  # which keeps where the images came from, so that none counts twice
    print(f"{len(loaded.class_names)} classes are left")
    if store_path().exists():
        print(
            f"features of the forgotten photographs may still stand in {store_path()}; deleting the file removes them"
        )
    print(f"written: {output}")
    say_next("export", output, f"{output}-export", "--format", "transformers")
    return 0
