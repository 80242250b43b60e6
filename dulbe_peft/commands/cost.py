"""`dulbe-peft cost`: parameters, multiply-adds and memory of a configuration, without weights and without data."""

import json
import sys
from typing import Any

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.commands.options import command, option, setting_options
from dulbe_peft.commands.outputs import as_flags, check_outputs, output_file, overwrite_option, say_next
from dulbe_peft.runs.settings import StreamArguments, given_settings, validated
from dulbe_peft.utils.settings import field_types

_SHOWN = ("model", "revision", "strategy", "classifiers")


@command()
@option("--classes", type=int, help="how many classes (expected_classes of the file, or 100)")
@option("--tasks", type=int, default=10, help="how many tasks (10)")
@option("--json", "file", metavar="FILE", help="write the figures as JSON, in bytes and whole numbers; -: print")
@overwrite_option
@setting_options(_SHOWN, set(field_types(StreamArguments)) - set(_SHOWN) | set(field_types(LearnerArguments)))
def cost(classes: int | None, tasks: int, file: str | None, overwrite: bool, config: str | None, **flags: Any) -> int:
    """example:
      dulbe-peft cost --model openai/clip-vit-base-patch16 --strategy dulbe --classes 100
      dulbe-peft cost --model openai/clip-vit-base-patch16 --strategy dulbe --target-modules k_proj

    Of the model its config.json alone is read. All adapter settings of `run` apply.
    """
    settings = given_settings(config, flags)
    stream, adapter, _ = validated(settings)
    if not stream.model:
        raise ValueError("--model is required")
    check_outputs(("--json", file, ".json"), inputs=[config], overwrite=overwrite)
    import torch

    from dulbe_peft.adapter.config import DualModeLoraConfig
    from dulbe_peft.classifiers import CLASSIFIERS, make_classifiers
    from dulbe_peft.encoders.loading import embed_dim, empty_encoder, has_text
    from dulbe_peft.metrics.cost import cost as count_cost
    from dulbe_peft.metrics.cost import format_cost
    from dulbe_peft.runs.setup import adapted
    from dulbe_peft.strategies import make_strategy
    from dulbe_peft.utils.checks import check_int
    from dulbe_peft.utils.specs import split_specs

    classes = check_int("classes", stream.expected_classes or 100 if classes is None else classes, 1)
    check_int("tasks", tasks, 1)
    strategy = make_strategy(stream.strategy)
    model: Any = empty_encoder(stream.model, stream.revision)
    every = [name for name, kind in CLASSIFIERS.items() if has_text(model) or not kind.needs_text]
    specs = every if stream.classifiers is None else split_specs(stream.classifiers)
    with torch.device("meta"):
        classifiers = make_classifiers(specs, embed_dim(model))
    model = adapted(model, DualModeLoraConfig(**vars(adapter)), strategy)
    found = count_cost(model, strategy, classifiers, classes, tasks)
    if file is not None:
        with output_file(file) as opened:
            opened.write(json.dumps(found, indent=2) + "\n")
    if file != "-":
        print(format_cost(found))
    say_next("run", *as_flags(settings), "--dry-run", to=sys.stderr if file == "-" else sys.stdout)
    return 0
