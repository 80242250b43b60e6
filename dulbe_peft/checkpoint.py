"""Folders that are either whole or not there.

A folder is written under a temporary name beside its place; `manifest.json`, with the size and SHA-256 of every file,
comes last; then one rename puts it in place. Reading checks every file against the manifest first.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT_VERSION = 1


class CheckpointError(Exception):
    """A saved folder is damaged, of another format, or does not fit what it is loaded into."""


def commit_folder(folder: Path, write: Callable[[Path], None], fields: dict[str, Any], replace: bool = False) -> None:
    """Let `write` fill a temporary folder, add the manifest, and rename it to `folder`.

    Args:
        folder: the folder to make; one that an earlier call made is replaced.
        write: called with the temporary folder.
        replace: replace also a folder without a manifest, such as a damaged one.
        fields: JSON-ready entries of the manifest beside `format_version` and `files`.

    Raises:
        FileExistsError: `folder` is a file, or holds something else than what an earlier call wrote.
        OSError: the disk is full or not writable; nothing is left behind and `folder` is as it was.
    """
    if (
        not replace
        and folder.exists()
        and not (folder / MANIFEST).is_file()
        and (not folder.is_dir() or any(folder.iterdir()))
    ):
        raise FileExistsError(
            f"{str(folder)!r} exists and holds no {MANIFEST}: choose another folder, nothing is replaced"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        os.chmod(temporary, 0o777 & ~_umask())
        write(temporary)
        files = sorted(path for path in temporary.rglob("*") if path.is_file())
        listing = {
            path.relative_to(temporary).as_posix(): {"sha256": _sha256(path), "size": path.stat().st_size}
            for path in files
        }
        manifest = {"format_version": FORMAT_VERSION, "files": listing, **fields}
        write_json(temporary / MANIFEST, manifest)
        for path in [*files, temporary / MANIFEST]:
            os.chmod(path, 0o666 & ~_umask())
            _sync(path)
        _sync(temporary)
        _put_in_place(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _put_in_place(temporary: Path, folder: Path) -> None:
    """Rename; a folder that was there steps aside first and comes back where the rename fails."""
    aside = temporary.with_name(temporary.name + ".old")
    if folder.exists():
        os.replace(folder, aside)
    try:
        os.replace(temporary, folder)
    except BaseException:
        if aside.exists():
            os.replace(aside, folder)
        raise
    _sync(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`, after every file it lists has been checked against it.

    Raises:
        CheckpointError: the folder, its manifest or one of its files is missing, damaged or of a newer format.
    """
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        version, files = manifest["format_version"], manifest["files"]
        expected = {str(name): (str(entry["sha256"]), int(entry["size"])) for name, entry in files.items()}
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} holds no {MANIFEST}: it was not written to its end") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{folder} has format version {version!r}, this library reads {FORMAT_VERSION}")
    for name, (digest, size) in expected.items():
        file = folder / name
        if ".." in Path(name).parts or Path(name).is_absolute() or not file.is_file():
            raise CheckpointError(f"{folder} misses {name!r}, which its manifest lists")
        if file.stat().st_size != size or _sha256(file) != digest:
            raise CheckpointError(f"{file} is damaged: its size or SHA-256 differs from the manifest's")
    return manifest


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON with sorted keys, through a temporary file and a rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
