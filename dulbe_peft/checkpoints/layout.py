"""File names of a saved learner and of a run, and the folders of a run's tasks."""

import re
from collections.abc import Callable
from pathlib import Path

from dulbe_peft.utils.folders import CheckpointError, Manifest, read_manifest

LEARNER_FILE = "learner.json"
PROGRESS_FILE = "progress.json"  # in the folder of a run's task
RESULTS_FILE = "results.json"
TASK_FILE = "task.safetensors"  # in a checkpoint that a DualModeTrainer writes during a task
TIMINGS_FILE = "timings.json"
TASK_FOLDER = r"task-\d{3,}"  # regular expression for the folder names of a run's finished tasks


def task_folders(output: Path) -> list[Path]:
    """Return the folders `task-001`, `task-002`, ... of a run, newest first."""
    folders = [path for path in output.iterdir() if re.fullmatch(TASK_FOLDER, path.name)]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("task-")), reverse=True)


def newest_task(output: Path, warn: Callable[[str], None]) -> tuple[Path, Manifest] | None:
    """Return the newest valid task folder of a run and its manifest; `warn` is called for every damaged folder."""
    for folder in task_folders(output):
        try:
            return folder, read_manifest(folder)
        except CheckpointError as error:
            warn(f"skipping {folder}: {error}")
    return None
