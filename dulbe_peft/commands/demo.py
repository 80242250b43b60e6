"""`dulbe-peft demo`: three months of digits in seconds, offline."""

from dulbe_peft.commands.options import command, option
from dulbe_peft.commands.outputs import FOLDER, claim, overwrite_option, say_next


@command(kept="finished tasks are kept")
@option("--output", default="dulbe-demo", help="folder for learner, results and report (dulbe-demo)")
@option("--compare", is_flag=True, help="five tasks, with training and without, in one table: half a minute")
@option("--seed", type=int, default=0, help="seed of the learner (0)")
@overwrite_option
def demo(output: str, compare: bool, seed: int, overwrite: bool) -> int:
    """example:
      dulbe-peft demo

    Each month brings digits that are new, and no month is looked at again. Look at the report that it
    writes: it is what your own photographs get.
    """
    claim(("--output", output, FOLDER), overwrite=overwrite)
    from dulbe_peft.demo import compare_demo, run_demo

    (compare_demo if compare else run_demo)(output, seed)
    print(f"next: open {output}/report.html in a browser, then")
    say_next("check", "YOUR-FOLDER")
    return 0
