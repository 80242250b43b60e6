"""Save and load a classifier: `<stem>_config.json`, `<stem>.safetensors`, and the extra state of a state dict."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor

from dulbe_peft.classifiers.calibration import TaskNovelty, TaskTemperature
from dulbe_peft.classifiers.state import EXTRA_STATE, GrowingState
from dulbe_peft.utils import hub
from dulbe_peft.utils.records import Record, first_problem, read_record, write_record
from dulbe_peft.utils.tensors import read_tensors, tensor_shapes, write_tensors

C = TypeVar("C", bound=GrowingState)
T = TypeVar("T")
SOLVED = "solved."  # prefix in the file for tensors that were computed from the others


class ExtraState(Record):
    """The part of a state dict that is not tensors, as JSON in a uint8 tensor, which every serialiser supports."""

    class_names: list[str]
    calibration: tuple[TaskTemperature, ...]
    novelty_tasks: tuple[TaskNovelty, ...] = ()

    @staticmethod
    def of(classifier: GrowingState) -> "ExtraState":
        """Return the extra state of a classifier."""
        return ExtraState(
            class_names=classifier.class_names,
            calibration=classifier.calibration,
            novelty_tasks=classifier.novelty_tasks,
        )

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
    """The contents of `<stem>_config.json`."""

    format: Literal["dulbe-classifier-2"] = "dulbe-classifier-2"
    name: str
    embed_dim: int
    logit_scale: float
    settings: dict[str, Any]
    source: dict[str, str] | None


def save(classifier: GrowingState, folder: str | Path) -> None:
    """Write the two files of a classifier into a folder, which is created if it does not exist.

    Raises:
        ValueError: A tensor is not valid, because it was written to in place. Nothing is written.
    """
    classifier.check_tensors()
    classifier.forget_derived()  # values written through .data, which torch does not count, are saved, too
    Path(folder).mkdir(parents=True, exist_ok=True)
    facts = {name: getattr(classifier, name) for name in ("name", "embed_dim", "logit_scale", "source")}
    config = SavedClassifier(**dict(ExtraState.of(classifier)), **facts, settings=classifier.settings())
    config_file, tensors_file = (Path(folder) / name for name in classifier.file_names())
    solved = {SOLVED + name: tensor for name, tensor in classifier.solved().items()}
    write_tensors(tensors_file, classifier.tensors() | solved, {"format": config.format})
    write_record(config_file, config)


def load(cls: type[C], source: str | Path, revision: str | None, token: str | None, cache_dir: str | None) -> C:
    """Load a classifier onto the CPU; see `GrowingState.from_pretrained`.

    The configuration is read first, then the shapes in the header of the tensor file, then the tensors. No memory is
    allocated for a tensor that does not fit the configuration.
    """
    folder, commit = Path(source), None
    if not folder.is_dir():
        folder, commit = hub.fetch(source, cls.file_names(), revision, token, cache_dir)
    config_file, tensors_file = (folder / name for name in cls.file_names())
    if not config_file.is_file():
        raise FileNotFoundError(f"{config_file} does not exist: {folder} contains no saved {cls.__name__}")
    config = read_record(config_file, SavedClassifier)
    if config.name != cls.name:
        raise ValueError(f"{config_file} contains a classifier {config.name!r}, expected {cls.name!r}")
    shapes, solved_shapes = _parted(tensor_shapes(tensors_file))
    arguments: Any = {"embed_dim": config.embed_dim, "logit_scale": config.logit_scale, **config.settings}
    try:
        with torch.device("meta"):
            classifier = cls(**arguments)
        classifier.check_shapes(shapes, len(config.class_names))
        if solved_shapes and solved_shapes not in (known := classifier.solved_shapes(len(config.class_names))):
            raise ValueError(f"the tensors {SOLVED!r} must have one of the shapes {known}, got {solved_shapes}")
        state, solved = _parted(read_tensors(tensors_file)[0])
        extra = ExtraState(**{name: getattr(config, name) for name in ExtraState.model_fields})
        classifier.load_state_dict({**state, EXTRA_STATE: extra.to_tensor()})
        if solved:
            classifier.keep_derived("solved", {name: tensor.float() for name, tensor in solved.items()})
    except (ValueError, TypeError, RuntimeError, MemoryError) as error:
        raise ValueError(f"{cls.__name__} in {str(source)!r} cannot be loaded: {error}") from error
    classifier.source = {"repo_id": str(source), "commit": commit} if commit else config.source
    return classifier.eval()


def push(classifier: GrowingState, repo_id: str, message: str, options: dict[str, Any]) -> Any:
    """Upload the files of a classifier to a repository on the Hub; see `GrowingState.push_to_hub`."""
    return hub.push(lambda folder, _: save(classifier, folder), repo_id, commit_message=message, **options)


def _parted(tensors: Mapping[str, T]) -> tuple[dict[str, T], dict[str, T]]:
    """Split the entries of a file into those of the state and those with the prefix `SOLVED`, by name."""
    solved = {name.removeprefix(SOLVED): value for name, value in tensors.items() if name.startswith(SOLVED)}
    return {name: value for name, value in tensors.items() if not name.startswith(SOLVED)}, solved
