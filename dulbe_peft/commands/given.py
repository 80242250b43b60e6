"""What a person names for a command, looked at before anything that takes time is imported."""

from pathlib import Path


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
