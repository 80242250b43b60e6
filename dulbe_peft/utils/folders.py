"""Folders that are either complete or absent: written under a temporary name, given a manifest, and then renamed.

A folder may be written if it does not exist, if it is empty, or if its manifest says that an earlier call of the same
kind wrote it. Before a folder is read, every file is checked against the manifest.
"""

import hashlib
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from dulbe_peft.utils.files import (
    TEMPORARY_MARK,
    paths_below,
    plain_reason,
    remove_temporary,
    sync,
    temporary_folder,
    write_errors,
)
from dulbe_peft.utils.records import Count, Record, read_record, write_record

MANIFEST = "manifest.json"
MODEL_CARD = "README.md"  # not checked when a folder is read, because people edit published cards
LOCK_SUFFIX = ".dulbe_peft.lock"
_VERSIONED = ("dulbe_peft", "torch", "transformers", "peft", "accelerate", "safetensors", "numpy", "huggingface_hub")


class CheckpointError(Exception):
    """Raised if a saved folder is damaged, in use, in another format, or does not fit what it is loaded into."""


class FileEntry(Record):
    """One file of a folder."""

    sha256: str
    size: Count


class Manifest(Record):
    """`manifest.json`: the versions that wrote a folder, the files in it, and further notes of the writer."""

    format_version: Literal[1] = 1
    kind: str
    versions: dict[str, str]
    files: dict[str, FileEntry]
    card_sha256: str | None  # of the model card when it was written
    notes: dict[str, Any]
    sha256: str = ""  # of all fields above

    def digest(self) -> str:
        return json_sha256(self.model_dump(mode="json", exclude={"sha256"}))


def commit_folder(
    folder: Path,
    kind: str,
    write: Callable[[Path], None],
    notes: dict[str, Any] | None = None,
    *,
    lock: bool = True,
    overwrite: bool = False,
) -> None:
    """Let `write` fill a temporary folder, add the manifest, and rename it to `folder`. Links are followed.

    Files in `folder` that this library did not write are kept, unless `overwrite` is set. Without `lock`, the caller
    must keep other writers out.
    """
    folder = folder.resolve()
    check_outside_saved(folder.parent, f"write the {kind}")
    locked = exclusive(folder.with_name(f".{folder.name}{LOCK_SUFFIX}"), str(folder)) if lock else nullcontext()
    with locked, write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if lock:
            clear_leftovers(folder.parent, re.escape(folder.name))
        foreign = [] if overwrite else _foreign_files(folder, kind)
        with _sealed(folder, kind, write, notes or {}) as temporary:
            for name in foreign:
                _keep(folder / name, temporary / name)
            _put_in_place(temporary, folder)


def fill_folder(folder: Path, kind: str, write: Callable[[Path], None]) -> None:
    """Add the files that `write` creates, and a manifest, to a folder. Files with other names are kept."""
    folder = folder.resolve()
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with _sealed(folder, kind, write, {}) as temporary:
            (folder / MANIFEST).unlink(missing_ok=True)  # so that an incomplete folder has no manifest
            paths = [path for path in paths_below(temporary) if path.is_file() and path.name != MANIFEST]
            for path in (*paths, temporary / MANIFEST):
                target = folder / path.relative_to(temporary)
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
            sync(folder)


def check_outside_saved(folder: Path, what: str) -> None:
    """Raise a `FileExistsError` if `commit_folder` wrote `folder` or one of its parents.

    `what` is the action in the message, such as "write the export".
    """
    for place in (folder.resolve(), *folder.resolve().parents):
        with suppress(CheckpointError):
            kind = parse_manifest(place).kind
            raise FileExistsError(f"{place} is a saved folder of kind {kind!r}: {what} to a folder outside of it")


