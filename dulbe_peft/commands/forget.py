"""`dulbe-peft forget`: take classes out of a learner."""

from __future__ import annotations

import argparse
from typing import Any

from dulbe_peft.commands.learn import check_other_folder
from dulbe_peft.commands.loading import add_learner, load_learner
from dulbe_peft.commands.parser import Parser

EXAMPLE = """example:
  dulbe-peft forget june "great auk" dodo --output june-without

No image is called by a forgotten class any more. The model stays as it is. june stays, too.
"""


def add(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser: Parser = commands.add_parser("forget", help="take classes out of a learner", epilog=EXAMPLE)
    add_learner(parser)
    parser.add_argument("classes", nargs="+", metavar="CLASS", help="name of a class that the learner knows")
    parser.add_argument("--output", required=True, help="folder for the learner without them")
    parser.set_defaults(call=forget)


def forget(arguments: argparse.Namespace) -> int:
    """Write the learner without the classes."""
    check_other_folder(arguments.learner, arguments.output)
    learner = load_learner(arguments)
    for name in dict.fromkeys(arguments.classes):
        learner.forget_class(name)
    learner.save_pretrained(arguments.output)
    print(f"{len(learner.class_names)} classes are left")
    print(f"written: {arguments.output}")
    return 0
