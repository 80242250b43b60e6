"""Classes by name: those of this package, of other installed packages, and those that a program registers."""

import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Mapping[str, type[T]], Generic[T]):
    """A mapping from name to class that imports a class when it is first looked up.

    Args:
        kind: What the classes are called in messages, such as "strategy".
        group: The group of entry points in which other packages name their classes, such as "dulbe_peft.strategies".
            The name of an entry point is the name of its class.
        homes: Name -> "module:Class" for the classes of this package.
    """

    def __init__(self, kind: str, group: str, homes: Mapping[str, str]) -> None:
        self.kind, self.group = kind, group
        self._homes: dict[str, str | EntryPoint] = dict(homes)
        self._classes: dict[str, type[T]] = {}
        self._complete = False

    def __getitem__(self, name: str) -> type[T]:
        if name not in self._classes:
            if name not in self._homes:
                self._add_entry_points()
            home = self._homes[name]
            cls = resolve_name(home) if isinstance(home, str) else home.load()
            if getattr(cls, "name", None) != name:
                raise ValueError(
                    f"the entry point {name!r} of {self.group!r} points to {cls!r:.100}, whose name is "
                    f"{getattr(cls, 'name', None)!r}: give both the same name"
                )
            self._classes.setdefault(name, cls)  # importing the class may have registered it
        return self._classes[name]

    def __iter__(self) -> Iterator[str]:
        self._add_entry_points()
        return iter(dict.fromkeys([*self._homes, *self._classes]))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        """Return whether there is a class with this name, without importing it."""
        return name in self._homes or name in self._classes or name in set(self)

    def register(self, cls: type[T]) -> None:
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
