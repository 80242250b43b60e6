"""Specs: short strings that give a name and its settings, used by the command line and in results.

ranpac                          a name
ranpac:features=4000,seed=1     a name and settings
bridge:depths=0/0.5/1           the entries of a list are separated by slashes
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from dulbe_peft.utils.settings import check_value, field_types


def split_specs(text: str) -> list[str]:
    """Split a list of specs at its commas. A part `key=value` belongs to the spec before it."""
    specs: list[str] = []
    for part in text.split(","):
        if specs and "=" in part and ":" not in part:
            specs[-1] += f",{part}"
        else:
            specs.append(part)
    return specs


def parse_spec(text: str) -> tuple[str, dict[str, str]]:
    """Split `name:key=value,key=value` into the name and the settings, whose values stay strings."""
    if not isinstance(text, str):
        raise TypeError(f"a name with settings must be a string such as 'name:key=value', got {text!r:.100}")
    name, colon, rest = (part.strip() for part in text.partition(":"))
    if not name:
        raise ValueError(f"{text!r} has no name; it must be 'name' or 'name:key=value,key=value'")
    values: dict[str, str] = {}
    for entry in rest.split(",") if colon else []:
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not key or not equals:
            raise ValueError(f"{entry!r} in {text!r} is not a setting; a setting is key=value")
        if key in values:
            raise ValueError(f"{text!r} gives the setting {key!r} twice")
        values[key] = value
    return name, values


def format_spec(name: str, values: Mapping[str, object]) -> str:
    """Return the spec for a name and its settings. This is the inverse of `parse_spec` and `convert`."""
    parts = [f"{key}={_written(value)}" for key, value in values.items()]
    return f"{name}:{','.join(parts)}" if parts else name


def convert(kind: type, values: Mapping[str, str], owner: str, hidden: Collection[str] = ()) -> dict[str, object]:
    """Convert settings given as strings to the types of the fields of the dataclass `kind`.

    Fields in `hidden` cannot be set. `owner` is what messages call the thing that has the settings.
    """
    hints = {name: hint for name, hint in field_types(kind).items() if name not in hidden}
    for key in values:
        if key not in hints:
            raise ValueError(f"{owner} has no setting {key!r}{closest(key, hints)}")
    return {key: _read(f"{owner}: {key}", hints[key], text) for key, text in values.items()}


def _read(name: str, hint: object, text: str) -> Any:
    """Convert a string to the type `hint`. "none" stands for None, and slashes separate the entries of a list."""
    readings: list[object] = [None] if text.lower() == "none" else []
    for value in [*readings, text, text.split("/")]:
        with suppress(TypeError, ValueError):
            return check_value(name, hint, value, strict=False)
    try:  # so that the message is the same as for a value that is not a string
        return check_value(name, hint, [_number(part) for part in text.split("/")] if "/" in text else _number(text))
    except TypeError as error:
        raise ValueError(str(error)) from error


def _number(text: str) -> Any:
    """Return a string that is a number as this number, and any other string unchanged."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return text


def closest(wrong: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: the most similar known name, and all known names."""
    known = list(known)
    similar = difflib.get_close_matches(wrong, known, n=1)
    hint = f"; did you mean {similar[0]!r}?" if similar else ""
    return f"{hint} (known: {', '.join(known) or 'none'})"


def _written(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return "/".join(_written(entry) for entry in value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)
