"""The files of a saved learner and of a run by name, and the folders of a run's tasks."""

import re
from collections.abc import Callable
from pathlib import Path

from dulbe_peft.utils.folders import CheckpointError, Manifest, read_manifest

LEARNER_FILE = "learner.json"
PROGRESS_FILE = "progress.json"  # in the folder of a run's task
RESULTS_FILE = "results.json"
TASK_FILE = "task.safetensors"  # in a checkpoint that a DualModeTrainer writes in the middle of a task
TIMINGS_FILE = "timings.json"
TASK_FOLDER = r"task-\d{3,}"  # regular expression of the name that a run gives to a finished task's folder


def task_folders(output: Path) -> list[Path]:
    """The folders `task-001`, `task-002`, ... of a run, the newest first."""
    folders = [path for path in output.iterdir() if re.fullmatch(TASK_FOLDER, path.name)]
    return sorted(folders, key=lambda path: int(path.name.removeprefix("task-")), reverse=True)


def newest_task(output: Path, warn: Callable[[str], None]) -> tuple[Path, Manifest] | None:
    """The newest task folder of a run that is whole, with its manifest; `warn` is told of every damaged one."""
    for folder in task_folders(output):
        try:
            return folder, read_manifest(folder)
        except CheckpointError as error:
            warn(f"stepping over {folder}: {error}")
    return None
