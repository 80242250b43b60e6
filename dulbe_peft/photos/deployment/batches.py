"""Wrap a model or a learner as a function of batches, for engines such as `datasets`, Dask, Ray and Spark."""

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
    """Add the image features of a model to a batch. A pickle of it is small; each process loads the model once.

    Args:
        model_or_folder: A saved learner, the folder of a run, or a model as for `load_dual_encoder`.
        machine: Settings for the calling machine, such as {"device": "cuda", "eval_batch_size": 256}.

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

    def fit(self, images: object = None, y: object = None) -> Self:
        """Return self; there is nothing to fit. Pipelines of scikit-learn need this method."""
        return self

    def transform(self, images: object) -> np.ndarray:
        """Return the unit features, (n, d), float32, of a sequence of images of the kinds that a batch may hold."""
        return np.asarray(self({"image": images})["embedding"])

    def __sklearn_clone__(self) -> Self:
        return copy.copy(self)

    def __call__(self, batch: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Return the batch with a column "embedding", (n, d), float32, of unit rows.

        Args:
            batch: The column "image" holds PIL images, uint8 arrays (height, width, 3), paths, bytes of image files,
                or {"bytes", "path"} as `datasets` stores them.

        Raises:
            ValueError: If there is no column "image" or an image cannot be read; the message gives its index.
        """
        return _with_columns(batch, embedding=self._learner().image_embeds(_images(batch)).cpu().numpy())


class Predictor(Featurizer):
    """Add the predictions of a learner to a batch; the arguments are those of [`Featurizer`].

    Example:
        >>> predictions = photos.map(Predictor("out"), batched=True, num_proc=4, remove_columns="image")
    """

    def __call__(self, batch: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """Return the batch with "class", (n,), and its "probability", (n,), float32; see [`Featurizer`]."""
        predictions = self._learner().predict(_images(batch), return_scores=True)
        names, probabilities = [name for name, _ in predictions], [probability for _, probability in predictions]
        columns = {"class": np.array(names, dtype=object), "probability": np.array(probabilities, dtype=np.float32)}
        return _with_columns(batch, **columns)


def _load(source: str, machine: dict[str, Any]) -> ClassIncrementalLearner:
    """Return a saved learner, or an untrained learner around a model."""
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


def _with_columns(batch: MutableMapping[str, object], **columns: np.ndarray) -> MutableMapping[str, object]:
    """Return a copy of the batch with further columns."""
    # A shallow copy of a batch of `datasets` keeps the images undecoded, so that `map` need not encode them again.
    extended = copy.copy(batch)
    extended.update(columns)
    return extended


def _images(batch: MutableMapping[str, Any]) -> list[Any]:
    """Return the images of a batch in a form that `ClassIncrementalLearner.predict` accepts, one entry per image."""
    if "image" not in batch:
        raise ValueError(f"the batch has no column 'image'; its columns are {list(batch)}")
    return [as_image(number, image) for number, image in enumerate(batch["image"])]
