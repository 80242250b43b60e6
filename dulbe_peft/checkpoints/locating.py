"""Find a saved learner on this machine or on the Hub, without importing torch, so that a wrong name fails at once."""

import os
import sys
from pathlib import Path
from typing import Any

from dulbe_peft.checkpoints import layout
from dulbe_peft.checkpoints.layout import LEARNER_FILE
from dulbe_peft.utils import folders, hub
from dulbe_peft.utils.folders import MANIFEST, CheckpointError, put_back

READABLE = {".safetensors", ".json", ".txt", ".jinja", ".model", ".csv"}
_EXPECTED = "pass a run's folder, one of its task folders, or a Hub id"


def check_there(source: str) -> None:
    """Raise the error of `locate` if there is no learner at all, without checking that its files are valid."""
    folder = Path(source)
    put_back(folder)
    if not source or not folder.is_dir():
        _fetched(source)
    elif not (folder / MANIFEST).exists() and not layout.task_folders(folder):
        _newest_task(folder)


def locate(
    source: str | Path, revision: str | None, token: str | None, cache_dir: str | Path | None
) -> tuple[Path, folders.Manifest, dict[str, str] | None]:
    """Return the folder of a learner, its checked manifest, and its repository and commit if it is on the Hub.

    For a run's folder, the newest valid task folder is returned.
    """
    put_back(Path(source))
    if str(source) and Path(source).is_dir():
        folder = Path(source)
        if (folder / MANIFEST).exists():
            return folder, folders.read_manifest(folder), None
        return *_newest_task(folder), None
    folder, commit = _fetched(source, revision, token, cache_dir)
    hub.fetch(source, sorted(listed(folder, folders.parse_manifest(folder))), commit, token, cache_dir)
    return folder, folders.read_manifest(folder), {"repo_id": str(source), "commit": commit}


def _fetched(source: str | Path, *where: Any) -> tuple[Path, str]:
    """Download the manifest of a learner on the Hub; returns its folder and the commit."""
    if not str(source):
        raise ValueError("the folder or repository to load is '', expected its path or id")
    if Path(source).exists():
        raise CheckpointError(f"{source} is a file, not a saved learner: {_EXPECTED}")
    return hub.fetch(source, [MANIFEST], *where)


def listed(folder: Path, manifest: folders.Manifest) -> set[str]:
    """Return the file names of a learner, after a check that all have a kind that is read."""
    files = set(manifest.files)
    strange = sorted(name for name in files if Path(name).suffix not in READABLE)
    if strange or LEARNER_FILE not in files:
        raise CheckpointError(
            f"{folder / MANIFEST} does not belong to a learner: it lists {strange[:3]}, expected {LEARNER_FILE} and "
            f"only files of the kinds {', '.join(sorted(READABLE))}"
        )
    return files


def _newest_task(folder: Path) -> tuple[Path, folders.Manifest]:
    """Return the newest valid task folder of a run and its manifest; damaged ones are reported on standard error."""
    damaged: list[str] = []
    if not layout.task_folders(folder):
        raise CheckpointError(f"{folder} is not a saved learner, because it has no {MANIFEST}: {_EXPECTED}")
    newest = layout.newest_task(folder, damaged.append)
    if newest is None:
        raise CheckpointError(
            f"{folder} is a run's folder, but none of its task folders is valid: {'; '.join(damaged)}"
        )
    if os.environ.get("RANK", "0") == "0":
        for line in damaged:
            print(line, file=sys.stderr)
    return newest
