"""`dulbe-peft help`: the help of a command."""

from __future__ import annotations

import click

from dulbe_peft.commands.options import argument, command


@command(usage="")
@argument("name", "the command; none: all commands in short", required=False, metavar="[COMMAND]")
def help(name: str | None) -> int:
    """Print the help of a command, or all commands in short."""
    root = click.get_current_context().find_root()
    group = root.command
    assert isinstance(group, click.Group)
    if name is None:
        click.echo(root.get_help())
        return 0
    _, found, _ = group.resolve_command(root, [name])
    assert found is not None
    click.echo(found.get_help(click.Context(found, info_name=name, parent=root)))
    return 0
