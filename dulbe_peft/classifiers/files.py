"""A classifier as two files, here or on the Hub: `<stem>_config.json` and `<stem>.safetensors`.

They are read in order: the configuration, the shapes in the tensor file's header, the tensors. No memory is taken for
a tensor that does not fit the configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch

from dulbe_peft.classifiers.calibration import TaskTemperature
from dulbe_peft.classifiers.state import EXTRA_STATE, ExtraState
from dulbe_peft.utils import hub
from dulbe_peft.utils.records import Record, read_record, write_record
from dulbe_peft.utils.tensors import read_tensors, tensor_shapes, write_tensors

if TYPE_CHECKING:
    from dulbe_peft.classifiers.base import Classifier

C = TypeVar("C", bound="Classifier")


class SavedClassifier(Record):
    """`<stem>_config.json`."""

    format: Literal["dulbe-classifier-2"] = "dulbe-classifier-2"
    name: str
    embed_dim: int
    logit_scale: float
    settings: dict[str, Any]
    class_names: list[str]
    calibration: tuple[TaskTemperature, ...]
    source: dict[str, str] | None


def save_classifier(classifier: Classifier, folder: Path) -> None:
    """Write both files into a folder, which is made where it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    config_file, tensors_file = classifier.file_names()
    config = SavedClassifier(
        name=classifier.name,
        embed_dim=classifier.embed_dim,
        logit_scale=classifier.logit_scale,
        settings=classifier.settings(),
        class_names=classifier.class_names,
        calibration=classifier.calibration,
        source=classifier.source,
    )
    write_tensors(folder / tensors_file, classifier.tensors(), {"format": config.format})
    write_record(folder / config_file, config)


def load_classifier(
    cls: type[C], source: str | Path, revision: str | None, token: str | None, cache_dir: str | None
) -> C:
    """What `save_classifier` wrote to a folder or to a repository on the Hub."""
    folder, commit = Path(source), None
    config_file, tensors_file = cls.file_names()
    if not folder.is_dir():
        folder, commit = hub.fetch(source, (config_file, tensors_file), revision, token, cache_dir)
    if not (folder / config_file).is_file():
        raise FileNotFoundError(f"{folder / config_file} does not exist: {folder} holds no saved {cls.__name__}")
    config = read_record(folder / config_file, SavedClassifier)
    if config.name != cls.name:
        raise ValueError(f"{folder / config_file} holds a classifier {config.name!r}, expected {cls.name!r}")
    shapes = tensor_shapes(folder / tensors_file)
    arguments: Any = {"embed_dim": config.embed_dim, "logit_scale": config.logit_scale, **config.settings}
    try:
        with torch.device("meta"):
            cls(**arguments).check_shapes(shapes, len(config.class_names))
        classifier = cls(**arguments)
        state: dict[str, Any] = read_tensors(folder / tensors_file)[0]
        extra = ExtraState(class_names=config.class_names, calibration=config.calibration)
        classifier.load_state_dict(state | {EXTRA_STATE: extra.to_tensor()})
    except (ValueError, TypeError, RuntimeError, MemoryError) as error:
        raise ValueError(f"{cls.__name__} in {str(source)!r} cannot be loaded: {error}") from error
    classifier.source = {"repo_id": str(source), "commit": commit} if commit else config.source
    return classifier.eval()
