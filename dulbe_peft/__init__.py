"""Dual-mode low-rank adapters and bridge-prototype heads for CLIP-like models that keep learning new classes.

`import dulbe_peft` registers the method with PEFT as soon as both are imported, in either order. It imports neither
PEFT nor torch: a name of the list in `__init__.pyi` is imported when somebody asks for it.
"""

import re
from importlib import import_module
from pkgutil import get_data
from typing import Any

from dulbe_peft.utils.extras import installed
from dulbe_peft.utils.when_imported import when_imported

__version__ = "0.3.0.dev0"

# Where each public name is at home: `__init__.pyi` lists them, for type checkers and for `__getattr__`.
_STUB = (get_data(__name__, "__init__.pyi") or b"").decode()
_HOMES = {name: home for home, name in re.findall(r"^from (\S+) import (\w+) as", _STUB, flags=re.MULTILINE)}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with installed("dulbe_peft"):
        return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def _register() -> None:
    with installed("dulbe_peft"):
        import_module(f"{__name__}.adapter.model").register()


when_imported("peft", _register)
