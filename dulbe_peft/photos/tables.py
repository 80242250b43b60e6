"""What a command writes alone: a table, and copies of files in folders."""

import filecmp
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dulbe_peft.utils import files
from dulbe_peft.utils.folders import LOCK_SUFFIX, clear_leftovers, exclusive

_UNFIT = re.compile(r'[/\\:*?"<>|%\x00-\x1f]|^\.|[. ]$')  # what some system does not take in the name of a folder


@contextmanager
def only_writer(path: str) -> Iterator[None]:
    """While the block runs, no other process writes there by this function."""
    place = Path(path).resolve()
    with exclusive(place.with_name(f".{place.name}{LOCK_SUFFIX}"), path):
        yield


@contextmanager
def sorted_folder(path: str) -> Iterator[Callable[[Path, str], None]]:
    """A folder into which one process sorts files: the function that copies a file into the folder of a class."""
    folder = Path(path).resolve()
    with only_writer(path):
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
