"""A model or a learner as a function of batches, which every engine of data takes: `datasets`, Dask, Ray, Spark."""

import copy
from collections.abc import MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from transformers import PreTrainedConfig

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.checkpoints import layout
from dulbe_peft.checkpoints.saving import TRANSFORMERS_CONFIG
from dulbe_peft.data.unlabelled import as_image
from dulbe_peft.encoders.loading import load_dual_encoder
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.utils.workers import OncePerProcess


class Featurizer:
    """Adds the image features of a model to a batch; it pickles small, and loads the model once in each process.

    Args:
        model_or_folder: a saved learner or a run's folder; else a model, as `load_dual_encoder` takes it.
        machine: settings of the machine that calls it, such as {"device": "cuda", "eval_batch_size": 256}.

    Example:
        >>> features = photos.map(Featurizer("out"), batched=True, num_proc=4, remove_columns="image")
    """

    def __init__(self, model_or_folder: str | Path, machine: dict[str, Any] | None = None) -> None:
        if not isinstance(model_or_folder, (str, Path)):
            kind = type(model_or_folder).__name__
            raise TypeError(f"expected a folder or the id of a repository on the Hub, got a {kind}: save it first")
        machine = {"num_workers": 0, "progress": False} | (machine or {})
        LearnerArguments(**machine)
        self._learner = OncePerProcess(partial(_load, str(model_or_folder), machine))

    def fit(self, images: Any = None, y: Any = None) -> Self:
        """Nothing is learned; so it is a transformer of scikit-learn's pipelines, which clone it as its source."""
        return self

    def transform(self, images: Any) -> np.ndarray:
        """Unit features, (n, d), float32, of a sequence of images as in a batch."""
        return np.asarray(self({"image": images})["embedding"])

    def __sklearn_clone__(self) -> Self:
        return copy.copy(self)

    def __call__(self, batch: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """The batch with "embedding", (n, d), float32, unit rows.

        Args:
            batch: "image" holds PIL images, (height, width, 3) arrays of bytes, paths, bytes of image files, or
                {"bytes", "path"} as `datasets` stores them.

        Raises:
            ValueError: there is no such column, or an image cannot be read; the message has its number, from 0.
        """
        return _with(batch, embedding=self._learner().image_embeds(_images(batch)).cpu().numpy())


class Predictor(Featurizer):
    """Adds the answers of a learner to a batch; the arguments are those of [`Featurizer`].

    Example:
        >>> answers = photos.map(Predictor("out"), batched=True, num_proc=4, remove_columns="image")
    """

    def __call__(self, batch: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """The batch with "class", (n,), and its calibrated "probability", (n,), float32; see [`Featurizer`]."""
        answers = self._learner().predict(_images(batch), return_scores=True)
        names, probabilities = [name for name, _ in answers], [probability for _, probability in answers]
        found = {"class": np.array(names, dtype=object), "probability": np.array(probabilities, dtype=np.float32)}
        return _with(batch, **found)


def _load(source: str, machine: dict[str, Any]) -> ClassIncrementalLearner:
    """A saved learner, or a model as a learner that has learned nothing."""
    path = Path(source)
    if path.is_dir():
        saved = (path / layout.LEARNER_FILE).exists() or bool(layout.task_folders(path))
    else:
        config = {} if source == "demo" else PreTrainedConfig.get_config_dict(source)[0]
        saved = config.get("model_type") == TRANSFORMERS_CONFIG["model_type"]
    if saved:
        return ClassIncrementalLearner.from_pretrained(source, machine=machine)
    model, processor = load_dual_encoder(source)
    return ClassIncrementalLearner(model, processor, args=LearnerArguments(**machine), strategy="frozen")


def _with(batch: MutableMapping[str, Any], **columns: np.ndarray) -> MutableMapping[str, Any]:
    """The batch with further columns; the given one stays as it is."""
    # A copy of the batch of `datasets` keeps its images undecoded, so they are not encoded again.
    found = copy.copy(batch)
    found.update(columns)
    return found


def _images(batch: MutableMapping[str, Any]) -> list[Any]:
    """The images of a batch as `ClassIncrementalLearner.predict` takes them, one entry each."""
    if "image" not in batch:
        raise ValueError(f"the batch has no column 'image'; its columns are {list(batch)}")
    return [as_image(number, image) for number, image in enumerate(batch["image"])]
