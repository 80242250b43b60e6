"""Checks of numbers. A message names the argument, its value, and what would be right."""

from typing import Annotated, Any

from annotated_types import Interval

from dulbe_peft.utils.settings import MOST, check_value


def check_int(name: str, value: Any, least: int, most: int | None = None) -> int:
    """`value` as a Python int, after a check that it is one from `least` to `most`."""
    return int(check_value(name, Annotated[int, Interval(ge=least, le=most)], value))


def check_number(name: str, value: Any, *, least: float = -MOST, most: float = MOST) -> None:
    """Raise unless `value` is an int or a float, from `least` to `most`; by default what float32 holds."""
    check_value(name, Annotated[float, Interval(ge=least, le=most)], value)
