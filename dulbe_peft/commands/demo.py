"""`dulbe-peft demo`: a whole stream in half a minute, offline."""

from dulbe_peft.commands.options import command, option
from dulbe_peft.commands.outputs import FOLDER, claim, overwrite_option, say_next


@command(kept="finished tasks are kept")
@option("--output", default="dulbe-demo", help="folder for results, plot and report (dulbe-demo)")
@option("--seed", type=int, default=0, help="seed of the learner (0)")
@overwrite_option
def demo(output: str, seed: int, overwrite: bool) -> int:
    claim(("--output", output, FOLDER), overwrite=overwrite)
    from dulbe_peft.demo import run_demo

    run_demo(output, seed)
    say_next("evaluate", output, "--data", "demo-digits")
    return 0