def check_replaceable(files: Sequence[Path], kind: type[Record] | None = None) -> None:
    """Raise a `FileExistsError` if one of a command's files exists and no earlier call of the command wrote them.

    An earlier call is recognised by the first file: it must exist and, if `kind` is given, hold such a record.
    """
    existing = next((path for path in files if path.exists() or path.is_symlink()), None)
    try:
        if existing is not None:
            files[0].stat() if kind is None else read_record(files[0], kind)
    except (ValueError, OSError) as error:
        problem = f"{existing} was not written by an earlier call of this command ({error})"
        raise FileExistsError(f"{problem}: choose another folder or move the file. Nothing was replaced") from error


def _foreign_files(folder: Path, kind: str) -> list[Path]:
    """Return the files in `folder`, relative to it, that no earlier call wrote.

    Raises:
        FileExistsError: If the folder was not written by an earlier call of the same kind.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return []
    try:
        manifest = parse_manifest(folder)
    except CheckpointError as error:
        raise FileExistsError(f"{str(folder)!r} exists and was not written by this library: choose another") from error
    if manifest.kind != kind:
        raise FileExistsError(f"{folder} is a folder of kind {manifest.kind!r}, expected {kind!r}: choose another")
    written = {Path(name) for name in (*manifest.files, MANIFEST)}
    card = folder / MODEL_CARD
    if card.is_file() and manifest.card_sha256 == file_sha256(card):
        written.add(Path(MODEL_CARD))
    files = (path for path in paths_below(folder) if path.is_symlink() or not path.is_dir())
    return [name for path in files if (name := path.relative_to(folder)) not in written]


def _keep(source: Path, target: Path) -> None:
    """Link or copy a user's file from a folder into the folder that is about to replace it."""
    if target.name == MODEL_CARD:
        target.unlink(missing_ok=True)
    elif target.exists():
        raise FileExistsError(f"{source} was not written by this library and is in the way: move it elsewhere")
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # the file system has no hard links
        shutil.copy2(source, target, follow_symlinks=False)


