"""Settings as plain dataclasses whose fields declare their limits: `epochs: Annotated[int, Ge(1)] = 2`.

pydantic checks them. It is imported at the first check, so that the command line can read its flags without it.
"""

import re
from dataclasses import field, fields
from functools import cache
from numbers import Real
from textwrap import fill
from typing import Annotated, Any, TypeVar, cast, get_type_hints

from annotated_types import Ge, Interval, Le

T = TypeVar("T")
# The limits of normal float32 numbers, the precision in which nearly everything is computed.
LEAST, MOST = 2.0**-126, (2 - 2**-23) * 2.0**127
# Types that several settings share.
Positive = Annotated[float, Ge(LEAST), Le(MOST)]
Weight = Annotated[float, Ge(0), Le(MOST)]
AtLeastOne = Annotated[int, Ge(1)]
Seed = Annotated[int, Ge(0)]


def setting(default: object, help: str, **metadata: object) -> Any:
    """Return a dataclass field with a help text, from which the command line and the docs are generated."""
    return field(default=default, metadata={"help": help, **metadata})


def documented(kind: type[T]) -> type[T]:
    """Add the help text of every field to the `Args:` of a dataclass's docstring, and return the class."""
    text = (kind.__doc__ or "").rstrip()
    helps = {field.name: field.metadata["help"] for field in fields(cast(Any, kind)) if "help" in field.metadata}
    entries = [
        fill(f"{name}: {help}", 115, initial_indent=" " * 8, subsequent_indent=" " * 12)
        for name, help in helps.items()
        if not re.search(rf"\n        [\w, ]*\b{name}\b[\w, ]*: ", text)
    ]
    head = "\n\n    Args:"
    if entries and head not in text:
        section = re.search(r"\n\n    \w+:\n", text)  # the first one, such as "Raises:"
        end = section.start() if section else len(text)
        text = text[:end] + head + text[end:]
    kind.__doc__ = text.replace(head, "\n".join([head, *entries]), 1) + "\n"
    return kind


@cache
def field_types(kind: type) -> dict[str, object]:
    """Return the type of every field of a dataclass by name, including its limits."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


def check_settings(settings: object, kind: type | None = None, owner: str = "") -> None:
    """Convert the fields of a dataclass, or of its base class `kind`, to their declared types.

    Raises:
        TypeError: If a value has the wrong type. The message begins with `owner`, if it is given.
        ValueError: If a value is outside its limits.
    """
    prefix = f"{owner}: " if owner else ""
    for name, hint in field_types(kind or type(settings)).items():
        object.__setattr__(settings, name, check_value(f"{prefix}{name}", hint, getattr(settings, name)))


def check_value(name: str, hint: object, value: object, strict: bool = True) -> Any:
    """Return `value` converted to the type `hint`. Unless `strict`, a string may stand for a number or a bool.

    Raises:
        TypeError: If the value has the wrong type.
        ValueError: If the value is outside its limits.
    """
    from pydantic import ValidationError

    try:
        return _reader(hint).validate_python(_plain(value), strict=strict)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    rule = " or ".join(dict.fromkeys(problem["msg"].partition(" should ")[2] for problem in problems))
    rule = rule.replace(" or be ", " or ").removesuffix(" after validation, not 0")
    rule = rule.replace("greater than or equal to", "at least").replace("less than or equal to", "at most")
    rule = re.sub(r"at least 0\.0{30,}\d+", f"positive, {LEAST:.1e} at least", rule)
    message = f"{name} must {rule}, got {value!r:.200}"
    limits = ("greater", "less", "literal", "finite", "string_too", "string_pattern", "too_")
    raise (ValueError if any(problem["type"].startswith(limits) for problem in problems) else TypeError)(message)


def check_int(name: str, value: object, least: int, most: int | None = None) -> int:
    """Return `value` as a Python int, after checking that it is an integer from `least` to `most`."""
    return int(check_value(name, Annotated[int, Interval(ge=least, le=most)], value))


def check_number(name: str, value: object, *, least: float = -MOST, most: float = MOST) -> None:
    """Raise an error unless `value` is an int or a float from `least` to `most`, by default the limits of float32."""
    check_value(name, Annotated[float, Interval(ge=least, le=most)], value)


@cache
def _reader(hint: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False, arbitrary_types_allowed=True))


def _plain(value: Any) -> Any:
    """Convert numbers, arrays and tensors of NumPy and PyTorch to Python's types, also inside a list or a tuple."""
    if type(value) in (list, tuple):
        return type(value)(_plain(entry) for entry in value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return float(value) if isinstance(value, Real) and not isinstance(value, int) else value


def flat_settings(settings: dict[str, object], path: str = "") -> dict[str, object]:
    """Flatten nested settings: {"adapter": {"shared_rank": 1}} becomes {"adapter.shared_rank": 1}."""
    flat: dict[str, object] = {}
    for key, value in settings.items():
        flat |= flat_settings(value, f"{path}{key}.") if isinstance(value, dict) else {f"{path}{key}": value}
    return flat
