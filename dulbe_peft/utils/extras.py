"""Packages that the extra `commands` installs, and what is said where one is missing."""

from collections.abc import Iterator
from contextlib import contextmanager

# Module -> package.
COMMANDS = {"click": "click", "joblib": "joblib", "matplotlib": "matplotlib", "sklearn": "scikit-learn"}


@contextmanager
def installed(what: str) -> Iterator[None]:
    """Around imports that `what` needs: an `ImportError` names a missing package and the extra that brings it."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = COMMANDS.get((error.name or "").partition(".")[0])
        if package is None:
            raise
        message = f"{what} needs the package {package}: pip install 'dulbe_peft[commands]'"
        raise ImportError(message, name=error.name) from error
