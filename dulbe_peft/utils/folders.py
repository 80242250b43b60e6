"""Folders that are either whole or not there.

A folder is written under a temporary name beside its place; `manifest.json`, with the size and SHA-256 of every file,
comes last; then one rename puts it in place. Reading checks every file against the manifest first.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dulbe_peft.utils.files import TEMPORARY_MARK, damage, naming, read_json, sync, temporary_folder, write_json

MANIFEST = "manifest.json"
LEARNER_FILE = "learner.json"
PROGRESS_FILE = "progress.json"  # in the folder of a run's task
RESULTS_FILE = "results.json"
TIMINGS_FILE = "timings.json"
MODEL_CARD = "README.md"  # not in the manifest: people edit it where the folder is published
LOCK_SUFFIX = ".dulbe_peft.lock"
TASK_FOLDER = r"task-\d{3,}"  # regular expression of the name that a run gives to a finished task's folder
FORMAT_VERSION = 1
_VERSIONED = ("dulbe_peft", "torch", "transformers", "peft", "accelerate", "safetensors", "numpy", "huggingface_hub")


class CheckpointError(Exception):
    """A saved folder is damaged, in use, of another format, or does not fit what it is loaded into."""


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path` while the block runs: one thread of one process can, others are refused at once.

    The kernel frees the lock of a process that died. The lock file is empty, and the block's end removes it. A link,
    or a file with content, is not ours: it is neither opened nor removed.

    Args:
        path: the lock file; its folder is made where it does not exist.
        what: what the lock protects, for messages.

    Raises:
        CheckpointError: another process or thread holds the lock, or something else is at `path`.
        OSError: the lock file cannot be made.
    """
    with naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _absent_or_empty(path):
            raise CheckpointError(
                f"{what} cannot be locked: {path} is not an empty file, as a lock is; move it away if nothing uses it"
            )
        # A new object each time: it opens the file anew, and flock tells two openings apart, also in one process.
        try:
            held = FileLock(path).acquire(blocking=False)
        except Timeout:
            raise CheckpointError(
                f"{what} is in use by another process or thread: wait until that ends, or choose another folder"
            ) from None
    with held:
        ours = path.lstat()
        try:
            yield
        finally:
            # Whoever opened the file before this finds it without a name, and is refused.
            with suppress(OSError):
                if os.path.samestat(ours, path.lstat()) and _absent_or_empty(path):
                    path.unlink()


def _absent_or_empty(path: Path) -> bool:
    try:
        status = path.lstat()
    except FileNotFoundError:
        return True
    return stat.S_ISREG(status.st_mode) and status.st_size == 0


