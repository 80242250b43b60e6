"""`dulbe-peft advise`: what to use for one's own images, found out on held-back training images."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dulbe_peft.commands.flags import add_settings, settings_of

EXAMPLE = """example:
  dulbe-peft advise --model openai/clip-vit-base-patch16 --data photos --output advice

It tries every classifier without training, and a few ways to train on the first tasks. Test images are not
looked at. What is finished stays; the same command goes on.
"""
_HIDDEN = {
    "strategy",
    "classifiers",
    "resume",
    "dry_run",
    "validation_fraction",
    "max_tasks",
    "output",
    "drift",
    "seed",
}
_SHOWN = {"model", "data", "increment", "images_per_class", "epochs", "prompt_template", "device"}


def add(commands: Any) -> None:
    """Add the command to the parser's commands."""
    usage = "dulbe-peft advise --model MODEL --data DATA [settings]"
    parser = commands.add_parser("advise", help="say what to use for one's own images", usage=usage, epilog=EXAMPLE)
    parser.add_argument("--output", default="advice", help="folder for the runs and advice.json (%(default)s)")
    parser.add_argument("--jobs", type=int, help="runs at once (one a core, or one on an accelerator)")
    parser.add_argument(
        "--no-training", action="store_true", help="try the classifiers alone, which takes a few minutes"
    )
    parser.add_argument("--classifiers", metavar="A,B,...", help="the classifiers to choose from, with their settings")
    parser.add_argument(
        "--seed", type=int, default=0, help="of what is held back, and of the class order (%(default)s)"
    )
    parser.add_argument("--config", help="YAML file with settings of run, by their names")
    add_settings(parser, _SHOWN, _HIDDEN)
    parser.set_defaults(call=advise, resumes=True)


def advise(arguments: argparse.Namespace) -> int:
    """Measure, and say what was found."""
    from dulbe_peft.comparison.advice import CLASSIFIERS, TRIALS, Advice, advise, format_advice
    from dulbe_peft.comparison.comparison_file import check_replaceable
    from dulbe_peft.utils.records import write_record
    from dulbe_peft.utils.specs import split_specs

    settings = {name: value for name, value in settings_of(arguments).items() if name not in _HIDDEN}
    for name in ("model", "data"):
        if not settings.get(name):
            raise ValueError(f"--{name} is required")
    output, trials = Path(arguments.output), {} if arguments.no_training else TRIALS
    specs = CLASSIFIERS if arguments.classifiers is None else split_specs(arguments.classifiers)
    path = output / "advice.json"
    check_replaceable(path, Advice)
    advice = advise(settings, output, arguments.jobs, specs, trials, arguments.seed)
    write_record(path, advice)
    print(format_advice(advice))
    print(f"written: {path}")
    return 0
