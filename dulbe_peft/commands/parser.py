"""A parser whose help fits a screen, and whose errors are one line with a hint."""

from __future__ import annotations

import argparse
import difflib
import shutil
from collections.abc import Sequence
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` for a command with many flags.

    Flags that were added with `rare=True` appear in `--help-all` alone. An unknown flag is answered by the most
    similar known one. Flags cannot be shortened: a shortened one could mean something else in the next version.
    """

    def __init__(self, **settings: Any) -> None:
        fixed: dict[str, Any] = {"formatter_class": _Formatter, "allow_abbrev": False}
        super().__init__(**fixed | settings)
        self._rare: set[argparse.Action] = set()
        self._given: list[str] = []

    def rare(self, action: argparse.Action) -> None:
        """Show an action in `--help-all` alone."""
        if not self._rare:
            self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all settings and exit")
        self._rare.add(action)

    def format_help(self, everything: bool = False) -> str:
        if everything or not self._rare:
            return super().format_help()
        shown = {action: action.help for action in self._rare}
        try:
            for action in shown:
                action.help = argparse.SUPPRESS
            return super().format_help()
        finally:
            for action, text in shown.items():
                action.help = text

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = [] if args is None else list(args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            self.error(f"unknown argument {unknown[0]!r}" if not unknown[0].startswith("-") else "")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        known = [option for option in self._option_string_actions if option.startswith("--")]
        flags = [part.partition("=")[0] for part in self._given if part.startswith("-") and part != "-"]
        strange = [] if self._subparsers is not None else [f for f in flags if f not in self._option_string_actions]
        strange = [flag for flag in strange if not _is_number(flag)]
        if strange:
            similar = difflib.get_close_matches(strange[0], known, n=1)
            hint = f"; did you mean {similar[0]}?" if similar else f"; {self.prog} --help lists the known ones"
            message = f"unknown flag {strange[0]}{hint}"
        elif "required: COMMAND" in message:
            message = f"a command is missing; {self.prog} --help lists them"
        elif "invalid choice" in message and self._subparsers is not None:
            message = self._unknown_command() or message
        self.exit(2, f"{self.prog}: {message}\n")

    def _unknown_command(self) -> str | None:
        """What to say of a mistyped command; None where the first word is a command."""
        word = next((part for part in self._given if not part.startswith("-")), "")
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction) and word not in action.choices:
                similar = difflib.get_close_matches(word, action.choices, n=1)
                known = f"the commands are {', '.join(action.choices)}"
                return f"unknown command {word!r}; " + (f"did you mean {similar[0]!r}?" if similar else known)
        return None


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help texts as wide as the terminal, up to 100 columns, and examples as they are."""

    def __init__(self, prog: str, **_: Any) -> None:
        width = min(100, shutil.get_terminal_size((100, 24)).columns) - 2
        super().__init__(prog, max_help_position=30, width=width)


class _HelpAll(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, namespace: Any, values: str | Sequence[Any] | None, option: Any = None
    ) -> NoReturn:
        assert isinstance(parser, Parser)
        print(parser.format_help(everything=True), end="")
        parser.exit()
