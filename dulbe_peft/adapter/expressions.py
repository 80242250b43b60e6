"""Regular expressions that name layers, in files that a stranger may have written."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

# Python has no public name for the parsed form of an expression.
reader: Any = importlib.import_module("re._parser")
kinds: Any = importlib.import_module("re._constants")
MAX_LENGTH = 1000
MAX_REPEATS = 5
_REPEATS = (kinds.MAX_REPEAT, kinds.MIN_REPEAT)


def check_expression(name: str, expression: str) -> None:
    """Raise a `ValueError` unless an expression is one that Python matches against a layer's name in no time.

    `re` tries every way to split a text among repeats. A repeat within a repeat, such as `(a+)+`, has exponentially
    many ways, and so has an alternative within a repeat, such as `(a|aa)*`. Many repeats in a row have many, too.

    Args:
        name: the setting, for messages.
        expression: what it holds.

    >>> check_expression("target_modules", r".*layers\\.(3|5)\\..*(k|v)_proj")
    """
    if len(expression) > MAX_LENGTH:
        raise ValueError(f"{name} has {len(expression)} characters; an expression may have {MAX_LENGTH}")
    try:
        parsed = reader.parse(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"{name} is {expression!r}, which is no regular expression: {error}") from error
    repeats = list(_open_repeats(parsed))
    if len(repeats) > MAX_REPEATS:
        raise ValueError(f"{name} is {expression!r}: it has {len(repeats)} repeats, at most {MAX_REPEATS} are allowed")
    for repeated in repeats:
        inner = next(_open_repeats(repeated), None) is not None
        if inner or any(kind in (kinds.BRANCH, kinds.GROUPREF) for kind, _ in _parts(repeated)):
            raise ValueError(
                f"{name} is {expression!r}: a repeat or an alternative within a repeat can take for ever; name the "
                "layers in a list"
            )


def _open_repeats(parsed: Any) -> Iterator[Any]:
    """What is repeated, of every repeat that can match more than a few times."""
    for kind, argument in _parts(parsed):
        if kind in _REPEATS and argument[1] > 8:
            yield argument[2]


def _parts(parsed: Any) -> Iterator[tuple[Any, Any]]:
    """Every part of a parsed expression, at any depth."""
    for kind, argument in parsed:
        yield kind, argument
        pending = list(argument) if isinstance(argument, (tuple, list)) else [argument]
        while pending:
            entry = pending.pop()
            if isinstance(entry, reader.SubPattern):
                yield from _parts(entry)
            elif isinstance(entry, (tuple, list)):
                pending += entry
