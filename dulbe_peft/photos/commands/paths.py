"""Check the inputs and outputs that a command is given, before slow imports."""

import os
import re
import sys
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import IO, Any

import click

from dulbe_peft.utils.files import is_standard_output, is_stream, keep_as_old, read_json, rename_to_old
from dulbe_peft.utils.terminal import printable

OUTPUTS = "outputs"  # where the context of a command keeps the flags of its outputs
FOLDER = "folder"  # the kind of an output that is not a file
DATA_KINDS = {".csv", ".json", ".parquet"}  # kinds of outputs that may be inputs; nobody reads a page or a LaTeX table


def check_given(
    learner: str | None = None, model: str | None = None, data: str | None = None, **files: str | None
) -> None:
    """Raise an error if a learner, a model, data or a file does not exist; `files` maps a flag's name to its file."""
    if learner is not None:
        from dulbe_peft.checkpoints.locating import check_there

        check_there(learner)
    if model is not None:
        from dulbe_peft.encoders.registry import find_model

        find_model(model)
    if data is not None:
        from dulbe_peft.data.readers import check_data

        check_data(data)
    for name, file in files.items():
        if file and not Path(file).is_file():
            raise FileNotFoundError(f"--{name.replace('_', '-')} {file!r} is not a file")


def check_images(paths: Sequence[str]) -> None:
    """Raise a FileNotFoundError if none of the images and folders of images exists."""
    from dulbe_peft.data.folders import holds_image

    for path in paths:
        with suppress(OSError):  # an unreadable folder is reported later
            if holds_image(Path(path)) if os.path.isdir(path) else os.path.lexists(path):
                return
    why = "holds no image" if os.path.isdir(paths[0]) else "does not exist"
    raise FileNotFoundError(f"{printable(paths[0])} {why}" + (", nor do the others" if paths[1:] else ""))


def noted(learner: str) -> dict[str, Any]:
    """Return the description in a local learner's folder, or {} if it is damaged; loading reports the damage."""
    from dulbe_peft.checkpoints.layout import LEARNER_FILE, task_folders

    with suppress(OSError, ValueError, TypeError, IndexError):
        folder = Path(learner)
        folder = folder if (folder / LEARNER_FILE).exists() else task_folders(folder)[0]
        return dict(read_json(folder / LEARNER_FILE))
    return {}


def saved_classes(learner: str) -> list[str]:
    """Return the classes that a local learner's folder lists."""
    return [name for task in noted(learner).get("tasks", []) for name in task]


def claim(
    *outputs: tuple[str, str | None, str],
    reads: Sequence[str | None] = (),
    apart: Sequence[str | None] = (),
    corrected: Collection[str] = (),
    overwrite: bool = False,
) -> None:
    """Refuse outputs that cannot be written, or that would replace what the command reads, before any work is done.

    The command reads the paths in its own arguments, `reads` and `apart`, and the tables and images below them. An
    output is compared with them by device and inode, so that a link is recognised.

    Args:
        outputs: For each output, its flag, its path or None, and its kind: the suffix of a file, or `FOLDER`.
        reads: Further paths that the command reads.
        apart: Paths that the command reads and whose folders must not contain an output.
        corrected: Flags of tables that people correct; an existing one is not replaced.
        overwrite: Whether existing files and folders are kept as NAME.old instead of being refused.
    """
    from dulbe_peft.utils.folders import put_back

    if (context := click.get_current_context(silent=True)) is not None:
        context.meta.setdefault(OUTPUTS, set()).update(flag for flag, *_ in outputs)
    given = _given_paths({flag for flag, *_ in outputs})
    sources, flags = _sources([*reads, *apart, *given]), dict[Path, str]()
    for flag, path, kind in outputs:
        if path is None:
            continue
        target = Path(path).resolve()
        if not path or (kind != FOLDER and target.is_dir()):
            raise ValueError(f"{flag} is {path!r}, expected the path of a {kind}{'' if kind == FOLDER else ' file'}")
        if target in flags:
            raise ValueError(f"{flags[target]} and {flag} are both {path}: give them different paths")
        flags[target] = flag
        if is_stream(path):
            continue
        for source in filter(None, apart):
            if _lies_in(target, Path(source)):
                raise ValueError(f"{flag} {path!r} lies in {source!r}, which is never changed: choose another folder")
        if kind == FOLDER:
            put_back(target)
        else:
            _check_file(path, target)
        existing = next(parent for parent in (target, *target.parents) if parent.exists())
        if not os.access(existing, os.W_OK):
            raise PermissionError(f"{existing} cannot be written to: choose another {flag}")
        if kind == FOLDER:
            if overwrite:
                _step_aside(path, sources)
        elif why := _why_kept(target, kind, sources, flag in corrected):
            if not (overwrite and target.is_file()):
                way_out = ", or --overwrite, which keeps it as NAME.old" * target.is_file()
                raise FileExistsError(f"{flag} {path} {why}: choose another name{way_out}")
            keep_as_old(target)


