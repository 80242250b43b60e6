"""The command to run next. It keeps those flags of this call that it has, too, such as --only and --device."""

import shlex
import sys
from collections.abc import Iterator
from typing import IO

import click
from click.core import ParameterSource

from dulbe_peft.photos.commands.paths import OUTPUTS


def print_next_command(command: str, *words: object, to: IO[str] | None = None, **flags: object) -> None:
    """Print the command that the user will probably want to run next, see `next_command`."""
    print(f"next: {next_command(command, *words, **flags)}", file=to or sys.stdout)


def next_command(command: str, *words: object, **flags: object) -> str:
    """Return a command line with the flags of this call that mean the same there.

    A flag means the same in both commands if its help does, up to a semicolon. Flags of outputs are left out.

    Args:
        command: Name of the command.
        words: Its arguments.
        flags: Flags to add, or to use instead of those of this call; None leaves a flag out.
    """
    own = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
    line = [command, *map(str, words)]
    for flag, value in own.items():
        line += [] if value is None else [flag, _text(value)]
    for option, given in _kept(command):
        line += [] if {*option.opts} & own.keys() else given
    return f"dulbe-peft {shlex.join(line)}"


def _kept(command: str) -> Iterator[tuple[click.Option, list[str]]]:
    """Yield the options that this call was given and that another command has, with the words that give them."""
    context = click.get_current_context(silent=True)
    if context is None or not isinstance(group := context.find_root().command, click.Group):
        return
    following = group.get_command(context, command)
    options = [each for each in (following.params if following else ()) if isinstance(each, click.Option)]
    theirs, written = {_meaning(option) for option in options}, {*context.meta.get(OUTPUTS, ()), "--overwrite"}
    for option in context.command.params:
        name = option.name or ""
        if not isinstance(option, click.Option) or _meaning(option) not in theirs or written & {*option.opts}:
            continue
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE or name not in context.params:
            continue
        value, flag = context.params[name], option.opts[0]
        if option.is_flag:
            yield option, [flag if value else option.secondary_opts[0]]
        else:
            yield option, [word for each in (value if option.multiple else [value]) for word in (flag, _text(each))]


def _meaning(option: click.Option) -> tuple[str, str]:
    """Return what two options that mean the same share: the flag, and the help without remarks on the command."""
    return option.opts[0], (option.help or "").partition(";")[0]


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
