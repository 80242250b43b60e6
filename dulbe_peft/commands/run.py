"""`dulbe-peft run`: learn a class-incremental stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dulbe_peft.commands.options import command, setting_options
from dulbe_peft.runs.settings import given_settings, validated

EXAMPLE = """example:
  dulbe-peft run --model openai/clip-vit-base-patch16 --data photos --increment 10 --output out

photos holds train/CLASS/*.jpg and test/CLASS/*.jpg, or CLASS/*.jpg and --test-fraction 0.2.
The same command goes on where a run was stopped, and where classes were added.
"""
# What `--help` shows; `--help-all` shows the rest.
ESSENTIAL = (
    *("model", "data", "output", "strategy", "classifiers", "increment", "test_fraction", "class_order", "dry_run"),
    *("epochs", "learning_rate", "prompt_template", "seed", "num_workers", "device"),
)


@command(EXAMPLE, "--model MODEL --data DATA --output OUT [OPTIONS]", resumes=True)
@setting_options(ESSENTIAL)
def run(config: str | None, **flags: Any) -> int:
    settings = given_settings(config, flags)
    for name in ("model",) if settings.get("dry_run") else ("model", "data", "output"):
        if not settings.get(name):
            raise ValueError(f"--{name} is required")
    stream, *_ = validated(settings)
    if not stream.resume:
        click.get_current_context().meta["to go on"] = ["--resume"]
    from dulbe_peft.commands.dry_run import describe
    from dulbe_peft.report import format_summary
    from dulbe_peft.report.pictures import write_pictures
    from dulbe_peft.runs.setup import set_up
    from dulbe_peft.runs.sources import source_of
    from dulbe_peft.utils.processes import leave, world

    setup = set_up(settings)
    if stream.dry_run:
        describe(setup)
        return 0
    learner = setup.make_learner(setup.args)
    results = learner.run(
        setup.tasks,
        stream.output,
        resume=stream.resume,
        source=source_of(stream),
        check_zero_shot=setup.check_zero_shot,
        test_ahead=stream.test_ahead,
        class_texts=setup.class_texts(),
    )
    if world()[0] == 0:
        write_pictures(stream.output, [task.test for task in setup.tasks], results)
        if "classifiers" in results:
            print(format_summary(results))
        print(f"written: {Path(stream.output) / 'results.json'}")
    leave()
    return 0
