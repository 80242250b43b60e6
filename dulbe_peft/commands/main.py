"""The command line, `dulbe-peft` or `python -m dulbe_peft`. Every command has a file in `commands`."""

from __future__ import annotations

import argparse
import io
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging as transformers_logging

from dulbe_peft.commands import (
    advise,
    compare,
    convert_openclip,
    cost,
    demo,
    env,
    evaluate,
    export,
    features,
    forget,
    learn,
    predict,
    report,
    run,
)
from dulbe_peft.commands.flags import settings_of
from dulbe_peft.commands.parser import Parser
from dulbe_peft.utils.folders import CheckpointError, library_versions

COMMANDS = (
    *(demo, run, learn, forget, predict, evaluate, features, report, advise, compare, export),
    *(cost, convert_openclip, env),
)
EXAMPLE = """`dulbe-peft COMMAND --help` shows a command's flags and an example.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status, 2 for an error of the user's, 130, 141 or 143 after a signal."""
    argv = sys.argv[1:] if argv is None else argv
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # file names need not be UTF-8
    transformers_logging.disable_progress_bar()  # a bar for each model that is loaded says nothing to a person
    # PEFT reads an attribute that transformers renamed. Nothing that the user does can change that.
    warnings.filterwarnings("ignore", r"`is_gradient_checkpointing` is deprecated", FutureWarning)
    arguments = make_parser().parse_args(argv)
    terminated: list[int] = []
    try:
        with _terminable(terminated):
            status = arguments.call(arguments)
            sys.stdout.flush()  # here, where a reader that has gone away can be noticed
            return status
    except (KeyboardInterrupt, SystemExit) as stop:
        return _stopped(arguments, argv, signal.SIGTERM if isinstance(stop, SystemExit) else signal.SIGINT)
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is still to be written goes nowhere
        return 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1
    except (ValueError, TypeError, OSError, ImportError, CheckpointError) as error:
        if terminated:  # the signal ended a process that reads images, too, and its end is this error
            return _stopped(arguments, argv, signal.SIGTERM)
        print(f"dulbe-peft: {error}", file=sys.stderr)
        return 2


def make_parser() -> Parser:
    """The parser of all commands."""
    description = "Image classifiers on CLIP that keep learning new classes."
    parser = Parser(prog="dulbe-peft", description=description, epilog=EXAMPLE)
    version = f"dulbe_peft {library_versions()['dulbe_peft']}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(required=True, title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser


@contextmanager
def _terminable(received: list[int]) -> Iterator[None]:
    """Make SIGTERM an exception, as SIGINT is one, and note it in `received`."""

    def stop(number: int, _: object) -> None:
        received.append(number)
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def _stopped(arguments: argparse.Namespace, argv: list[str], number: signal.Signals) -> int:
    """Say how to go on with a stream that was stopped; returns the exit status."""
    print(f"dulbe-peft: stopped by {number.name}", file=sys.stderr)
    if getattr(arguments, "resumes", False):
        off = hasattr(arguments, "config") and not settings_of(arguments).get("resume", True)
        command = [sys.executable, "-m", "dulbe_peft", *argv, *(["--resume"] if off else [])]
        print(f"finished tasks are kept; to go on:\n{shlex.join(command)}", file=sys.stderr)
    return 128 + number
