"""Short texts that name a thing and its settings, as the command line and the results show them.

ranpac                          a name
ranpac:features=4000,seed=1     a name and settings
bridge:depths=0/0.5/1           a list has slashes between its entries
"""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

_TRUTH = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def split_specs(text: str) -> list[str]:
    """Split a list of specs at its commas; a part `key=value` belongs to the spec before it.

    >>> split_specs("bridge,ranpac:features=4000,seed=1,text")
    ['bridge', 'ranpac:features=4000,seed=1', 'text']
    """
    specs: list[str] = []
    for part in text.split(","):
        if specs and "=" in part and ":" not in part:
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    return specs


def parse_spec(text: str) -> tuple[str, dict[str, str]]:
    """Split `name:key=value,key=value` into the name and the settings, which stay texts.

    >>> parse_spec("ranpac:features=4000,seed=1")
    ('ranpac', {'features': '4000', 'seed': '1'})
    """
    if not isinstance(text, str):
        raise TypeError(f"a name with settings must be a string such as 'name:key=value', got {text!r:.100}")
    name, colon, rest = (part.strip() for part in text.partition(":"))
    if not name:
        raise ValueError(f"{text!r} names nothing; it must be 'name' or 'name:key=value,key=value'")
    values: dict[str, str] = {}
    for entry in rest.split(",") if colon else []:
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not key or not equals:
            raise ValueError(f"{entry!r} in {text!r} is no setting; a setting is key=value")
        if key in values:
            raise ValueError(f"{text!r} gives the setting {key!r} twice")
        values[key] = value
    return name, values


def format_spec(name: str, values: Mapping[str, Any]) -> str:
    """The text that `parse_spec` reads; the inverse of `parse_spec` and `convert`.

    >>> format_spec("bridge", {"depths": [0, 0.5, 1]})
    'bridge:depths=0/0.5/1'
    """
    parts = [f"{key}={_written(value)}" for key, value in values.items()]
    return f"{name}:{','.join(parts)}" if parts else name


def convert(
    target: Callable[..., Any], values: Mapping[str, str], hidden: Collection[str] = (), owner: str = ""
) -> dict[str, Any]:
    """Settings as texts, turned into what the type hints of a class's constructor or of a function ask for.

    A text must not set the `hidden` parameters. Messages call the thing `owner`, or else by the target's name.
    """
    owner = owner or target.__name__
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(target, eval_str=True).parameters.items()
    hints = {name: p.annotation for name, p in parameters if p.kind in by_keyword and name not in hidden}
    converted = {}
    for key, value in values.items():
        if key not in hints:
            raise ValueError(f"{owner} has no setting {key!r}{closest(key, hints)}")
        try:
            converted[key] = _read(value, hints[key])
        except ValueError as error:
            raise ValueError(f"{owner} setting {key}={value!r} must be {_described(hints[key])}") from error
    return converted


def closest(wrong: str, known: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the most similar known one, and all of them."""
    known = list(known)
    similar = difflib.get_close_matches(wrong, known, n=1)
    hint = f"; did you mean {similar[0]!r}?" if similar else ""
    return f"{hint} (known: {', '.join(known) or 'none'})"


def _written(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "/".join(_written(entry) for entry in value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _read(text: str, hint: Any) -> Any:
    """`text` as a value of the type `hint`; the alternatives of a union are tried in the order they are written."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        for alternative in arguments:
            with suppress(ValueError):
                return _read(text, alternative)
    elif origin is typing.Literal:
        words = {_written(choice): choice for choice in arguments}
        if text in words:
            return words[text]
    elif hint is bool and text.lower() in _TRUTH:
        return _TRUTH[text.lower()]
    elif hint in (None, types.NoneType) and text.lower() == "none":
        return None
    elif isinstance(origin, type) and issubclass(origin, Collection):
        entries = [_read(entry, arguments[0]) for entry in text.split("/")]
        return tuple(entries) if origin is tuple else entries
    elif hint in (int, float, str):
        return hint(text)
    raise ValueError(f"{text!r} gives no {hint}")


def _described(hint: Any) -> str:
    """What a text must be to give a value of the type `hint`; types that no text can give are left out."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(filter(None, map(_described, arguments)))
    if origin is typing.Literal:
        return " or ".join(map(_written, arguments))
    if origin is not None:
        return f"{_described(arguments[0])}, or several with / between them"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", types.NoneType: "none"}
    return names.get(hint, "")
