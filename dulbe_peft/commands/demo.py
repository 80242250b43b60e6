"""`dulbe-peft demo`: a whole stream in half a minute, offline."""

from __future__ import annotations

from dulbe_peft.commands.options import command, option


@command(resumes=True)
@option("--output", default="dulbe-demo", help="folder for results, plot and report (dulbe-demo)")
@option("--seed", type=int, default=0, help="seed of the learner (0)")
def demo(output: str, seed: int) -> int:
    from dulbe_peft.demo import run_demo

    run_demo(output, seed)
    return 0
