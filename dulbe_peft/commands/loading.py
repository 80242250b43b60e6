"""A learner that a command works on."""

from __future__ import annotations

import argparse
from typing import Any


def add_learner(parser: Any) -> None:
    """The arguments that name a learner."""
    parser.add_argument("learner", help="a saved learner: a run's folder or one of its tasks, or a Hub id")
    parser.add_argument("--model", metavar="MODEL", help="the base model, where it is not where it was")


def load_learner(arguments: argparse.Namespace) -> Any:
    """The learner that the arguments name; they have what `add_learner` added."""
    from dulbe_peft.backbone import load_dual_encoder
    from dulbe_peft.learner import ClassIncrementalLearner

    base = None if arguments.model is None else load_dual_encoder(arguments.model)[0]
    return ClassIncrementalLearner.from_pretrained(arguments.learner, base_model=base)
