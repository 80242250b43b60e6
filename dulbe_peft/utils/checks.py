"""Checks of numbers. A message names the argument, its value, and what would be right."""

from numbers import Integral, Real
from typing import Any

LEAST, MOST = 2.0**-126, (2 - 2**-23) * 2.0**127  # what float32 holds in full, in which nearly all is computed


def is_int(value: Any) -> bool:
    """Whether `value` is an int, of Python or of numpy, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether `value` is an int or a float, of Python or of numpy, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_int(name: str, value: Any, least: int, most: int | None = None) -> int:
    """`value` as a Python int, after a check that it is one from `least` to `most`."""
    if not is_int(value):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {value}")
    return int(value)


def check_number(name: str, value: Any, *, least: Any = None, most: Any = None, positive: bool = False) -> None:
    """Raise unless float32 holds `value`, from `least` to `most`, and above 0 where `positive`."""
    if not is_number(value):
        raise TypeError(f"{name} must be a number, got {value!r} of type {type(value).__name__}")
    too_small = (positive and value <= 0) or (least is not None and value < least)
    if too_small or not abs(value) < float("inf"):
        bound = " and positive" if positive else "" if least is None else f" and at least {least}"
        raise ValueError(f"{name} must be finite{bound}, got {value}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most:g}, got {value}")
    if abs(value) > MOST or (positive and value < LEAST):
        raise ValueError(f"{name} must be finite in float32, {LEAST:.1e} to {MOST:.1e}, got {value!r:.40}")
