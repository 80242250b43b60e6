"""Classes by name, and specs: short strings that give a name and its settings, on the command line and in results.

ranpac                          a name
ranpac:features=4000,seed=1     a name and settings
bridge:depths=0/0.5/1           the entries of a list are separated by slashes
"""

import difflib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Any, Generic, TypeVar

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


def _read(name: str, hint: object, text: str) -> object:
    """Convert a string to the type `hint`. "none" stands for None, and slashes separate the entries of a list."""
    readings: list[object] = [None] if text.lower() == "none" else []
    for value in [*readings, text, text.split("/")]:
        with suppress(TypeError, ValueError):
            return check_value(name, hint, value, strict=False)
    try:  # so that the message is the same as for a value that is not a string
        return check_value(name, hint, [_number(part) for part in text.split("/")] if "/" in text else _number(text))
    except TypeError as error:
        raise ValueError(str(error)) from error


def _number(text: str) -> object:
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


T = TypeVar("T")


class Registry(Mapping[str, type[T]], Generic[T]):
    """A mapping from name to class that imports a class when it is first looked up.

    Args:
        kind: What the classes are called in messages, such as "strategy".
        group: The group of entry points in which other packages name their classes, such as "dulbe_peft.strategies".
            The name of an entry point is the name of its class.
        homes: Name -> "module:Class" for the classes of this package.
        made: If given, a look-up returns what this makes of the class.
    """

    def __init__(
        self, kind: str, group: str, homes: Mapping[str, str], made: Callable[[type], type[T]] = lambda cls: cls
    ) -> None:
        self.kind, self.group, self._made = kind, group, made
        self._homes: dict[str, str | EntryPoint] = dict(homes)
        self._classes: dict[str, type] = {}
        self._complete = False

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._classes:
            if name not in self._homes:
                self._add_entry_points()
            home = self._homes[name]
            cls = resolve_name(home) if isinstance(home, str) else self._loaded(home)
            if getattr(cls, "name", None) != name:
                raise ValueError(
                    f"the entry point {name!r} of {self.group!r} points to {cls!r:.100}, whose name is "
                    f"{getattr(cls, 'name', None)!r}: give both the same name"
                )
            self._classes.setdefault(name, cls)  # importing the class may have registered it
        return self._made(self._classes[name])

    def _loaded(self, point: EntryPoint) -> Any:
        try:
            return point.load()
        except (AttributeError, ImportError) as error:
            package = point.dist.name if point.dist else "an unknown package"
            raise ValueError(
                f"the {self.kind} {point.name!r} of the package {package} cannot be imported from "
                f"{point.value!r}: {error}"
            ) from error

    def __iter__(self) -> Iterator[str]:
        self._add_entry_points()
        return iter(dict.fromkeys([*self._homes, *self._classes]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        """Return whether there is a class with this name, without importing it."""
        return name in self._homes or name in self._classes or name in set(self)

    def register(self, cls: type) -> None:
        """Add a class under its `name`. If another class has this name, a `ValueError` is raised."""
        name: str = cls.name  # type: ignore[attr-defined]
        home = self._homes.get(name)
        path = f"{cls.__module__}:{cls.__qualname__}"
        known = home if isinstance(home, str) else home.value if home is not None else None
        if name in self._classes:
            known = f"{self._classes[name].__module__}:{self._classes[name].__qualname__}"
        if known not in (None, path):
            raise ValueError(f"the {self.kind} {name!r} is already {known}: choose another name for {path}")
        self._classes[name] = cls

    def _add_entry_points(self) -> None:
        if self._complete:
            return
        self._complete = True
        for point in entry_points(group=self.group):
            if point.name in self._homes:
                package = point.dist.name if point.dist else point.value
                warnings.warn(
                    f"the {self.kind} {point.name!r} of the package {package} is ignored, because the name is taken. "
                    f"Rename its entry point of {self.group!r}",
                    stacklevel=3,
                )
            else:
                self._homes[point.name] = point
