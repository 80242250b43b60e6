"""What a command writes while it works: what it has got done, and copies of files in folders."""

import filecmp
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from dulbe_peft.utils import files
from dulbe_peft.utils.folders import LOCK_SUFFIX, clear_leftovers, exclusive

_UNFIT = re.compile(r'[/\\:*?"<>|%\x00-\x1f]|^\.|[. ]$')  # what some system does not take in the name of a folder


@dataclass(frozen=True)
class Kept:
    """What a command has got done, kept while it works: a line of JSON for each thing."""

    path: Path
    file: IO[bytes]
    done: dict[str, Any]  # what earlier calls got done, by name
    since: float  # when they wrote the last of it, in seconds

    def add(self, name: str, content: Any) -> None:
        """Keep what was found for a thing; a kill in the middle of it loses no other."""
        with files.write_errors(self.path):
            self.file.truncate()  # a line that a kill cut off
            self.file.write(_line([name, content]))
            self.file.flush()


@contextmanager
def kept(path: str, settings: Mapping[str, Any], anew: bool = False) -> Iterator[Kept]:
    """A file PATH.partial while the block runs, and longer where it does not end well.

    The next call with equal settings finds in it what was got done. With `anew`, what stands there steps aside.
    """
    place = Path(path).resolve()
    partial = place.with_name(f"{place.name}.partial")
    with exclusive(partial.with_name(f".{partial.name}{LOCK_SUFFIX}"), path):
        if anew and os.path.lexists(partial):
            files.step_aside(partial)
        partial.open("ab").close()
        with partial.open("rb+") as file:
            since, content = os.fstat(file.fileno()).st_mtime, file.read()
            done = _done(partial, content, settings)
            if done or content.startswith(_line(settings)):
                file.seek(content.rfind(b"\n") + 1)
            else:
                file.seek(0)
                file.truncate()
                file.write(_line(settings))
            yield Kept(partial, file, done, since)
        partial.unlink()


def _line(content: Any) -> bytes:
    return json.dumps(content).encode() + b"\n"


def _done(partial: Path, content: bytes, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What stands in a file that an earlier call began; raises where it is of another kind or other settings."""
    if _line(settings).startswith(content):  # not even the first line is whole
        return {}
    try:
        before, *rows = map(json.loads, content.split(b"\n")[:-1])  # what follows the last one was cut off
        if not rows and before.keys() == settings.keys():
            return {}
        pairs = {name: (before.get(name), fact) for name, fact in json.loads(_line(settings)).items()}
        done = dict(rows)
    except (ValueError, TypeError, AttributeError) as error:
        raise FileExistsError(f"{partial} is not of an earlier call: move it away, or choose another name") from error
    differ = "; ".join(f"{name} {old!r:.40}, now {new!r:.40}" for name, (old, new) in pairs.items() if old != new)
    if differ:
        raise ValueError(
            f"{partial} was begun with other settings ({differ}): give those, move it away, or begin anew with "
            "--overwrite"
        )
    return done


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
