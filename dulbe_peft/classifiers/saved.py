"""What a classifier saves: `<stem>_config.json`, `<stem>.safetensors`, and the extra state of a state dict."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor

from dulbe_peft.classifiers.calibration import TaskNovelty, TaskTemperature
from dulbe_peft.utils import hub
from dulbe_peft.utils.records import Record, first_problem, read_record, write_record
from dulbe_peft.utils.tensors import read_tensors, tensor_shapes, tensors_digest, write_tensors

T = TypeVar("T")
SOLVED = "solved."  # prefix in the file for tensors that were computed from the others


class ExtraState(Record):
    """The part of a state dict that is not tensors, as JSON in a uint8 tensor, which every serialiser supports."""

    class_names: list[str]
    calibration: tuple[TaskTemperature, ...]
    novelty_tasks: tuple[TaskNovelty, ...] = ()

    def to_tensor(self) -> Tensor:
        """Return the JSON as a tensor, (bytes,), uint8."""
        return torch.tensor(list(self.model_dump_json().encode()), dtype=torch.uint8)

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> Self:
        """Read the tensor of `to_tensor`, or raise a `ValueError` if its JSON is damaged."""
        try:
            return cls.model_validate_json(bytes(tensor.tolist()))
        except ValidationError as error:
            raise ValueError(f"class names in the state are damaged: {first_problem(error)}") from error


class SavedClassifier(ExtraState):
    """The contents of `<stem>_config.json`. Files of older versions have no digest of the tensors, `sha256`."""

    format: Literal["dulbe-classifier-2"] = "dulbe-classifier-2"
    name: str
    embed_dim: int
    logit_scale: float
    settings: dict[str, object]
    source: dict[str, str] | None
    sha256: str | None = None


def write(
    folder: str | Path,
    files: tuple[str, str],
    config: SavedClassifier,
    tensors: Mapping[str, Tensor],
    solved: Mapping[str, Tensor],
) -> None:
    """Write the two files of a classifier into a folder, which is created if it does not exist."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    config_file, tensors_file = (Path(folder) / name for name in files)
    both = {**tensors, **{SOLVED + name: tensor for name, tensor in solved.items()}}
    write_tensors(tensors_file, both, {"format": config.format})
    write_record(config_file, config.model_copy(update={"sha256": tensors_digest(both)}))


@dataclass(frozen=True)
class SavedFiles:
    """The two files of a saved classifier, and the commit on the Hub that they were downloaded from, or None."""

    config_file: Path
    tensors_file: Path
    commit: str | None

    @classmethod
    def find(
        cls, owner: str, files: tuple[str, str], source: str | Path, options: tuple[str | None, ...]
    ) -> "SavedFiles":
        """Find the files in a folder or download them; `options` are revision, token and folder for downloads."""
        folder, commit = Path(source), None
        if not folder.is_dir():
            folder, commit = hub.fetch(source, files, *options)
        config_file, tensors_file = (folder / name for name in files)
        if not config_file.is_file():
            raise FileNotFoundError(f"{config_file} does not exist: {folder} contains no saved {owner}")
        return cls(config_file, tensors_file, commit)

    def config(self, name: str) -> SavedClassifier:
        """Read the configuration, and check the name of the classifier."""
        config = read_record(self.config_file, SavedClassifier)
        if config.name != name:
            raise ValueError(f"{self.config_file} contains a classifier {config.name!r}, expected {name!r}")
        return config

    def shapes(self) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Return the shapes of the tensors and of the solved tensors, without reading them."""
        return _parted(tensor_shapes(self.tensors_file))

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor], str]:
        """Return the tensors, the solved tensors, and their digest."""
        tensors = read_tensors(self.tensors_file)[0]
        return *_parted(tensors), tensors_digest(tensors)


def _parted(tensors: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Split the entries of a file into those of the state and those with the prefix `SOLVED`, by name."""
    solved = {name.removeprefix(SOLVED): value for name, value in tensors.items() if name.startswith(SOLVED)}
    return {name: value for name, value in tensors.items() if not name.startswith(SOLVED)}, solved
