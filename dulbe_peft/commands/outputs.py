"""Files that a person names for a command's answers: what must not be overwritten, and how they are written."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO


def check_outputs(*files: tuple[str, str | None, str], inputs: Sequence[str | None] = ()) -> None:
    """Refuse files that were most likely named by mistake, before any work is done.

    Each file is its flag, path and suffix. A path of None is not written, and "-" is standard output. `inputs` are
    paths that the command reads.
    """
    read = {Path(path).resolve() for path in inputs if path}
    flags: dict[Path, str] = {}
    for flag, path, suffix in files:
        if path is None:
            continue
        file = Path(path) if path == "-" else Path(path).resolve()
        if path != "-":
            _check_answer_file(path, suffix)
        if file in read:
            raise ValueError(f"{flag} {path} is a file that the command reads: choose another name")
        if file in flags:
            raise ValueError(f"{flags[file]} and {flag} both name {path}: give each a file of its own")
        flags[file] = flag


def _check_answer_file(path: str, suffix: str) -> None:
    """Raise where `path` cannot be a new file for an answer, or one that an earlier answer of this suffix may be."""
    from dulbe_peft.checkpoints import layout
    from dulbe_peft.utils.folders import MANIFEST, check_outside_saved

    file = Path(path).resolve()
    if not path or file.is_dir():
        raise ValueError(f"{path!r} is no file's name: expected the path of a {suffix} file")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: the folder {file.parent} does not exist")
    check_outside_saved(file.parent, f"write {path}")
    kept = {layout.LEARNER_FILE, MANIFEST, layout.PROGRESS_FILE, layout.RESULTS_FILE, layout.TIMINGS_FILE}
    kept |= {"sources.json", "cell.json", "comparison.json", "config.json"}
    of_a_run = file.name == "predictions.csv" and (file.parent / layout.RESULTS_FILE).is_file()
    if file.name in kept or of_a_run:
        raise FileExistsError(f"{path} is where a run or a model keeps its own file: choose another name")
    if file.is_file() and file.suffix.lower() != suffix:
        raise FileExistsError(f"{path} exists and is no {suffix} file: it is not overwritten, choose another name")


def check_other_folder(learner: str, output: str) -> None:
    """Raise a ValueError where the output is the learner's own folder, its run's, or inside them."""
    from dulbe_peft.checkpoints.layout import PROGRESS_FILE

    own, other = Path(learner).resolve(), Path(output).resolve()
    if (own / PROGRESS_FILE).is_file():  # a task of a run
        own = own.parent
    if own.is_dir() and own in (other, *other.parents):
        raise ValueError(
            f"--output {output!r} is where the learner {learner!r} is, which is never changed: name another folder "
            "(where classes were added to a run's own data, the same `dulbe-peft run` goes on in its folder)"
        )


@contextmanager
def output_file(path: str) -> Iterator[IO[str]]:
    """A text file to write, which is whole or not there; "-" is standard output. A pipe or a device is written to."""
    if path == "-":
        yield sys.stdout
        return
    from dulbe_peft.utils.files import replacing

    file = Path(path).resolve()
    whole = nullcontext(file) if file.exists() and not file.is_file() else replacing(file)
    with whole as place, place.open("w", newline="", encoding="utf-8", errors="surrogateescape") as opened:
        yield opened
