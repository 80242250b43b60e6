"""What a person names for a command's answers: what must not be overwritten, and how it is written."""

import itertools
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Any

from dulbe_peft.commands.options import option

overwrite_option = option(
    "--overwrite", is_flag=True, help="begin anew where something else stands, which becomes NAME.old"
)


def check_outputs(
    *files: tuple[str, str | None, str], inputs: Sequence[str | None] = (), overwrite: bool = False
) -> None:
    """Refuse files that were most likely named by mistake; each is its flag, path, None or -, and suffix."""
    read = {Path(path).resolve() for path in inputs if path}
    flags: dict[Path, str] = {}
    for flag, path, suffix in files:
        if path is None:
            continue
        file = Path(path) if path == "-" else Path(path).resolve()
        if file in read:
            raise ValueError(f"{flag} {path} is a file that the command reads: choose another name")
        if file in flags:
            raise ValueError(f"{flags[file]} and {flag} both name {path}: give each a file of its own")
        flags[file] = flag
        if path == "-":
            continue
        _check_answer_file(path, file, suffix)
        _check_writable(path, flag)
        if file.is_file() and file.suffix.lower() != suffix:
            if not overwrite:
                raise FileExistsError(f"{path} exists and is no {suffix} file: choose another name, or --overwrite")
            _step_aside(path, inputs)


def _check_answer_file(path: str, file: Path, suffix: str) -> None:
    """Raise where a path can never be that of an answer."""
    from dulbe_peft.checkpoints import layout
    from dulbe_peft.utils.folders import MANIFEST, check_outside_saved

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


def check_folder(output: str, *inputs: str | None, overwrite: bool = False, flag: str = "--output") -> None:
    """Refuse a folder that cannot be written to; what stands there steps aside where the user says `overwrite`."""
    if overwrite:
        _step_aside(output, inputs)
    _check_writable(output, flag)


def _check_writable(path: str, flag: str) -> None:
    place = Path(path).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not os.access(place, os.W_OK):
        raise PermissionError(f"{place} cannot be written to: choose another {flag}")


def _step_aside(path: str, inputs: Sequence[str | None]) -> None:
    """Give what stands at a path the name NAME.old, so that nothing is lost."""
    place = Path(path)
    if not os.path.lexists(place):
        return
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(f"--overwrite is for a single process: move {path} away before the launch")
    for other in (".", *filter(None, inputs)):
        if place.resolve() in (Path(other).resolve(), *Path(other).resolve().parents):
            raise ValueError(f"--overwrite would move {path}, in which the command works: choose another name")
    names = (f"{place.name}.old{number or ''}" for number in itertools.count())
    aside = next(place.with_name(name) for name in names if not os.path.lexists(place.with_name(name)))
    place.rename(aside)
    print(f"what was in {path} is now in {aside}", file=sys.stderr)


def check_other_folder(learner: str, output: str) -> None:
    """Raise a ValueError where the output is the learner's own folder, its run's, or inside them."""
    from dulbe_peft.checkpoints.layout import task_folders

    own, other = Path(learner).resolve(), Path(output).resolve()
    if own.is_dir() and own in task_folders(own.parent):  # not a copy of a task under another name
        own = own.parent
    if own.is_dir() and own in (other, *other.parents):
        raise ValueError(
            f"--output {output!r} is where the learner {learner!r} is, which is never changed: name another folder "
            "(where classes were added to a run's own data, the same `dulbe-peft run` goes on in its folder)"
        )


def data_name(data: str) -> str:
    """What outputs are named after: the folder of the data, or its name on the Hub."""
    return data.rpartition("/")[2] if data.startswith("hf:") else Path(data).resolve().name


def say_next(*arguments: Any, to: IO[str] | None = None) -> None:
    """Print the command that one would most likely type now."""
    print(f"next: dulbe-peft {shlex.join(map(str, arguments))}", file=to or sys.stdout)


def as_flags(settings: Mapping[str, Any]) -> list[str]:
    """The settings as one would type them."""
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


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
