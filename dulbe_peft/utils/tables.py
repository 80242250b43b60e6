"""What a command writes while it works: a table that grows row by row, and copies of files in folders."""

import csv
import filecmp
import io
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from dulbe_peft.utils import files
from dulbe_peft.utils.folders import LOCK_SUFFIX, clear_leftovers, exclusive
from dulbe_peft.utils.terminal import printable

_UNFIT = re.compile(r'[/\\:*?"<>|%\x00-\x1f]|^\.|[. ]$')  # what some system does not take in the name of a folder


@dataclass(frozen=True)
class GrowingTable:
    """A table that gets the rows of one image after the other; the first cell of a row names the image."""

    path: Path
    file: IO[str]
    grows: bool  # False: a pipe or a device
    done: frozenset[str] = frozenset()  # images whose rows an earlier call wrote
    since: float = 0  # when it wrote the last of them, in seconds

    def add(self, rows: Sequence[Sequence[Any]]) -> None:
        """Write all rows of an image; a kill in the middle of it loses no others."""
        with files.write_errors(self.path):
            if self.grows:
                self.file.truncate()  # an earlier call's rows of one image, which may not be all
            self.file.write(_text(rows))
            self.file.flush()


@contextmanager
def growing_table(
    path: str, header: Sequence[str], settings: Mapping[str, Any], anew: bool = False
) -> Iterator[GrowingTable]:
    """A table at PATH.partial until it is whole, when it takes the place of PATH; a pipe or a device is written to.

    The next call with equal settings goes on, and nothing that stands there is lost. The rows of the last image alone
    may not be all: they stay until the next rows take their place. With `anew`, what stands there steps aside.
    """
    if files.is_stream(path):
        with files.open_text(path) as stream:
            table = GrowingTable(Path(path), stream, grows=False)
            table.add([header])
            yield table
        return
    place = Path(path).resolve()
    grown = place.with_name(f"{place.name}.partial")
    with exclusive(grown.with_name(f".{grown.name}{LOCK_SUFFIX}"), str(path)):
        if anew and os.path.lexists(grown):
            files.step_aside(grown)
        grown.open("ab").close()
        with grown.open("r+", newline="", encoding="utf-8", errors="surrogateescape") as file:
            since, content = os.fstat(file.fileno()).st_mtime, file.read()
            facts = {"columns": list(header), **settings}
            first = [["settings", json.dumps(facts)], header]
            begin, done = _begun(grown, content, _text(first), facts)
            file.seek(begin)
            table = GrowingTable(grown, file, True, done, since)
            if not begin:
                table.add(first)
            yield table
            file.truncate()
            file.seek(0)
            file.readline()
            with files.output_file(place) as whole:
                shutil.copyfileobj(file, whole)
        grown.unlink()


def _text(rows: Sequence[Sequence[Any]]) -> str:
    """Rows as they stand in a file, each on a line of its own."""
    text = io.StringIO(newline="")
    for row in rows:
        files.write_rows(text, [printable(cell) if isinstance(cell, str) else cell for cell in row], [])
    return text.getvalue()


def _begun(grown: Path, content: str, begin: str, facts: Mapping[str, Any]) -> tuple[int, frozenset[str]]:
    """After how many bytes the next rows come, and the images before; raises where another table was begun."""
    if begin.startswith(content):  # not even the first two lines are whole
        return 0, frozenset()
    if not content.startswith(begin):
        _refuse(grown, content, facts)
    lines = [f"{line}\n" for line in content[len(begin) :].split("\n")[:-1]]  # what follows the last one is cut off
    images = [next(files.read_rows([line]), [""])[0] for line in lines]
    sure = next((count for count in range(len(images), 0, -1) if images[count - 1] != images[-1]), 0)
    text = begin + "".join(lines[:sure])
    return len(text.encode("utf-8", errors="surrogateescape")), frozenset(images[:sure])


def _refuse(grown: Path, content: str, facts: Mapping[str, Any]) -> None:
    """Raise a `ValueError` that says what differs from what was begun."""
    try:
        before = json.loads(next(files.read_rows([content.partition("\n")[0]]))[1])
        pairs = {name: (before.get(name), fact) for name, fact in facts.items()}
    except (ValueError, LookupError, AttributeError, csv.Error) as error:
        raise FileExistsError(f"{grown} is not of an earlier call: move it away, or choose another name") from error
    differ = "; ".join(f"{name} {old!r:.40}, now {new!r:.40}" for name, (old, new) in pairs.items() if old != new)
    raise ValueError(
        f"{grown} was begun with other settings ({differ}): give those, move it away, or begin anew with --overwrite"
    )


@contextmanager
def sorted_folder(path: str) -> Iterator[Callable[[Path, str], None]]:
    """A folder into which one process sorts files: the function that copies a file into the folder of a class."""
    folder = Path(path).resolve()
    with exclusive(folder.with_name(f".{folder.name}{LOCK_SUFFIX}"), path):
        for place in folder.iterdir() if folder.exists() else ():
            if place.is_dir():
                clear_leftovers(place, ".+")
        yield partial(_copy_into, folder)


def _copy_into(folder: Path, file: Path, class_name: str) -> None:
    """Copy a file; nothing is replaced, and what is there already is not copied again."""
    place = folder / _UNFIT.sub(lambda found: f"%{ord(found[0]):02X}", class_name)
    place.mkdir(parents=True, exist_ok=True)
    names = itertools.chain([file.name], (f"{file.stem}-{number}{file.suffix}" for number in itertools.count(2)))
    for target in map(place.joinpath, names):
        if not os.path.lexists(target):
            with file.open("rb") as source, files.replacing(target) as copy, copy.open("wb") as opened:
                shutil.copyfileobj(source, opened)
                opened.flush()
                shutil.copystat(file, copy)
            return
        if target.is_file() and filecmp.cmp(target, file, shallow=False):
            return
