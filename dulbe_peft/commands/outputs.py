"""Files that a person names for a command's answers: what must not be overwritten, and how they are written."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dulbe_peft.utils.folders import (
    LEARNER_FILE,
    MANIFEST,
    PROGRESS_FILE,
    RESULTS_FILE,
    TIMINGS_FILE,
    check_outside_learners,
)

# What runs, learners, comparisons and models keep under these names, wherever that is.
_KEPT = (
    *(LEARNER_FILE, MANIFEST, PROGRESS_FILE, RESULTS_FILE, TIMINGS_FILE),
    *("sources.json", "cell.json", "comparison.json", "config.json"),
)
_PREDICTIONS = "predictions.csv"  # a run's own where there are its results, else anybody's


def check_outputs(*files: tuple[str, str | None, str], inputs: Sequence[str | None] = ()) -> None:
    """Refuse files that were most likely named by mistake, before any work is done.

    A new file may have any suffix, and "-" is standard output.

    Args:
        files: flag, path and suffix of each file that is to be written; a path of None is not written.
        inputs: paths that the command reads.

    Raises:
        FileNotFoundError: the folder of a file is not there.
        FileExistsError: a file lies in a saved learner.
        ValueError: there is a folder of that name, a file with another suffix, or a file that belongs to a run, a
            model or an export; or the file is named twice, or is one that the command reads.
    """
    read = {Path(path).resolve() for path in inputs if path}
    flags: dict[Path, str] = {}
    for flag, path, suffix in files:
        if path is None:
            continue
        file = Path(path) if path == "-" else _checked(flag, path, suffix)
        if file in read:
            raise ValueError(f"{flag} {path} is a file that the command reads: choose another name")
        if file in flags:
            raise ValueError(f"{flags[file]} and {flag} both name {path}: give each a file of its own")
        flags[file] = flag


def _checked(flag: str, path: str, suffix: str) -> Path:
    if not path:
        raise ValueError(f"{flag} is '', expected the path of a {suffix} file")
    file = Path(path).resolve()
    if file.is_dir():
        raise ValueError(f"{flag} {path} is a folder, expected a {suffix} file")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{flag} {path}: the folder {file.parent} does not exist")
    check_outside_learners(file.parent, f"{flag}: write")
    exported = file.is_file() and (file.parent / MANIFEST).is_file()
    if file.name in _KEPT or exported or (file.name == _PREDICTIONS and (file.parent / RESULTS_FILE).is_file()):
        raise ValueError(f"{flag} {path}: a run, a model or an export keeps its own file here, choose another name")
    if file.is_file() and file.suffix.lower() != suffix:
        raise ValueError(f"{flag} {path} exists and is no {suffix} file: it is not overwritten, choose another name")
    return file


@contextmanager
def output_file(path: str) -> Iterator[IO[str]]:
    """A text file to write, which is whole or not there; "-" is standard output. A pipe or a device is written to."""
    if path == "-":
        yield sys.stdout
        return
    from dulbe_peft.utils.files import replacing

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
