"""example:
  python -m research figures out --output pictures

Nothing is measured again: a figure is left out if the run did not keep its data.
"""

from dulbe_peft.photos.commands.flags import OVERWRITE, Folder
from dulbe_peft.photos.commands.options import command
from dulbe_peft.photos.commands.paths import FOLDER, claim
from dulbe_peft.utils.settings import setting


@command()
def figures(
    run: str = setting(..., "folder that run wrote", place=True),
    output: Folder = setting(..., "folder for the figures, and for their numbers in diagnostics.json"),
    overwrite: bool = OVERWRITE,
) -> None:
    claim(("--output", output, FOLDER), overwrite=overwrite)
    from research.diagnostics.training_effects import write_figures

    for path in write_figures(run, output):
        print(f"written: {path}")
