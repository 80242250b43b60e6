"""`dulbe-peft demo`: a whole stream in half a minute, offline."""

from __future__ import annotations

import argparse
from typing import Any


def add(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser("demo", help="learn ten handwritten digits in five tasks, offline, in half a minute")
    parser.add_argument("--output", default="dulbe-demo", help="folder for results, plot and report (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the learner (%(default)s)")
    parser.set_defaults(call=demo, resumes=True)


def demo(arguments: argparse.Namespace) -> int:
    """Run the demo."""
    from dulbe_peft.demo import run_demo

    run_demo(arguments.output, arguments.seed)
    return 0
