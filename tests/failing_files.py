"""File operations that fail: the n-th operation below a folder raises an error, like a full or protected disk."""

from __future__ import annotations

import builtins
import errno
import hashlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dulbe_peft.utils.folders import MANIFEST, json_sha256

BY_PATH = "chmod link listdir lstat mkdir open readlink remove rename replace rmdir scandir stat symlink unlink utime"
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Failing:
    """A context manager that records operations below `root` in `done`, and raises `error` at number `at`."""

    def __init__(self, root: Path, at: int | None = None, error: BaseException = FULL) -> None:
        self.root, self.at, self.error = str(root), at, error
        self.done: list[str] = []
        self.patch = pytest.MonkeyPatch()

    def __enter__(self) -> Failing:
        for name in BY_PATH.split():
            self.patch.setattr(os, name, self.failing(name, getattr(os, name)))
        self.patch.setattr(os, "fsync", self.failing("fsync", os.fsync, everywhere=True))
        for module in (builtins, io):
            self.patch.setattr(module, "open", self.opening(io.open))
        return self

    def __exit__(self, *_: Any) -> None:
        self.patch.undo()

    def happens(self, name: str, path: str | None = None) -> None:
        self.done.append(name)
        if len(self.done) - 1 == self.at:
            raise OSError(*self.error.args, path) if isinstance(self.error, OSError) and path else self.error

    def below(self, path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self.root)

    def failing(self, name: str, function: Callable[..., Any], everywhere: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if everywhere or (args and self.below(args[0])):
                self.happens(name, None if everywhere else os.fspath(args[0]))
            return function(*args, **kwargs)

        return call

    def opening(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
            if not self.below(file):
                return function(file, mode, *args, **kwargs)
            self.happens(f"open {mode}", os.fspath(file))
            opened = function(file, mode, *args, **kwargs)
            return opened if mode in ("r", "rb") else _Written(self, opened)

        return call


class _Written:
    """An open file whose writes can fail."""

    def __init__(self, failing: Failing, file: Any) -> None:
        self.failing, self.file = failing, file

    def __getattr__(self, name: str) -> Any:
        if name == "write":
            self.failing.happens("write")
        return getattr(self.file, name)

    def __enter__(self) -> _Written:
        return self

    def __exit__(self, *_: Any) -> None:
        self.file.close()


def seal(folder: Path, name: str) -> None:
    """Update the manifest to match a changed file, as a forger would."""
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["sha256"]
    content = (folder / name).read_bytes()
    manifest["files"][name] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content)}
    (folder / MANIFEST).write_text(json.dumps({**manifest, "sha256": json_sha256(manifest)}))


def edited(path: Path, *keys_and_value: Any) -> None:
    """Change the value at the given keys in a JSON file, and update the manifest to match."""
    *keys, last, value = keys_and_value
    content = parent = json.loads(path.read_text())
    for key in keys:
        parent = parent[key]
    assert last in parent
    parent[last] = value
    path.write_text(json.dumps(content))
    if path.name != MANIFEST and (path.parent / MANIFEST).is_file():
        seal(path.parent, path.name)
