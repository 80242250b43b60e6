"""The command line, `dulbe-peft` or `python -m dulbe_peft`. A command's file is imported when it is called."""

import errno
import io
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import click
from click.shell_completion import shell_complete
from wrapt import register_post_import_hook

from dulbe_peft.utils.extras import explained
from dulbe_peft.utils.terminal import printable_lines

# What stands in the help, group by group; a command's file has its name with underscores.
GROUPS = {
    "From photographs to answers": {
        "check": "look through a folder of images: counts, duplicates, files that cannot be read",
        "suggest": "which photographs to label next",
        "run": "learn a folder of images, or a class-incremental stream of them",
        "report": "write a page about runs",
        "learn": "give a finished learner new classes, and more images of known ones",
        "predict": "name the classes of images",
        "serve": "open a page in the browser to try a learner",
    },
    "More of the same": {
        "demo": "learn three months of handwritten digits, offline, and report on them",
        "evaluate": "test a saved learner on images",
        "forget": "take classes or single photographs out of a learner",
        "rename": "give a class another name, or join it with another class",
        "merge": "make one learner of two",
        "features": "encode images once, and write their features to a file",
        "export": "write a learner in a form that works without this package",
    },
    "Methods and models": {
        "convert-openclip": "bring an OpenCLIP checkpoint into the layout of transformers",
        "env": "print versions and the accelerator, for a bug report",
    },
}


class Commands(click.Group):
    """All commands of a program; the file of a command is imported when it is called.

    `package` has the files, and `groups` has title -> name -> line of help.
    """

    def __init__(self, program: str, package: str, groups: Mapping[str, Mapping[str, str]], **settings: Any) -> None:
        self.program, self.package, self.groups = program, package, groups
        self.lines = {name: line for group in groups.values() for name, line in group.items()}
        super().__init__(
            commands=dict(self.lines),  # type: ignore[arg-type] # what click compares a mistyped name with
            epilog=f"`{program} COMMAND --help` shows a command's flags and an example.",
            subcommand_metavar="COMMAND [ARGS]...",
            no_args_is_help=False,
            context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
            **settings,
        )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lines:
            return None
        name = cmd_name.replace("-", "_")
        made: click.Command = getattr(import_module(f"{self.package}.{name}"), name)
        made.name, made.help = cmd_name, self.lines[cmd_name].capitalize() + "."
        return made

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, group in self.groups.items():
            with formatter.section(title):
                formatter.write_dl(list(group.items()))


commands = Commands(
    "dulbe-peft",
    __package__,
    GROUPS,
    help="A PEFT adapter library with which CLIP models keep learning new classes.",
)
click.version_option(import_module("dulbe_peft").__version__, message="dulbe_peft %(version)s")(commands)


def main(argv: list[str] | None = None, commands: Commands = commands) -> int:
    """Run a command; returns the exit status, 2 for an error of the user's, 128 and its number for a signal."""
    argv = sys.argv[1:] if argv is None else argv
    if sys.stderr is None:  # somebody closed it; the next file that is opened must not take its place
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        _complain(f"{commands.program}: standard output is closed: send it to a file, or to /dev/null")
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # file names need not be UTF-8
    # A bar for each model that is loaded says nothing to a person.
    register_post_import_hook(
        lambda _: import_module("transformers.utils.logging").disable_progress_bar(), "transformers"
    )
    if commands.program == "dulbe-peft" and (asked := os.environ.get("_DULBE_PEFT_COMPLETE")):
        return shell_complete(commands, {}, "dulbe-peft", "_DULBE_PEFT_COMPLETE", asked)
    terminated: list[int] = []
    ctx = None
    try:
        with _terminable(terminated), commands.make_context(commands.program, list(argv), obj=argv) as ctx:
            status = int(commands.invoke(ctx) or 0)
            sys.stdout.flush()  # here, where a reader that has gone away can be noticed
            return status
    except click.exceptions.Exit as end:  # of --help
        return end.exit_code
    except BrokenPipeError:  # the reader has seen enough, as `head` does
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is still to be written goes nowhere
        return 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1
    except BaseException as error:
        if terminated or isinstance(error, KeyboardInterrupt):  # or what a process raised that the signal ended, too
            return _stopped(commands, ctx, signal.SIGTERM if terminated else signal.SIGINT)
        said = _said_of(error, commands.program)
        if said is None:
            raise
        _complain(said)
        return 2


def _said_of(error: BaseException, program: str) -> str | None:
    """One line about an error of the user's; None for another one."""
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else program
        return f"{path}: {error.format_message()}  {path} --help lists what there is."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO) and error.filename is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - what is still to be written goes nowhere
        return f"{program}: standard output cannot be written to: {error.strerror}"
    # torch's own errors of this kind are RuntimeErrors.
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):
        return f"{program}: there is too little memory, lower --batch-size or --pixel-cache-mb: {error}"
    from dulbe_peft.utils.folders import CheckpointError

    if isinstance(error, (ValueError, TypeError, OSError, ImportError, CheckpointError)):
        return f"{program}: {explained(error) if isinstance(error, ImportError) else error}"
    return None


def _complain(text: str) -> None:
    try:
        print(printable_lines(text), file=sys.stderr, flush=True)
    except OSError:  # nobody can be told: the exit status says it, and Python's own last write must not change it
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


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


def _stopped(commands: Commands, ctx: click.Context | None, number: signal.Signals) -> int:
    """Say how to go on with a command that was stopped; returns the exit status."""
    _complain(f"{commands.program}: stopped by {number.name}")
    name = ctx and ctx.invoked_subcommand
    if ctx and name and (kept := getattr(commands.get_command(ctx, name), "kept", "")):
        given = [word for word in ctx.obj if word != "--overwrite"]  # which would put aside what is kept
        module = "dulbe_peft" if commands.program == "dulbe-peft" else "research"
        command = [sys.executable, "-m", module, *given]
        _complain(f"{kept}; to go on:\n{shlex.join(command)}")
    return 128 + number
