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

    Raises:
        TypeError: `text` is not a string.
        ValueError: the name is missing, a setting has no `=`, or a key is missing or occurs twice.

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

    Args:
        target: the class or function that will take the settings.
        values: the settings.
        hidden: parameters of `target` that a text must not set.
        owner: what error messages call the thing; the target's name where it is empty.

    Raises:
        ValueError: a key is unknown, or a value does not have the type that its parameter asks for.
    """
    owner = owner or target.__name__
    known = [name for name in setting_names(target) if name not in hidden]
    parameters = inspect.signature(target, eval_str=True).parameters
    hints = {name: parameters[name].annotation for name in known}
    converted = {}
    for key, value in values.items():
        if key not in known:
            raise ValueError(f"{owner} has no setting {key!r}{closest(key, known)}")
        try:
            converted[key] = _read(value, hints[key])
        except ValueError as error:
            raise ValueError(f"{owner} setting {key}={value!r} must be {_described(hints[key])}") from error
    return converted


def setting_names(target: Callable[..., Any]) -> list[str]:
    """Names of the parameters that can be given by keyword to a class's constructor or to a function."""
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [name for name, parameter in inspect.signature(target).parameters.items() if parameter.kind in by_keyword]


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
            try:
                return _read(text, alternative)
            except ValueError:
                continue
        raise ValueError(text)
    if origin is typing.Literal:
        for choice in arguments:
            if _written(choice) == text:
                return choice
        raise ValueError(text)
    if hint is bool:
        if text.lower() not in _TRUTH:
            raise ValueError(text)
        return _TRUTH[text.lower()]
    if hint in (None, types.NoneType):
        if text.lower() != "none":
            raise ValueError(text)
        return None
    if isinstance(origin, type) and issubclass(origin, Collection):
        entries = [_read(entry, arguments[0]) for entry in text.split("/")]
        return tuple(entries) if origin is tuple else entries
    if hint in (int, float, str):
        return hint(text)
    raise ValueError(f"a text cannot give a {hint!r}")


def _described(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        readable = [argument for argument in arguments if not _is_opaque(argument)]
        return " or ".join(_described(argument) for argument in readable)
    if origin is typing.Literal:
        return " or ".join(_written(choice) for choice in arguments)
    if origin is not None:
        return f"{_described(arguments[0])}, or several with / between them"
    if hint in (None, types.NoneType):
        return "none"
    return {int: "a whole number", float: "a number", bool: "true or false"}.get(hint, getattr(hint, "__name__", "?"))


def _is_opaque(hint: Any) -> bool:
    """Whether no text can give a value of this type."""
    return isinstance(hint, type) and hint not in (int, float, str, bool, types.NoneType)
