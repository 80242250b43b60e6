"""Lock a table or folder while a command writes to it, copy files into folders of classes, and list keywords."""

import filecmp
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from dulbe_peft.data.columns import FILE
from dulbe_peft.data.labels import BETWEEN
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


def exiftool_rows(answers: Iterable[tuple[str, str]], root: str) -> list[list[str]]:
    """Return a table for `exiftool -csv+=FILE -sep ', '` with each photograph's class as a keyword below `root`.

    Existing sidecars, IMG.jpg.xmp and IMG.xmp, get a row as well: exiftool ignores rows of files it was not given.
    """
    rows, stems = [[FILE, "HierarchicalSubject"]], dict[str, str]()
    for image, name in answers:
        if "|" in name or BETWEEN in name:
            raise ValueError(
                f"the class {name!r} contains '|' or {BETWEEN!r}, which separate keywords: rename it first"
            )
        for file in (image, f"{image}.xmp", f"{os.path.splitext(image)[0]}.xmp"):
            if file != image and not os.path.isfile(file):
                continue
            if stems.setdefault(file, image) != image:
                raise ValueError(
                    f"{file} is the sidecar of {stems[file]} and of {image}: rename one of the photographs"
                )
            rows.append([file, f"{root}|{name}"])
    return rows
