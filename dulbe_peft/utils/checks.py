"""Checks of numbers, and of what JSON holds. A message names the argument, its value, and what would be right."""

from __future__ import annotations

import types
from dataclasses import is_dataclass
from numbers import Integral
from typing import Any, cast, get_args, get_origin, get_type_hints

_LARGEST, _SMALLEST = (2 - 2**-23) * 2.0**127, 2.0**-126  # of float32, in which nearly all is computed


def is_int(value: Any) -> bool:
    """Whether `value` is an int, of Python or of numpy, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether `value` is an int or a float of Python, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def check_int(name: str, value: Any, least: int, most: int | None = None) -> int:
    """`value` as a Python int.

    Raises:
        TypeError: `value` is no int.
        ValueError: `value` is below `least` or above `most`.
    """
    if not is_int(value):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
    return int(value)


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    most: float | None = None,
    positive: bool = False,
    tiny: bool = False,
) -> None:
    """Raise unless `value` is a number that float32 holds, from `least` to `most`, and above 0 where `positive`.

    With `tiny`, a positive number may be so small that float32 rounds it to 0.
    """
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    too_small = (positive and value <= 0) or (least is not None and value < least)
    if too_small or not abs(value) < float("inf"):
        bound = " and positive" if positive else "" if least is None else f" and at least {least}"
        raise ValueError(f"{name} must be finite{bound}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most:g}, got {value}")
    if abs(value) > _LARGEST or (positive and not tiny and value < _SMALLEST):
        raise ValueError(f"{name} must be finite in float32, {_SMALLEST:.1e} to {_LARGEST:.1e}, got {value!r:.40}")


def read_typed(name: str, hint: Any, value: Any) -> Any:
    """What JSON gave, as the type that a hint asks for: dataclasses, lists, tuples, dicts, texts and numbers.

    Raises:
        TypeError: a part has another type, or a dataclass lacks a field; the message names it.
        ValueError: a float is not finite, or an int is negative or needs more than 64 bits.
        KeyError: a dataclass has no such field.

    >>> read_typed("seeds", tuple[int, ...], [0, 1])
    (0, 1)
    """
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any or (value is None and types.NoneType in parts):
        return value
    if origin is types.UnionType:
        return read_typed(name, parts[0], value)
    if hint is float:
        check_number(name, value)
        return value
    if hint is int:
        return check_int(name, value, 0, 2**63 - 1)
    kind: Any = dict if is_dataclass(hint) else list if origin in (list, tuple) else origin or hint
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {hint}, got {value!r:.100}")
    if is_dataclass(hint):
        hints, make = get_type_hints(hint), cast(Any, hint)
        return make(**{field: read_typed(field, hints[field], part) for field, part in value.items()})
    if kind is dict:
        return {key: read_typed(f"{name}.{key}", parts[1], part) for key, part in value.items()}
    return origin(read_typed(name, parts[0], part) for part in value) if kind is list else value
