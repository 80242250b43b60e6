"""`dulbe-peft run`: learn a class-incremental stream."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dulbe_peft.commands.dry_run import describe_model, describe_stream, describe_tasks
from dulbe_peft.commands.flags import add_settings, settings_of
from dulbe_peft.runs.settings import validated
from dulbe_peft.runs.setup import set_up
from dulbe_peft.runs.sources import source_of

EXAMPLE = """example:
  dulbe-peft run --model openai/clip-vit-base-patch16 --data photos --increment 10 --output out

photos holds train/CLASS/*.jpg and test/CLASS/*.jpg, or CLASS/*.jpg and --test-fraction 0.2.
The same command goes on where a run was stopped, and where classes were added.
"""
# What `--help` shows; `--help-all` shows the rest.
ESSENTIAL = {
    "model",
    "data",
    "output",
    "strategy",
    "classifiers",
    "increment",
    "test_fraction",
    "class_order",
    "dry_run",
    "epochs",
    "learning_rate",
    "prompt_template",
    "seed",
    "num_workers",
    "device",
}


def add(commands: Any) -> None:
    """Add the command to the parser's commands."""
    usage = "dulbe-peft run --model MODEL --data DATA --output OUT [settings]"
    parser = commands.add_parser(
        "run", help="learn a class-incremental stream and write results.json", usage=usage, epilog=EXAMPLE
    )
    parser.add_argument("--config", help="YAML file with any of the settings, by their names")
    add_settings(parser, ESSENTIAL)
    parser.set_defaults(call=run, resumes=True)


def run(arguments: argparse.Namespace) -> int:
    """Learn, or say what would be learned."""
    settings = settings_of(arguments)
    validated(settings)
    dry = settings.get("dry_run", False)
    for name in ("model",) if dry else ("model", "data", "output"):
        if not settings.get(name):
            raise ValueError(f"--{name} is required")
    setup = set_up(settings)
    from dulbe_peft.report import format_summary
    from dulbe_peft.report.pictures import write_pictures
    from dulbe_peft.utils.processes import leave, world

    stream = setup.stream
    if dry:
        if setup.tasks is not None:
            print(describe_tasks(setup.tasks))
        print(describe_model(setup.model, setup.strategy))
        if setup.tasks is not None:
            print(describe_stream(setup.make_learner, setup.args, setup.tasks))
        return 0
    learner = setup.make_learner(setup.args)
    results = learner.run(
        setup.tasks,
        stream.output,
        resume=stream.resume,
        source=source_of(stream),
        check_zero_shot=setup.check_zero_shot,
        test_ahead=stream.test_ahead,
    )
    if world()[0] == 0:
        write_pictures(stream.output, [task.test for task in setup.tasks], results)
        if "classifiers" in results:
            print(format_summary(results))
        print(f"written: {Path(stream.output) / 'results.json'}")
    leave()
    return 0
