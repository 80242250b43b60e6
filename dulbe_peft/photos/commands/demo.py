"""example:
  dulbe-peft demo

Each month brings new digits, and no month is revisited. The demo writes a report like the one that
you get for your own photographs.
"""

from dulbe_peft.photos.commands.advice import print_next_command
from dulbe_peft.photos.commands.flags import OVERWRITE
from dulbe_peft.photos.commands.options import command
from dulbe_peft.photos.commands.paths import FOLDER, claim
from dulbe_peft.utils.settings import setting


@command(kept="finished tasks are kept")
def demo(
    output: str = setting("dulbe-demo", "folder for the learner, the results and the report"),
    compare: bool = setting(False, "compare five tasks with and without training, in half a minute"),
    overwrite: bool = OVERWRITE,
) -> None:
    claim(("--output", output, FOLDER), overwrite=overwrite)
    from dulbe_peft.photos.demo import compare_demo, run_demo

    (compare_demo if compare else run_demo)(output)
    print(f"next: open {output}/report.html in a browser, then")
    print_next_command("check", "YOUR-FOLDER")