def commit_folder(folder: Path, write: Callable[[Path], None], fields: dict[str, Any], replace: bool = False) -> None:
    """Let `write` fill a temporary folder, add the manifest, and rename it to `folder`.

    What an earlier call wrote to `folder` is replaced. Files that somebody else put there stay, and so does a model
    card that somebody edited.

    Args:
        folder: the folder to make; a link is followed.
        write: called with the temporary folder.
        fields: JSON-ready entries of the manifest beside `format_version`, `versions`, `files` and `sha256`.
        replace: replace everything in the folder, whoever wrote it, where any of it is a learner's.

    Raises:
        FileExistsError: `folder` is a file, holds something and no manifest of an earlier call, or holds somebody
            else's file where one is to be written.
        OSError: the disk is full or not writable; nothing is left behind and `folder` is as it was.
    """
    folder = folder.resolve()
    known = folder.is_dir() and any((folder / name).exists() for name in (MANIFEST, LEARNER_FILE))
    others = [] if replace and known else _others(folder)
    with naming(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = temporary_folder(folder)
        try:
            write(temporary)
            _seal(temporary, fields)
            _carry_over(folder, others, temporary)
            _put_in_place(temporary, folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def commit_alone(folder: Path, write: Callable[[Path], None], fields: dict[str, Any]) -> None:
    """Do what `commit_folder` does while no one else writes `folder`. First remove what killed processes left.

    Raises:
        CheckpointError: another process or thread is writing `folder`.
        OSError: as `commit_folder`.
    """
    folder = folder.resolve()
    with exclusive(folder.with_name(f".{folder.name}{LOCK_SUFFIX}"), str(folder)):
        clear_leftovers(folder.parent, re.escape(folder.name))
        commit_folder(folder, write, fields)


def commit_export(folder: str | Path, kind: str, write: Callable[[Path], None]) -> Path:
    """Let `write` fill a folder that is used elsewhere, and put it in place whole; replace only an earlier export.

    Args:
        folder: the folder to make; a link is followed.
        kind: the format of the export, for the manifest.
        write: called with the temporary folder.

    Returns:
        The folder.

    Raises:
        FileExistsError: `folder` lies in a saved learner, or holds a file that no export wrote or that was changed
            since. Nothing is changed.
        OSError: as `commit_folder`.
    """
    target = Path(folder).resolve()
    _check_only_an_export(target)
    commit_alone(target, write, {"export": {"format": kind}})
    return Path(folder)


def check_outside_learners(folder: Path, what: str) -> None:
    """Raise a `FileExistsError` where `folder` holds a saved learner, or lies in a folder that does.

    Args:
        folder: where something is to be written.
        what: what it is, for the message.
    """
    for place in (folder.resolve(), *folder.resolve().parents):
        if (place / LEARNER_FILE).is_file():
            raise FileExistsError(f"{place} holds a saved learner: {what} to a folder outside of it")


def _check_only_an_export(folder: Path) -> None:
    """Raise a `FileExistsError` unless all that is in `folder` is what an earlier export wrote."""
    check_outside_learners(folder, "export")
    others, changed = _others(folder), []
    if folder.is_dir() and any(folder.iterdir()):
        manifest = _parsed_manifest(folder)
        if "export" not in manifest:
            raise FileExistsError(f"{folder} was not written by an export: choose another folder, nothing is replaced")
        digests = {Path(name): entry["sha256"] for name, entry in manifest["files"].items()}
        changed = [n for n, digest in digests.items() if (folder / n).is_file() and file_sha256(folder / n) != digest]
    if others or changed:
        name = str([*others, *changed][0])
        raise FileExistsError(
            f"{folder} holds {name!r}, which no export wrote or which was changed since: choose another folder, "
            "nothing is replaced"
        )


def _others(folder: Path) -> list[Path]:
    """Files and empty folders in `folder`, relative to it, that no earlier call wrote.

    Raises:
        FileExistsError: there is something, and no manifest of an earlier call.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return []
    try:
        manifest = _parsed_manifest(folder)
    except CheckpointError as error:
        raise FileExistsError(
            f"{str(folder)!r} exists and was not written by this library: choose another folder, nothing is replaced"
        ) from error
    ours = {Path(name) for name in manifest["files"]} | {Path(MANIFEST)}
    card = folder / MODEL_CARD
    unnoted = "card_sha256" not in manifest and "export" not in manifest  # version 0.1 did not note the digest
    if card.is_file() and (unnoted or manifest.get("card_sha256") == file_sha256(card)):
        ours.add(Path(MODEL_CARD))
    folders = {parent for name in ours for parent in name.parents}
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        whole = path.is_symlink() or not path.is_dir() or not any(path.iterdir())
        if whole and name not in ours and name not in folders:
            found.append(name)
    return found


def _carry_over(folder: Path, names: list[Path], temporary: Path) -> None:
    """Put somebody else's files into the folder that takes the place of `folder`."""
    for name in names:
        source, target = folder / name, temporary / name
        if name == Path(MODEL_CARD):
            target.unlink(missing_ok=True)
        elif target.exists():
            raise FileExistsError(f"{source} was not written by this library and is in the way: move it elsewhere")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir() and not source.is_symlink():
            target.mkdir()
            continue
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:  # a file system without links
            shutil.copy2(source, target, follow_symlinks=False)


def _seal(folder: Path, fields: dict[str, Any]) -> None:
    """Add the manifest, give everything the mode the umask gives, and wait until all of it is on the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MODEL_CARD)
    listing = {
        path.relative_to(folder).as_posix(): {"sha256": file_sha256(path), "size": path.stat().st_size}
        for path in files
    }
    manifest = {"format_version": FORMAT_VERSION, "versions": library_versions(), "files": listing, **fields}
    if (folder / MODEL_CARD).is_file():
        manifest["card_sha256"] = file_sha256(folder / MODEL_CARD)
    write_json(folder / MANIFEST, {**manifest, "sha256": json_sha256(manifest)})
    mask = os.umask(0)
    os.umask(mask)
    for path in [*folder.rglob("*"), folder]:
        os.chmod(path, (0o777 if path.is_dir() else 0o666) & ~mask)
        sync(path)


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename. A folder that was there steps aside first and comes back where something fails.

    A signal is no failure: once the new folder is in its place, it stays.
    """
    aside = temporary.with_name(temporary.name + ".old")
    try:
        if folder.exists():
            os.replace(folder, aside)
        os.replace(temporary, folder)
        sync(folder.parent)
    except BaseException as error:
        if isinstance(error, Exception) and not temporary.exists():
            os.replace(folder, temporary)
        if aside.exists() and not folder.exists():
            os.replace(aside, folder)
        raise
    finally:
        if folder.exists():
            shutil.rmtree(aside, ignore_errors=True)


def clear_leftovers(parent: Path, names: str) -> None:
    """Remove what killed processes left in `parent` while they wrote; the caller keeps living ones out.

    A folder that had stepped aside for a new one that never came is put back.

    Args:
        parent: where `commit_folder` and `write_json` wrote.
        names: regular expression of what they were to write.
    """
    leftover = re.compile(rf"\.({names}){re.escape(TEMPORARY_MARK)}[a-z0-9_]{{8}}(\.old)?")
    for path in sorted(parent.iterdir()):
        match = leftover.fullmatch(path.name)
        if match and match[2] and not (parent / match[1]).exists():
            os.replace(path, parent / match[1])
        elif match:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`, after it and every file it lists have been checked.

    Raises:
        CheckpointError: the folder, its manifest or one of its files is missing, damaged or of a newer format.
    """
    manifest = _parsed_manifest(folder)
    expected = {str(name): (entry["sha256"], entry["size"]) for name, entry in manifest["files"].items()}
    for name, (digest, size) in expected.items():
        file = folder / name
        if ".." in Path(name).parts or Path(name).is_absolute() or not file.is_file():
            raise CheckpointError(f"{folder} misses {name!r}, which its manifest lists")
        if file.stat().st_size != size or file_sha256(file) != digest:
            raise CheckpointError(f"{file} is damaged: its size or SHA-256 differs from the manifest's")
    return manifest


def _parsed_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder` after a check of itself, but not of the files that it lists.

    Raises:
        CheckpointError: it is missing, damaged, somebody else's or of a newer format.
    """
    path = folder / MANIFEST
    if path.exists() and not path.is_file():  # to read a pipe would wait for ever
        raise CheckpointError(f"{path} is no file")
    try:
        manifest: dict[str, Any] = read_json(path)
        version = manifest["format_version"]
        if version == FORMAT_VERSION and manifest.pop("sha256") != json_sha256(manifest):
            raise ValueError("its SHA-256 differs from the one it holds")
        for entry in manifest["files"].values():
            _ = entry["sha256"], entry["size"]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(f"{folder} holds no {MANIFEST}: it was not written to its end") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(damage(path, error)) from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{folder} has format version {version!r}, this library reads {FORMAT_VERSION}")
    return manifest


@contextmanager
def strictly(folder: Path) -> Iterator[None]:
    """What a file's content can make go wrong, as a `CheckpointError` that names the folder."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers and PEFT raise almost anything over a strange file
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            raise
        raise CheckpointError(f"{folder} cannot be loaded: {type(error).__name__}: {error}") from error


def task_folders(output: Path) -> list[Path]:
    """The folders `task-001`, `task-002`, ... of a run, the newest first."""
    folders = [path for path in output.iterdir() if re.fullmatch(TASK_FOLDER, path.name)]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("task-")), reverse=True)


def newest_task(output: Path, say: Callable[[str], None]) -> tuple[Path, dict[str, Any]] | None:
    """The newest task folder of a run that is whole, with its manifest; None where there is none.

    Args:
        output: the run's folder.
        say: called with a line for every damaged folder that is stepped over, with the reason.
    """
    for folder in task_folders(output):
        try:
            return folder, read_manifest(folder)
        except CheckpointError as error:
            say(f"stepping over {folder}: {error}")
    return None


def json_sha256(content: Any) -> str:
    """Hexadecimal SHA-256 of what `content` is as JSON, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def library_versions() -> dict[str, str]:
    """Versions of Python and of the packages a result depends on."""
    versions = {"python": platform.python_version()}
    for name in _VERSIONED:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
