"""Where a saved learner lies, here or on the Hub; found without torch, so that a wrong name costs nothing."""

import os
import sys
from pathlib import Path
from typing import Any

from dulbe_peft.checkpoints import layout
from dulbe_peft.checkpoints.layout import LEARNER_FILE
from dulbe_peft.utils import folders, hub
from dulbe_peft.utils.folders import MANIFEST, CheckpointError, put_back

READABLE = {".safetensors", ".json", ".txt", ".jinja", ".model", ".csv"}
_EXPECTED = "name a run's folder, one of its tasks, or a Hub id"


def check_there(source: str) -> None:
    """Raise what `locate` raises where there is no learner at all; whether it is whole is not looked at."""
    folder = Path(source)
    put_back(folder)
    if not source or not folder.is_dir():
        _fetched(source)
    elif not (folder / MANIFEST).exists() and not layout.task_folders(folder):
        _newest_task(folder)


def locate(
    source: str | Path, revision: str | None, token: str | None, cache_dir: str | Path | None
) -> tuple[Path, folders.Manifest, dict[str, str] | None]:
    """A learner's folder, of a run the newest whole task; its manifest, checked; repository and commit on the Hub."""
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
    """The folder with the manifest of a learner on the Hub, and its commit."""
    if not str(source):
        raise ValueError("the folder or repository to load is '', expected its path or id")
    if Path(source).exists():
        raise CheckpointError(f"{source} is a file and no saved learner: {_EXPECTED}")
    return hub.fetch(source, [MANIFEST], *where)


def listed(folder: Path, manifest: folders.Manifest) -> set[str]:
    """The names of a learner's files, after a check that each is of a kind that is read."""
    files = set(manifest.files)
    strange = sorted(name for name in files if Path(name).suffix not in READABLE)
    if strange or LEARNER_FILE not in files:
        raise CheckpointError(
            f"{folder / MANIFEST} is of no learner: it lists {strange[:3]}, expected {LEARNER_FILE} and files of the "
            f"kinds {', '.join(sorted(READABLE))} alone"
        )
    return files


def _newest_task(folder: Path) -> tuple[Path, folders.Manifest]:
    """The newest whole task folder of a run and its manifest; damaged ones are named on standard error."""
    damaged: list[str] = []
    if not layout.task_folders(folder):
        raise CheckpointError(f"{folder} is no saved learner, for it holds no {MANIFEST}: {_EXPECTED}")
    found = layout.newest_task(folder, damaged.append)
    if found is None:
        raise CheckpointError(f"{folder} is a run's folder, and none of its tasks is whole: {'; '.join(damaged)}")
    if os.environ.get("RANK", "0") == "0":
        for line in damaged:
            print(line, file=sys.stderr)
    return found
