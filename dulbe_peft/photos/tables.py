"""Lock a table or folder while a command writes to it, and copy files into folders of classes."""

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

_UNFIT = re.compile(r'[/\\:*?"<>|%\x00-\x1f]|^\.|[. ]$')  # not allowed in the name of a folder on some system


@contextmanager
def only_writer(path: str) -> Iterator[None]:
    """Lock a path while the block runs, so that another process that uses this function raises an error."""
    target = Path(path).resolve()
    with exclusive(target.with_name(f".{target.name}{LOCK_SUFFIX}"), path):
        yield


@contextmanager
def sorted_folder(path: str) -> Iterator[Callable[[Path, str], None]]:
    """Lock a folder and yield a function that copies a file into the subfolder of a class."""
    folder = Path(path).resolve()
    with only_writer(path):
        for subfolder in folder.iterdir() if folder.exists() else ():
            if subfolder.is_dir():
                clear_leftovers(subfolder, ".+")
        yield partial(_copy_into, folder)


def _copy_into(folder: Path, file: Path, class_name: str) -> None:
    """Copy a file under a free name, unless the folder of the class already holds a file with the same content."""
    class_folder = folder / _UNFIT.sub(lambda match: f"%{ord(match[0]):02X}", class_name)
    class_folder.mkdir(parents=True, exist_ok=True)
    names = itertools.chain([file.name], (f"{file.stem}-{number}{file.suffix}" for number in itertools.count(2)))
    for target in map(class_folder.joinpath, names):
        if not os.path.lexists(target):
            with file.open("rb") as source, files.replacing(target) as copy, copy.open("wb") as opened:
                shutil.copyfileobj(source, opened)
                opened.flush()
                shutil.copystat(file, copy)
            return
        if target.is_file() and filecmp.cmp(target, file, shallow=False):
            return
