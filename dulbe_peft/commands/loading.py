"""A learner that a command works on, and the machine that it works with."""

from __future__ import annotations

import argparse
from typing import Any

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.commands.parser import Parser
from dulbe_peft.commands.settings import add_flag, fields_of, types_of

_MACHINE = ("device", "num_workers", "eval_batch_size", "progress")


def add_learner(parser: Parser) -> None:
    """The arguments that name a learner and set the machine."""
    parser.add_argument("learner", help="a saved learner: a run's folder, one of its tasks, or a Hub id")
    parser.add_argument("--model", metavar="MODEL", help="the base model, where it is not where it was")
    group = parser.add_argument_group("machine")
    hints = types_of(LearnerArguments)
    for field in fields_of(LearnerArguments):
        if field.name in _MACHINE:
            action = add_flag(group, field, hints[field.name])
            action.help = str(action.help).replace(" (default: 0)", "")  # a command may choose


def load_learner(arguments: argparse.Namespace, **defaults: Any) -> Any:
    """The learner that the arguments name.

    Args:
        arguments: have what `add_learner` added.
        defaults: settings of the machine that count where the arguments do not name them.
    """
    from dulbe_peft.backbone import load_dual_encoder
    from dulbe_peft.learner import ClassIncrementalLearner

    base = None if arguments.model is None else load_dual_encoder(arguments.model)[0]
    given = {name: value for name, value in vars(arguments).items() if name in _MACHINE}
    return ClassIncrementalLearner.from_pretrained(arguments.learner, base_model=base, machine=defaults | given)
