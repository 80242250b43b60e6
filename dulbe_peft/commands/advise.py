"""`dulbe-peft advise`: what to use for one's own images, found out on held-back training images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dulbe_peft.commands.options import command, option, setting_options
from dulbe_peft.runs.settings import given_settings

EXAMPLE = """example:
  dulbe-peft advise --model openai/clip-vit-base-patch16 --data photos --output advice

It tries every classifier without training, and a few ways to train on the first tasks. Test images are not
looked at. What is finished stays; the same command goes on.
"""
# Settings of `run` that the advice chooses itself, or that have another meaning here.
_HIDDEN = (
    *("strategy", "classifiers", "resume", "dry_run", "validation_fraction", "max_tasks", "output", "drift", "seed"),
)
_SHOWN = ("model", "data", "increment", "images_per_class", "epochs", "prompt_template", "device")


@command(EXAMPLE, "--model MODEL --data DATA [OPTIONS]", resumes=True)
@option("--output", default="advice", help="folder for the runs and advice.json (advice)")
@option("--jobs", type=int, help="runs at once (one a core, or one on an accelerator)")
@option("--no-training", is_flag=True, help="try the classifiers alone, which takes a few minutes")
@option("--classifiers", metavar="A,B,...", help="the classifiers to choose from, with their settings")
@option("--seed", type=int, default=0, help="of what is held back, and of the class order (0)")
@setting_options(_SHOWN, _HIDDEN)
def advise(
    output: str,
    jobs: int | None,
    no_training: bool,
    classifiers: str | None,
    seed: int,
    config: str | None,
    **flags: Any,
) -> int:
    settings = {name: value for name, value in given_settings(config, flags).items() if name not in _HIDDEN}
    for name in ("model", "data"):
        if not settings.get(name):
            raise ValueError(f"--{name} is required")
    from dulbe_peft.comparison.advice import CLASSIFIERS, TRIALS, Advice, advise, format_advice
    from dulbe_peft.utils.folders import check_replaceable
    from dulbe_peft.utils.records import write_record
    from dulbe_peft.utils.specs import split_specs

    folder, trials = Path(output), {} if no_training else TRIALS
    specs = CLASSIFIERS if classifiers is None else split_specs(classifiers)
    path = folder / "advice.json"
    check_replaceable([path], Advice)
    advice = advise(settings, folder, jobs, specs, trials, seed)
    write_record(path, advice)
    print(format_advice(advice))
    print(f"written: {path}")
    return 0
