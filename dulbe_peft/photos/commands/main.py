"""Define the command line, `dulbe-peft` or `python -m dulbe_peft`, and import a command's file when it is called."""

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

import click
from click.shell_completion import shell_complete
from wrapt import register_post_import_hook

from dulbe_peft.utils.extras import explained
from dulbe_peft.utils.files import full_disk
from dulbe_peft.utils.terminal import printable_lines

# Title of a group in the help -> command -> line of help. A command's file has its name, with underscores, or is here.
FILES = {"forget": "correcting", "merge": "correcting", "rename": "correcting"}
GROUPS = {
    "From photographs to predictions": {
        "check": "check a folder of images: counts, duplicates, unreadable files",
        "suggest": "suggest which photographs to label next",
        "run": "learn a folder of images, or a class-incremental stream of them",
        "report": "write a page about runs",
        "learn": "teach a saved learner new classes, or more images of known ones",
        "predict": "predict the classes of images",
        "serve": "open a page in the browser to try a learner",
    },
    "More commands for learners": {
        "demo": "learn three months of handwritten digits, offline, and report on them",
        "evaluate": "test a saved learner on images",
        "forget": "remove classes or single photographs from a learner",
        "rename": "rename a class, or merge it into another class",
        "merge": "merge two learners into one",
        "features": "encode images once, and write their features to a file",
        "export": "export a learner to a format that works without this package",
    },
    "Models and versions": {
        "convert-openclip": "convert an OpenCLIP checkpoint to the layout of transformers",
        "env": "print versions and the accelerator, for a bug report",
    },
}


class Commands(click.Group):
    """The commands of a program, in groups: title -> name of the command -> line of help.

    The file of a command, in `package`, is imported when it is called.
    """

    def __init__(self, program: str, package: str, groups: Mapping[str, Mapping[str, str]], help: str) -> None:
        self.program, self.package, self.groups = program, package, groups
        self.lines = {name: line for group in groups.values() for name, line in group.items()}
        super().__init__(
            commands=dict(self.lines),  # type: ignore[arg-type] # click compares a mistyped name with the keys
            epilog=f"`{program} COMMAND --help` shows a command's flags and an example.",
            subcommand_metavar="COMMAND [ARGS]...",
            no_args_is_help=False,
            context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
            help=help,
        )

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.lines:
            return None
        name = cmd_name.replace("-", "_")
        command: click.Command = getattr(import_module(f"{self.package}.{FILES.get(name, name)}"), name)
        line = self.lines[cmd_name]
        command.name, command.help = cmd_name, line[0].upper() + line[1:] + "."
        return command

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
    """Run a command and return the exit status: 2 after a user error, 128 + its number after a signal."""
    argv = sys.argv[1:] if argv is None else argv
    if sys.stderr is None:  # it was closed; the next file that is opened must not become standard error
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    if sys.stdout is None:
        _print_error(f"{commands.program}: standard output is closed: send it to a file or to /dev/null")
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="surrogateescape")  # file names need not be UTF-8
    # The progress bars of loading models are of no use to a person.
    register_post_import_hook(
        lambda _: import_module("transformers.utils.logging").disable_progress_bar(), "transformers"
    )
    if commands.program == "dulbe-peft" and (instruction := os.environ.get("_DULBE_PEFT_COMPLETE")):
        return shell_complete(commands, {}, "dulbe-peft", "_DULBE_PEFT_COMPLETE", instruction)
    terminated: list[int] = []
    ctx = None
    try:
        with _terminable(terminated), commands.make_context(commands.program, list(argv), obj=argv) as ctx:
            status = int(commands.invoke(ctx) or 0)
            sys.stdout.flush()  # here, so that a closed pipe is noticed below
            return status
    except click.exceptions.Exit as end:  # raised by --help
        return end.exit_code
    except BrokenPipeError:  # the reader, such as `head`, has closed the pipe
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - discards the rest of the output
        return 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1
    except BaseException as error:
        # A signal may also show up as the error of a worker process that it ended.
        if terminated or isinstance(error, KeyboardInterrupt):
            return _stopped(commands, ctx, signal.Signals(terminated[0]) if terminated else signal.SIGINT)
        command = commands.get_command(ctx, ctx.invoked_subcommand) if ctx and ctx.invoked_subcommand else None
        message = _user_error(error, commands.program, command)
        if message is None:
            raise
        _print_error(message)
        return 2


def _user_error(error: BaseException, program: str, command: click.Command | None) -> str | None:
    """Return a one-line message for an error that the user can correct, or None for other errors."""
    if isinstance(error, click.UsageError):
        path = error.ctx.command_path if error.ctx else program
        return f"{path}: {error.format_message()}  See {path} --help."
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO) and error.filename is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - discards the rest of the output
        return f"{program}: standard output cannot be written to: {error.strerror}"
    if full := full_disk(error):
        return f"{program}: {full}"
    # torch raises RuntimeErrors when memory runs out.
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "memory" in str(error)):
        flags = {flag for each in (command.params if command else ()) for flag in each.opts}
        lower = [flag for flag in ("--batch-size", "--pixel-cache-mb") if flag in flags]
        advice = f"lower {' or '.join(lower)}" if lower else "close other programs"
        return f"{program}: there is too little memory, {advice}: {error}"
    from dulbe_peft.utils.folders import CheckpointError

    if isinstance(error, (ValueError, TypeError, OSError, ImportError, CheckpointError)):
        return f"{program}: {explained(error) if isinstance(error, ImportError) else error}"
    return None


def _print_error(text: str) -> None:
    try:
        print(printable_lines(text), file=sys.stderr, flush=True)
    except OSError:  # only the exit status is left to report the error; flushing at exit must not change it
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


@contextmanager
def _terminable(received: list[int]) -> Iterator[None]:
    """Raise an exception on SIGTERM and SIGHUP, as Python does on SIGINT, and append the number to `received`.

    A terminal that is closed sends SIGHUP. If the process ignores it, as under `nohup`, it stays ignored.
    """

    def stop(number: int, _: object) -> None:
        received.append(number)
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {n: signal.signal(n, stop) for n in numbers if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _stopped(commands: Commands, ctx: click.Context | None, number: signal.Signals) -> int:
    """Print how to continue a command that was stopped, and return the exit status."""
    _print_error(f"{commands.program}: stopped by {number.name}")
    name = ctx and ctx.invoked_subcommand
    if ctx and name and (kept := getattr(commands.get_command(ctx, name), "kept", "")):
        given = [word for word in ctx.obj if word != "--overwrite"]  # it would move the finished work out of the way
        module = "dulbe_peft" if commands.program == "dulbe-peft" else "research"
        command = [sys.executable, "-m", module, *given]
        _print_error(f"{kept}; to continue:\n{shlex.join(command)}")
    return 128 + number
