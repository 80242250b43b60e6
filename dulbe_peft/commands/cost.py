"""`dulbe-peft cost`: parameters, multiply-adds and memory of a configuration, without weights and without data."""

from __future__ import annotations

import argparse
import json
from typing import Any

from dulbe_peft.adapter.config import DualModeLoraConfig
from dulbe_peft.commands.flags import add_flags, settings_of
from dulbe_peft.commands.outputs import check_outputs, output_file
from dulbe_peft.runs.settings import StreamArguments, fields_of, pick
from dulbe_peft.runs.setup import adapted

EXAMPLE = """example:
  dulbe-peft cost --model openai/clip-vit-base-patch16 --classes 100
  dulbe-peft cost --model openai/clip-vit-base-patch16 --target-modules k_proj,v_proj

Of the model its config.json alone is read. All adapter settings of `run` apply.
"""


def add(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser("cost", help="count parameters, multiply-adds and memory", epilog=EXAMPLE)
    parser.add_argument("--config", help="YAML file with settings of run, by their names")
    parser.add_argument("--classes", type=int, help="how many classes (expected_classes of the file, or 100)")
    parser.add_argument("--tasks", type=int, default=10, help="how many tasks (%(default)s)")
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures as JSON, in bytes and whole numbers; -: print"
    )
    add_flags(parser, StreamArguments, ("model", "revision", "strategy", "classifiers"))
    names = [field.name for field in fields_of(DualModeLoraConfig)]
    for flag in add_flags(parser.add_argument_group("adapter"), DualModeLoraConfig, names):
        parser.rare(flag)
    parser.set_defaults(call=show_cost)


def show_cost(arguments: argparse.Namespace) -> int:
    """Count, and print a table or JSON."""
    settings = settings_of(arguments)
    stream: StreamArguments = pick(StreamArguments, settings)
    config: DualModeLoraConfig = pick(DualModeLoraConfig, settings)
    if not stream.model:
        raise ValueError("--model is required")
    check_outputs(("--json", arguments.json, ".json"), inputs=[arguments.config])
    import torch

    from dulbe_peft.classifiers import CLASSIFIERS, make_classifiers
    from dulbe_peft.encoders.loading import embed_dim, empty_encoder, has_text
    from dulbe_peft.metrics.cost import cost, format_cost
    from dulbe_peft.strategies import make_strategy
    from dulbe_peft.utils.checks import check_int
    from dulbe_peft.utils.specs import split_specs

    classes = arguments.classes if arguments.classes is not None else stream.expected_classes or 100
    check_int("classes", classes, 1)
    check_int("tasks", arguments.tasks, 1)
    strategy = make_strategy(stream.strategy)
    model: Any = empty_encoder(stream.model, stream.revision)
    every = [name for name, kind in CLASSIFIERS.items() if has_text(model) or not kind.needs_text]
    specs = every if stream.classifiers is None else split_specs(stream.classifiers)
    with torch.device("meta"):
        classifiers = make_classifiers(specs, embed_dim(model))
    model = adapted(model, config, strategy)
    found = cost(model, strategy, classifiers, classes, arguments.tasks)
    if arguments.json is not None:
        with output_file(arguments.json) as file:
            file.write(json.dumps(found, indent=2) + "\n")
    if arguments.json != "-":
        print(format_cost(found))
    return 0
