"""The fields of settings as flags of a command."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from dulbe_peft.commands.parser import Parser
from dulbe_peft.runs.settings import _GROUPS, _hints, _templates, fields_of, read_yaml, setting_values, types_of


def add_settings(parser: Parser, shown: Collection[str], hidden: Collection[str] = ()) -> None:
    """Make the settings of a run flags of a command.

    Args:
        parser: of the command.
        shown: those that `--help` shows; `--help-all` shows the others, too.
        hidden: those that the command does not have.
    """
    for title, cls in _GROUPS.items():
        names = [setting.name for setting in fields_of(cls) if setting.name not in hidden]
        for flag in add_flags(parser.add_argument_group(title), cls, names):
            if flag.dest not in shown:
                parser.rare(flag)


def add_flags(group: Any, cls: Any, names: Collection[str]) -> list[argparse.Action]:
    """Make the named fields of a dataclass flags of the group; their defaults are left to the dataclass."""
    hints = types_of(cls)
    return [_add_flag(group, setting, hints[setting.name]) for setting in fields_of(cls) if setting.name in names]


def _add_flag(group: Any, setting: Any, hint: Any) -> argparse.Action:
    default = "" if setting.default in (None, "") else f" (default: {setting.default})"
    text = (setting.metadata["help"] + default).replace("%", "%%")
    facts: dict[str, Any] = {"dest": setting.name, "help": text, "default": argparse.SUPPRESS}
    if hint is bool:
        facts |= {"action": argparse.BooleanOptionalAction}
    elif setting.metadata.get("repeated"):
        facts |= {"action": "append", "metavar": "STR"}
    else:
        kinds = get_args(hint) or (hint,)  # of list[int] | int | None: list[int], int and None's type
        if get_origin(hint) is Literal:
            facts["choices"] = kinds
        else:
            facts["type"] = _converter(kinds)
            facts["metavar"] = "A,B,..." if get_origin(kinds[0]) is list else kinds[0].__name__.upper()
    return group.add_argument("--" + setting.name.replace("_", "-"), **facts)


def _converter(kinds: tuple[Any, ...]) -> Any:
    """How a flag's text becomes one of the field's types; commas separate the entries of a list."""
    if list[int] in kinds:
        return lambda text: [int(part) for part in text.split(",")]
    if list[str] in kinds and str in kinds:
        return lambda text: text.split(",") if re.fullmatch(r"[\w.,]+", text) else text
    return (lambda text: text.split(",")) if list[str] in kinds else kinds[0]


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The YAML file's settings, with the flags' on top."""
    settings: dict[str, Any] = {}
    if arguments.config:
        path = Path(arguments.config)
        settings = setting_values(read_yaml(path, "configuration"), f"configuration file {str(path)!r}")
    given = {name: value for name, value in vars(arguments).items() if name in _hints()}
    return settings | given | _templates(given)
