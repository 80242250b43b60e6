"""Optional packages: error messages for missing or unsupported ones, tested versions, and faster imports."""

import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import walk_tb

# Module -> package in the extra `photos`.
PHOTOS = {"click": "click", "joblib": "joblib", "matplotlib": "matplotlib", "sklearn": "scikit-learn"}
# Module -> extra that installs it.
EXTRAS = {"datasets": "datasets", "pyarrow": "datasets", "distributed": "dask", "ray": "ray"}
# Packages from which unstable names are used, with versions that are known to have them.
TESTED = {"peft": "peft>=0.21,<0.22", "transformers": "transformers>=5.18,!=5.24.0,<6"}


def install_command(extra: str) -> str:
    """Return the command that installs an extra; every message takes it from here.

    It is run in a clone, because nobody has registered the name of the package at an index yet. The release that is
    published there changes this line to "dulbe_peft[{extra}]".
    """
    return f'pip install ".[{extra}]" in a clone of dulbe_peft'


_frozen = False  # counting the frozen objects instead would walk over all of them


@contextmanager
def garbage_collection_off() -> Iterator[None]:
    """Turn the garbage collector off while the block imports modules or loads a model.

    Their objects stay in memory, and searching them for garbage would take a fifth of the time. After the first block
    in a process they are frozen, so that they are not searched later, either.
    """
    global _frozen
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        if not _frozen:  # freezing again would also keep the garbage of later blocks
            gc.freeze()
            _frozen = True
    finally:
        if enabled:
            gc.enable()


@contextmanager
def installed(what: str, extra: str = "") -> Iterator[None]:
    """Explain failed imports in the block: the `ImportError` names the package that `what` needs.

    With `extra`, every missing package is attributed to this extra, including those that its packages depend on.
    """
    try:
        yield
    except ImportError as error:
        explanation = explained(error, what, extra)
        raise explanation from (None if explanation is error else error)


def explained(error: ImportError, what: str = "dulbe_peft", extra: str = "") -> ImportError:
    """Return an `ImportError` in plain words if the error concerns a package listed above, else the same error.

    transformers hides the error that was raised first behind others; that first error is explained.
    """
    first = _first(error)
    if first is not error:
        if "torchvision" in str(first) or "torchvision" in _packages(first):
            return ImportError(
                f"{_installed('torchvision')} does not fit {_installed('torch')}: reinstall or remove it"
            )
        if not isinstance(first, ImportError):
            return ImportError(f"{what} cannot be imported: {type(first).__name__}: {first}")
        error = first
    module = error.name or ""
    package = module.partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and (extra or package in PHOTOS | EXTRAS):
        extra, distribution = extra or EXTRAS.get(package, "photos"), PHOTOS.get(package, package)
        message = f"{what} needs the package {distribution}: {install_command(extra)}"
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


def _first(error: BaseException) -> BaseException:
    """Return the error that caused the others."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _packages(error: BaseException) -> set[str]:
    """Return the top-level packages in whose code the error was raised."""
    frames = walk_tb(error.__traceback__)
    return {str(frame.f_globals.get("__name__")).partition(".")[0] for frame, _ in frames}


def _installed(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return package
