"""Packages: what is said where one is missing or lacks a name, what works, and how they are imported fast."""

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager

# Module -> package of the extra `photos`.
PHOTOS = {"click": "click", "joblib": "joblib", "matplotlib": "matplotlib", "sklearn": "scikit-learn"}
# Module -> extra of other packages.
EXTRAS = {"datasets": "datasets", "pyarrow": "datasets", "distributed": "dask", "ray": "ray"}
# Packages of which names are used that may go, with versions in which they are there.
TESTED = {"peft": "peft>=0.21,<0.22", "transformers": "transformers>=5.18,!=5.24.0,<6"}


@contextmanager
def uncollected() -> Iterator[None]:
    """Around imports and the loading of a model, whose objects stay: looking for garbage takes a fifth of the time.

    After the first time in a process nothing looks at them again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        if not gc.get_freeze_count():  # or garbage of each time would stay
            gc.freeze()
    finally:
        if enabled:
            gc.enable()


@contextmanager
def installed(what: str, extra: str = "") -> Iterator[None]:
    """Around imports that `what` needs: an `ImportError` names what is missing, and what to install.

    With an `extra`, whatever is missing is of that one, as what its packages need in turn.
    """
    try:
        yield
    except ImportError as error:
        said = explained(error, what, extra)
        raise said from (None if said is error else error)


def explained(error: ImportError, what: str = "dulbe_peft", extra: str = "") -> ImportError:
    """The error in plain words, where it is about a package that this file knows; else as it is."""
    module = error.name or ""
    package = module.partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and (extra or package in PHOTOS | EXTRAS):
        extra, called = extra or EXTRAS.get(package, "photos"), PHOTOS.get(package, package)
        message = f"{what} needs the package {called}: pip install 'dulbe_peft[{extra}]'"
    elif package in TESTED and module and not (isinstance(error, ModuleNotFoundError) and module == package):
        from importlib.metadata import version

        name = re.match(r"cannot import name '(\w+)' from '([\w.]+)'", str(error))
        needed = f"{name[2]}.{name[1]}" if name else module
        message = (
            f"{what} needs {needed}, which {package} {version(package)} does not have: pip install '{TESTED[package]}'"
        )
    else:
        return error
    return ImportError(message, name=module)