def _given_paths(outputs: Collection[str]) -> list[str]:
    """Return the texts that the current command got as arguments, except those of the flags `outputs`."""
    context = click.get_current_context(silent=True)
    if context is None:
        return []
    own = {each.name for each in context.command.params if {*each.opts, str(each.name).upper()} & {*outputs}}
    values = [value for name, value in context.params.items() if name not in own]
    words = chain.from_iterable(value if isinstance(value, (list, tuple)) else [value] for value in values)
    return [word for word in words if isinstance(word, str)]


def _sources(paths: Iterable[str | None]) -> set[Path]:
    """Return the resolved paths of the inputs that exist."""
    sources = set[Path]()
    for path in filter(None, paths):
        with suppress(OSError, ValueError):  # the text of another setting, which may have any length and character
            if Path(path).exists():
                sources.add(Path(path).resolve())
    return sources


def _why_kept(target: Path, kind: str, sources: set[Path], corrected: bool) -> str:
    """Return why a file must not be replaced, or "" if it may be, or if there is nothing to lose."""
    from dulbe_peft.data.labels import METADATA

    folders = [source for source in sources if source.is_dir()]
    if not target.exists():
        would_be_data = kind == ".parquet" or target.name in METADATA
        inside = next((folder for folder in folders if would_be_data and folder in target.parents), None)
        return f"lies in {inside}, whose images would no longer be read, but this file" if inside else ""
    if any(source.is_file() and source.samefile(target) for source in sources):
        return "is a file that the command reads"
    for folder in folders if kind in DATA_KINDS else ():
        if folder in target.parents or _holds(folder, target):
            return f"is a file in {folder}, which the command reads"
    if target.suffix.lower() != kind:
        return f"exists and is not a {kind} file"
    return "may hold your corrections" if corrected and target.stat().st_size else ""


def _holds(folder: Path, target: Path) -> bool:
    """Return whether a folder or one below it holds a file under any name. Links are followed."""
    entered, wanted = set[tuple[int, int]](), os.stat(target)
    for here, folders, names in os.walk(folder, followlinks=True):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in entered:
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        with os.scandir(here) as entries:  # an entry's inode is known without reading the file's status
            for entry in entries:
                if (entry.is_symlink() or entry.inode() == wanted.st_ino) and entry.name in names:
                    with suppress(OSError):  # a broken link
                        if os.path.samestat(entry.stat(), wanted):
                            return True
    return False


def _lies_in(target: Path, folder: Path) -> bool:
    """Return whether a path is `folder` or inside it. If `folder` is a task's, the folder of the whole run counts."""
    from dulbe_peft.checkpoints.layout import TASK_FOLDER

    folder = folder.resolve()
    if re.fullmatch(TASK_FOLDER, folder.name):  # a copy of a task's folder with another name belongs to no run
        folder = folder.parent
    return folder.is_dir() and folder in (target, *target.parents)


def _check_file(path: str, target: Path) -> None:
    """Raise an error if a path cannot be an output file."""
    from dulbe_peft.checkpoints import layout
    from dulbe_peft.utils.folders import MANIFEST, check_outside_saved

    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: the folder {target.parent} does not exist")
    check_outside_saved(target.parent, f"write {path}")
    reserved = {layout.LEARNER_FILE, MANIFEST, layout.PROGRESS_FILE, layout.RESULTS_FILE, layout.TIMINGS_FILE}
    reserved |= {"sources.json", "cell.json", "comparison.json", "config.json"}
    of_a_run = target.name == "predictions.csv" and (target.parent / layout.RESULTS_FILE).is_file()
    if target.name in reserved or of_a_run:
        raise FileExistsError(f"{path} is a file that a run or a model needs: choose another name")


def _step_aside(path: str, sources: set[Path]) -> None:
    """Rename an existing folder, or a file in its place, to NAME.old, so that nothing is lost."""
    target = Path(path)
    if not os.path.lexists(target):
        return
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise ValueError(f"--overwrite works only with a single process: move {path} away before the launch")
    for other in (Path.cwd(), *sources):
        if target.resolve() in (other, *other.parents):
            raise ValueError(f"--overwrite would move {path}, which the command uses: choose another name")
    old = rename_to_old(target)

    def put_back() -> None:
        if not os.path.lexists(target) and os.path.lexists(old):
            old.rename(target)
            print(f"renamed {old} back to {target}, because nothing was written", file=sys.stderr)

    if (context := click.get_current_context(silent=True)) is not None:
        context.call_on_close(put_back)


def message_stream(*outputs: str | None) -> IO[str]:
    """Return the stream for messages: standard error if standard output is one of the command's outputs."""
    return sys.stderr if any(path and is_standard_output(path) for path in outputs) else sys.stdout
