"""What `predict` writes while it works: a table that grows, and copies of images in folders of their classes."""

import filecmp
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import click

from dulbe_peft.commands.outputs import output_file
from dulbe_peft.utils.files import read_csv, write_rows

Lines = Sequence[Sequence[Any]]
_UNFIT = re.compile(r'[/\\:*?"<>|%\x00-\x1f]|^\.|[. ]$')  # what some system does not take in the name of a folder


@contextmanager
def growing_table(
    path: str, header: Sequence[str], settings: Sequence[Any], anew: bool
) -> Iterator[tuple[Callable[[Lines], None], set[str]]]:
    """A table at PATH.partial until it is whole: the function that adds lines, and the first cells that it has."""
    if path == "-" or (Path(path).exists() and not Path(path).is_file()):
        with output_file(path) as file:
            write_rows(file, header, [])
            yield lambda lines: _append(file, lines), set()
        return
    partial, first = Path(f"{path}.partial"), ["settings", json.dumps(settings)]
    kept = [] if anew or not partial.is_file() else _kept(partial, first)
    with partial.open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        write_rows(file, first, [header, *kept])
        file.flush()
        click.get_current_context().meta["kept"] = f"the answers so far are kept in {partial}"
        yield lambda lines: _append(file, lines), {line[0] for line in kept}
    with output_file(path) as whole, partial.open(newline="", encoding="utf-8", errors="surrogateescape") as grown:
        next(grown)
        shutil.copyfileobj(grown, whole)
    partial.unlink()


def _append(file: IO[str], lines: Lines) -> None:
    if lines:
        write_rows(file, lines[0], lines[1:])
        file.flush()


def _kept(partial: Path, first: list[str]) -> list[list[str]]:
    """The lines that an interrupted call wrote, but for those of its last image, which may be cut off."""
    rows = read_csv(partial)
    if rows[:1] != [first]:
        raise ValueError(
            f"{partial} was begun with other settings: {rows[0][1:] if rows else 'none'}, now {first[1:]}; give "
            "those, remove the file, or begin anew with --overwrite"
        )
    lines = [row for row in rows[2:] if len(row) == 3]
    return [row for row in lines if row[0] != lines[-1][0]]


def copy_into(file: Path, class_name: str, folder: Path) -> None:
    """Copy a file into the folder of a class; nothing is replaced, and what is there already is not copied again."""
    place = folder / _UNFIT.sub(lambda found: f"%{ord(found[0]):02X}", class_name)
    place.mkdir(parents=True, exist_ok=True)
    names = itertools.chain([file.name], (f"{file.stem}-{number}{file.suffix}" for number in itertools.count(2)))
    for target in map(place.joinpath, names):
        if not target.exists():
            shutil.copy2(file, target)
        if filecmp.cmp(target, file, shallow=False):
            return
