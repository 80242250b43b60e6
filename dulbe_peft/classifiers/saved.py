"""What a classifier saves: `<stem>_config.json`, `<stem>.safetensors`, and the extra state of a state dict."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor

from dulbe_peft.classifiers.calibration import TaskNovelty, TaskTemperature
from dulbe_peft.classifiers.rule import Rule
from dulbe_peft.classifiers.state import State, check_shapes
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
    """The contents of `<stem>_config.json`; `sha256` is the digest of the tensors."""

    format: Literal["dulbe-classifier-2"] = "dulbe-classifier-2"
    name: str
    embed_dim: int
    logit_scale: float
    settings: dict[str, object]
    source: dict[str, str] | None
    sha256: str = ""


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


class Loaded(NamedTuple):
    """The contents of the two files, checked: the arguments of the constructor, and what is set afterwards."""

    arguments: dict[str, object]
    state: State
    solved: dict[str, Tensor]
    config: SavedClassifier


def read(
    owner: str, kind: type[Rule], files: tuple[str, str], source: str | Path, options: tuple[str | None, ...]
) -> Loaded:
    """Read the files of a classifier with a rule of this `kind` in a folder, or download them; see `from_pretrained`.

    `owner` is what errors call the classifier; `options` are revision, token and folder for downloads.
    """
    folder, commit = Path(source), None
    if not folder.is_dir():
        folder, commit = hub.fetch(source, files, *options)
    config_file, tensors_file = (folder / name for name in files)
    if not config_file.is_file():
        raise FileNotFoundError(f"{config_file} does not exist: {folder} contains no saved {owner}")
    config = read_record(config_file, SavedClassifier)
    if config.name != kind.name:
        raise ValueError(f"{config_file} contains a classifier {config.name!r}, expected {kind.name!r}")
    arguments: dict[str, Any] = {"embed_dim": config.embed_dim, "logit_scale": config.logit_scale, **config.settings}
    number = len(config.class_names)
    # The shapes in the header are checked first: no memory is allocated for a tensor that does not fit.
    shapes, solved_shapes = _parted(tensor_shapes(tensors_file))
    try:
        with torch.device("meta"):
            rule = kind(**arguments)
            layouts = rule.layouts()
            empty = {name: torch.empty(shape) for name, shape in shapes.items()}
        check_shapes(layouts, {name: tuple(t.shape) for name, t in empty.items()}, number)
        known = rule.fitted(State(layouts, empty, config.class_names)).solved_shapes
        if solved_shapes and solved_shapes not in known:
            raise ValueError(f"the tensors {SOLVED!r} must have one of the shapes {known}, got {solved_shapes}")
        contents = read_tensors(tensors_file)[0]
        tensors, solved = _parted(contents)
        state = State(layouts, tensors, config.class_names)
        state.check()
        rule.check(state)
    except (ValueError, TypeError, RuntimeError, MemoryError) as error:
        raise ValueError(f"{owner} in {str(source)!r} cannot be loaded: {error}") from error
    if config.sha256 != tensors_digest(contents):
        raise ValueError(
            f"{owner} in {str(source)!r} cannot be loaded: {tensors_file.name} is damaged, or it was not saved with "
            f"{config_file.name}: the SHA-256 of its tensors differs"
        )
    origin = {"repo_id": str(source), "commit": commit} if commit else config.source
    return Loaded(arguments, state, solved, config.model_copy(update={"source": origin}))


def _parted(tensors: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Split the entries of a file into those of the state and those with the prefix `SOLVED`, by name."""
    solved = {name.removeprefix(SOLVED): value for name, value in tensors.items() if name.startswith(SOLVED)}
    return {name: value for name, value in tensors.items() if not name.startswith(SOLVED)}, solved
