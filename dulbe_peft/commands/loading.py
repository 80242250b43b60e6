"""A learner that a command works on, and the machine that it works with."""

from __future__ import annotations

import argparse
from typing import Any

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.commands.flags import add_flags
from dulbe_peft.commands.parser import Parser

_MACHINE = ("device", "num_workers", "eval_batch_size", "progress")


def add_learner(parser: Parser, optional: bool = False) -> None:
    """The arguments that name a learner and set the machine.

    Args:
        parser: of the command.
        optional: whether `--model` alone names a pristine model.
    """
    alone = "; without LEARNER: a model that has learned nothing" if optional else ""
    what = "a saved learner: a run's folder, one of its tasks, or a Hub id"
    parser.add_argument("learner", nargs="?" if optional else None, help=what)
    parser.add_argument("--model", metavar="MODEL", help=f"the base model, where it is not where it was{alone}")
    group = parser.add_argument_group("machine")
    for flag in add_flags(group, LearnerArguments, _MACHINE):
        flag.help = str(flag.help).replace(" (default: 0)", "")  # a command may choose


def load_learner(arguments: argparse.Namespace, **defaults: Any) -> Any:
    """The learner that the arguments name.

    Args:
        arguments: have what `add_learner` added.
        defaults: settings of the machine that count where the arguments do not name them; without a learner any.
    """
    if arguments.learner is None and arguments.model is None:
        raise ValueError("name a saved learner, or a pristine model with --model")
    from dulbe_peft.encoders.loading import load_dual_encoder
    from dulbe_peft.learner import ClassIncrementalLearner

    given = defaults | {name: value for name, value in vars(arguments).items() if name in _MACHINE}
    if arguments.learner is None:
        model, processor = load_dual_encoder(arguments.model)
        return ClassIncrementalLearner(model, processor, args=LearnerArguments(**given), strategy="frozen")
    base = None if arguments.model is None else load_dual_encoder(arguments.model)[0]
    return ClassIncrementalLearner.from_pretrained(arguments.learner, base_model=base, machine=given)
