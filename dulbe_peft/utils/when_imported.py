"""Act as soon as another package is imported, without importing it."""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def when_imported(name: str, action: Callable[[], Any]) -> None:
    """Call `action` when the top-level module `name` has been imported: now, where it already has."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Watcher(name, action))


class _Watcher:
    """Finds a module as the other finders do, and acts once after its code has run."""

    def __init__(self, name: str, action: Callable[[], Any]) -> None:
        self.name, self.action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        later = sys.meta_path[sys.meta_path.index(self) + 1 :]  # the earlier ones have been asked
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in later)), None)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_act(module: ModuleType) -> None:
            run(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                self.action()

        spec.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec
