"""A learner in forms that work without this package: stock LoRA, a plain model of transformers, an ONNX graph.

lora             the adapter beside a base model, with the classifier, the class names and the processor
transformers     an image classifier for pipelines: the adapter in its weights, the classifier as its head
onnx             two graphs, from pixels to features and from these to probabilities
transformers.js  one graph in the layout that JavaScript loads
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dulbe_peft.deployment.cards import export_card, javascript_code, onnx_code
from dulbe_peft.deployment.classifier import choose_classifier
from dulbe_peft.deployment.graph import PRECISIONS, write_for_javascript, write_graphs
from dulbe_peft.deployment.lora import write_lora_folder
from dulbe_peft.deployment.pipeline import write_pipeline
from dulbe_peft.training.locking import locked
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils.checks import check_int
from dulbe_peft.utils.folders import MODEL_CARD, commit_folder

FORMATS = ("lora", "transformers", "onnx", "transformers.js")


def export_learner(
    learner: Any,
    folder: str | Path,
    format: str = "lora",
    classifier: str | None = None,
    compress_to: int | None = None,
    precision: str = "float32",
) -> Path:
    """Write a learner in a form that works without this package; the folder's README.md has the lines that use it.

    The folder is put in place whole. What an earlier export wrote there is replaced; anything else is refused.

    Args:
        learner: a [`ClassIncrementalLearner`], or its state.
        folder: where the files go; made if it is not there.
        format: "lora", "transformers", "onnx" or "transformers.js".
        classifier: name of the classifier to export; None: the first one, which `predict` uses.
        compress_to: with "lora" alone, see [`export_lora`].
        precision: of the weights in an ONNX graph: "float32", "float16" or "int8".

    Raises:
        FileExistsError: the folder holds something that no export wrote.
        ImportError: a graph needs packages that are not installed.
        ValueError: there is no such format or classifier, or the learner cannot be exported in this format.
    """
    if not isinstance(getattr(learner, "state", learner), LearnerState):
        raise TypeError(f"learner must be a ClassIncrementalLearner or its state, got {type(learner).__name__}")
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}; it must be one of {', '.join(FORMATS)}")
    if compress_to is not None:
        check_int("compress_to", compress_to, 1)
        if format != "lora":
            raise ValueError(f"compress_to={compress_to} is for the format 'lora' alone, got the format {format!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    if precision != "float32" and format not in ("onnx", "transformers.js"):
        raise ValueError(f"precision={precision!r} is for the graphs of 'onnx' and 'transformers.js', got {format!r}")
    settings = (Path(folder), format, classifier, compress_to, precision)
    if isinstance(learner, LearnerState):
        _export(learner, *settings)
    else:
        with locked(learner, "export_learner"):
            _export(learner.state, *settings)
    return Path(folder)


def _export(
    state: LearnerState, folder: Path, format: str, classifier: str | None, compress_to: int | None, precision: str
) -> None:
    chosen = choose_classifier(state, classifier)
    if format == "lora" and state.adapter is None:
        raise ValueError(
            f"the learner has no adapter to export: its strategy {state.strategy.name!r} trains nothing; take the "
            "format 'transformers' or 'onnx'"
        )

    def write(temporary: Path) -> None:
        if format == "lora":
            code = write_lora_folder(temporary, state, chosen, compress_to)
        elif format == "transformers":
            code = write_pipeline(temporary, state, chosen)
        elif format == "onnx":
            code = onnx_code(state, write_graphs(temporary, state, chosen, precision))
        else:
            write_for_javascript(temporary, state, chosen, precision)
            code = javascript_code(folder, precision)
        (temporary / MODEL_CARD).write_text(export_card(state, chosen, format, code), encoding="utf-8")

    commit_folder(folder, "export", write)


def export_transformers(learner: Any, folder: str | Path, classifier: str | None = None) -> Path:
    """Write a learner as an image classifier for transformers' pipelines; see [`export_learner`]."""
    return export_learner(learner, folder, "transformers", classifier)


def export_onnx(learner: Any, folder: str | Path, classifier: str | None = None) -> Path:
    """Write a learner as an ONNX graph from pixel values to probabilities; see [`export_learner`]."""
    return export_learner(learner, folder, "onnx", classifier)
