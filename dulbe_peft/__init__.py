"""Dual-mode low-rank adapters and bridge-prototype heads for CLIP-like models that keep learning new classes.

`import dulbe_peft` registers the method with PEFT as soon as both packages are imported, in either order. It imports
neither PEFT nor torch: each public name, listed in `__init__.pyi`, is imported when it is first used.

The method is in `adapter/gradients.py` (what a new task asks for, and the routing of its gradients),
`subspaces/allocation.py` (the shared and the residual modes), `adapter/layer.py` (the adapted layer),
`strategies/dulbe.py` (a task from its first to its last step) and `classifiers/bridge.py` (the head).
"""

from importlib import import_module
from typing import Any

import lazy_loader
from wrapt import when_imported

from dulbe_peft.utils.extras import installed

__version__ = "0.3.0"

_attribute, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    with installed("dulbe_peft"):
        return _attribute(name)


@when_imported("peft")
def _register(peft: object) -> None:
    with installed("dulbe_peft"):
        import_module(f"{__name__}.adapter.model").register()
