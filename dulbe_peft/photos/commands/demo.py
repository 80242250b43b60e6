"""example:
  dulbe-peft demo

Each month brings digits that are new, and no month is looked at again. Look at the report that it
writes: it is what your own photographs get.
"""

from dulbe_peft.photos.commands.named import FOLDER, claim, say_next
from dulbe_peft.photos.commands.options import OVERWRITE, command
from dulbe_peft.utils.settings import setting


@command(kept="finished tasks are kept")
def demo(
    output: str = setting("dulbe-demo", "folder for learner, results and report"),
    compare: bool = setting(False, "five tasks, with training and without, in one table: half a minute"),
    overwrite: bool = OVERWRITE,
) -> None:
    claim(("--output", output, FOLDER), overwrite=overwrite)
    from dulbe_peft.photos.demo import compare_demo, run_demo

    (compare_demo if compare else run_demo)(output)
    print(f"next: open {output}/report.html in a browser, then")
    say_next("check", "YOUR-FOLDER")
