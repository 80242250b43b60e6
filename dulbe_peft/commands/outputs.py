"""Files that a person names for a command's answers: what must not be overwritten, and how they are written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_OF_A_RUN = ("results.json", "timings.json", "learner.json", "manifest.json", "progress.json")


def check_output(flag: str, path: str | None, suffix: str) -> None:
    """Refuse a file that was most likely named by mistake, before any work is done.

    A new file may have any name, and "-" is standard output.

    Raises:
        FileNotFoundError: the folder of the file is not there.
        ValueError: there is a folder of that name, a file with another suffix, or a file that belongs to a run.
    """
    if path is None or path == "-":
        return
    if not path:
        raise ValueError(f"{flag} is '', expected the path of a {suffix} file")
    file = Path(path).resolve()
    if file.is_dir():
        raise ValueError(f"{flag} {path} is a folder, expected a {suffix} file")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{flag} {path}: the folder {file.parent} does not exist")
    if file.name in _OF_A_RUN:
        raise ValueError(f"{flag} {path}: a run keeps its own figures under this name, choose another one")
    if file.is_file() and file.suffix.lower() != suffix:
        raise ValueError(f"{flag} {path} exists and is no {suffix} file: it is not overwritten, choose another name")


@contextmanager
def output_file(path: str) -> Iterator[IO[str]]:
    """A text file to write, which is whole or not there; "-" is standard output. A pipe or a device is written to."""
    if path == "-":
        yield sys.stdout
        return
    from dulbe_peft.files import replacing

    file = Path(path).resolve()
    if file.exists() and not file.is_file():
        with file.open("w", newline="", encoding="utf-8", errors="surrogateescape") as opened:
            yield opened
        return
    with (
        replacing(file) as temporary,
        temporary.open("w", newline="", encoding="utf-8", errors="surrogateescape") as opened,
    ):
        yield opened