@contextmanager
def _sealed(place: Path, kind: str, write: Callable[[Path], None], notes: dict[str, Any]) -> Iterator[Path]:
    """Yield a temporary folder with the files of `write` and a manifest, in the umask's modes and flushed to disk."""
    with temporary_folder(place) as folder:
        write(folder)
        paths = paths_below(folder)
        files = {
            path.relative_to(folder).as_posix(): FileEntry(sha256=file_sha256(path), size=path.stat().st_size)
            for path in paths
            if path.is_file() and path.name != MODEL_CARD
        }
        card = folder / MODEL_CARD
        digest = file_sha256(card) if card.is_file() else None
        manifest = Manifest(kind=kind, versions=library_versions(), files=files, card_sha256=digest, notes=notes)
        write_record(folder / MANIFEST, manifest.model_copy(update={"sha256": manifest.digest()}))
        mask = os.umask(0)
        os.umask(mask)
        for path in [*paths, folder / MANIFEST, folder]:
            os.chmod(path, (0o777 if path.is_dir() else 0o666) & ~mask)
            sync(path)
        yield folder


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename `temporary` to `folder`. An existing folder is moved aside first, and back if the rename fails."""
    aside = temporary.with_name(temporary.name + ".old")
    try:
        if folder.exists():
            os.replace(folder, aside)
        os.replace(temporary, folder)
    finally:
        if aside.exists() and folder.exists():
            remove_temporary(aside)
        elif aside.exists():
            os.replace(aside, folder)
    with suppress(OSError):  # the folder is complete and in place; some file systems cannot flush a folder's entries
        sync(folder.parent)


def clear_leftovers(parent: Path, names: str) -> None:
    """Clean up in `parent` after killed writers of folders whose names match the regular expression `names`.

    A folder that was moved aside and not yet replaced is replaced now, by the folder that was about to, which was
    complete by then. If that one is gone, it is moved back. Other temporary folders are removed.
    """
    leftovers = _leftovers(parent, names)
    for path, name, aside in leftovers:
        if aside and not (parent / name).exists():
            successor = path.with_suffix("")
            os.replace(successor if (successor / MANIFEST).is_file() else path, parent / name)
    for path, _, _ in leftovers:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def put_back(folder: Path) -> None:
    """Restore a saved folder if its writer was killed between the two renames of a commit. Links are followed.

    Raises:
        CheckpointError: If another process is writing the folder, or it cannot be renamed. The message says where it
            is.
    """
    if folder.exists():
        return
    folder, aside = folder.resolve(), list[Path]()
    name = re.escape(folder.name)
    with suppress(OSError):  # the parent folder cannot be listed
        aside = [path for path, _, moved in _leftovers(folder.parent, name) if moved]
    if not aside:
        return
    try:
        with exclusive(folder.with_name(f".{folder.name}{LOCK_SUFFIX}"), str(folder)):
            clear_leftovers(folder.parent, name)
    except OSError as error:
        why = f"a program was killed while it replaced {folder}, whose content is now in {aside[0]}"
        raise CheckpointError(f"{why}: rename it yourself, because renaming it failed ({error})") from error
    print(f"restored {folder}, which a killed program was replacing", file=sys.stderr)


def _leftovers(parent: Path, names: str) -> list[tuple[Path, str, bool]]:
    """Return for each path that a killed writer left: the path, its final name, and whether it was moved aside."""
    leftover = re.compile(rf"\.({names}){re.escape(TEMPORARY_MARK)}[a-z0-9_]{{8}}(\.old)?")
    matches = [(path, leftover.fullmatch(path.name)) for path in sorted(parent.iterdir())]
    return [(path, match[1], bool(match[2])) for path, match in matches if match]


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` while the block runs. Another thread or process that tries gets an error at once.

    `what` names the locked thing in messages.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        foreign = path.is_symlink() or (path.exists() and not (path.is_file() and path.stat().st_size == 0))
        if not foreign:
            path.touch()  # because filelock may report a folder that is not writable as being in use
    except OSError as error:
        raise OSError(f"{path.parent} cannot be written to ({error.strerror}): choose another folder") from error
    if foreign:  # locking would empty the file
        raise CheckpointError(f"{what} cannot be locked: {path} is not an empty lock file; move it elsewhere")
    with write_errors(path):
        # A new FileLock opens the file again. flock distinguishes two openings even within one process.
        try:
            lock = FileLock(path).acquire(blocking=False)
        except Timeout:
            raise CheckpointError(f"{what} is in use by another process or thread: choose another name") from None
    with lock:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of `folder` after checking it and every file it lists.

    Raises:
        CheckpointError: If the manifest or a file is missing or damaged.
    """
    manifest = parse_manifest(folder)
    for name, entry in manifest.files.items():
        outside = "\0" in name or ".." in Path(name).parts or Path(name).is_absolute()
        if outside or not (file := folder / name).is_file():
            raise CheckpointError(f"{folder} lacks the file {name!r}, which its manifest lists")
        if file.stat().st_size != entry.size or file_sha256(file) != entry.sha256:
            raise CheckpointError(f"{file} is damaged: its size or SHA-256 differs from the manifest's")
    return manifest


def parse_manifest(folder: Path) -> Manifest:
    """Return the manifest of `folder` after checking the manifest itself, but not the files that it lists."""
    path = folder / MANIFEST
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise CheckpointError(f"{path} is not a regular file")
    try:
        manifest = read_record(path, Manifest)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder} has no {MANIFEST}: it was not written completely") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from error
    if manifest.sha256 != manifest.digest():
        raise CheckpointError(f"{path} is damaged: its SHA-256 differs from the one stored in it")
    return manifest


@contextmanager
def load_errors(folder: Path) -> Iterator[None]:
    """Turn errors that the content of a file can cause into a `CheckpointError` that names the folder."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers and PEFT raise many kinds of errors for an invalid file
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        raise CheckpointError(f"{folder} cannot be loaded: {type(error).__name__}: {plain_reason(error)}") from error


def json_sha256(content: object) -> str:
    """Return the SHA-256 of `content` as JSON with sorted keys, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on."""
    versions = {"python": platform.python_version(), **dict.fromkeys(_VERSIONED, "not installed")}
    for name in _VERSIONED:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = _version(name)
    return versions


_version = cache(metadata.version)  # cached, because it reads a package's whole metadata for every saved folder
