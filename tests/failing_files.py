"""File operations that fail: the n-th one below a folder raises an OSError, as a full or a protected disk does."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

# Of `os`, by what they take: a path below the folder, or the number of an open file.
BY_PATH = "chmod link listdir lstat mkdir open readlink remove rename replace rmdir scandir stat symlink unlink utime"
BY_NUMBER = "fsync"
ERRORS = (errno.ENOSPC, errno.EACCES, errno.EINTR)


class Failing:
    """While the block runs, file operations below a folder are counted; the chosen one fails.

    Args:
        root: the folder.
        at: number of the operation that fails, from 0; None: none does.
        number: of the error, as `errno` has it.

    Attributes:
        done: name and path of every operation.
    """

    def __init__(self, root: Path, at: int | None = None, number: int = errno.ENOSPC) -> None:
        self.root, self.at, self.number = str(root), at, number
        self.done: list[tuple[str, str]] = []
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> Failing:
        for name in BY_PATH.split():
            self.patch.setattr(os, name, self.failing(name, getattr(os, name)))
        for name in BY_NUMBER.split():
            self.patch.setattr(os, name, self.failing(name, getattr(os, name), everywhere=True))
        for module in (builtins, io):
            self.patch.setattr(module, "open", self.opening(io.open))
        return self

    def __exit__(self, *_: Any) -> None:
        self.patch.undo()

    def happens(self, name: str, path: str) -> None:
        self.done.append((name, path))
        if len(self.done) - 1 == self.at:
            raise OSError(self.number, os.strerror(self.number), path or None)

    def below(self, path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self.root)

    def failing(self, name: str, function: Callable[..., Any], everywhere: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if everywhere or (args and self.below(args[0])):
                self.happens(name, "" if everywhere else os.fspath(args[0]))
            return function(*args, **kwargs)

        return call

    def opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not self.below(file):
                return function(file, mode, *args, **kwargs)
            self.happens(f"open {mode}", os.fspath(file))
            opened = function(file, mode, *args, **kwargs)
            return opened if mode in ("r", "rb") else _Written(self, opened, os.fspath(file))

        return call


class _Written:
    """An open file of which writing and closing can fail; that which fails to close is closed, as the system does."""

    def __init__(self, failing: Failing, file: Any, path: str) -> None:
        self.failing, self.file, self.path = failing, file, path

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def write(self, content: Any) -> Any:
        self.failing.happens("write", "")  # the system's error for it names no path
        return self.file.write(content)

    def close(self) -> None:
        self.file.close()
        self.failing.happens("close", "")
