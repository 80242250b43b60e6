"""What a person names for a command, looked at before anything that takes time is imported."""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dulbe_peft.utils.files import read_json
from dulbe_peft.utils.terminal import printable


def check_given(
    learner: str | None = None, model: str | None = None, data: str | None = None, **files: str | None
) -> None:
    """Raise where a learner, a model, data or a file is not there; `files` are called by their flags."""
    if learner is not None:
        from dulbe_peft.checkpoints.locating import check_there

        check_there(learner)
    if model:
        from dulbe_peft.encoders.registry import find_model

        find_model(model)
    if data:
        from dulbe_peft.data.readers import check_data

        check_data(data)
    for name, file in files.items():
        if file and not Path(file).is_file():
            raise FileNotFoundError(f"--{name.replace('_', '-')} {file!r} is no file")


def check_images(paths: Sequence[str]) -> None:
    """Raise where not one of some images and folders of images is there."""
    from dulbe_peft.data.folders import folder_content

    for path in paths:
        with suppress(OSError):  # what cannot be read is said of it later
            if folder_content(Path(path))[0] if os.path.isdir(path) else os.path.lexists(path):
                return
    why = "holds no image" if os.path.isdir(paths[0]) else "does not exist"
    raise FileNotFoundError(f"{printable(paths[0])} {why}" + (", nor do the others" if paths[1:] else ""))


def noted(learner: str) -> dict[str, Any]:
    """What a learner that lies here says of itself; nothing where it is damaged, which loading it says."""
    from dulbe_peft.checkpoints.layout import LEARNER_FILE, task_folders

    with suppress(OSError, ValueError, TypeError, IndexError):
        folder = Path(learner)
        folder = folder if (folder / LEARNER_FILE).exists() else task_folders(folder)[0]
        return dict(read_json(folder / LEARNER_FILE))
    return {}


def noted_classes(learner: str) -> list[str]:
    """The classes of a learner that lies here."""
    return [name for task in noted(learner).get("tasks", []) for name in task]
