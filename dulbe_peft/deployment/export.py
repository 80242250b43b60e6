"""A learner in forms that work without this package: stock LoRA, a plain model of transformers, an ONNX graph.

lora           the adapter beside a base model      with the classifier, the class names and the processor
transformers   the adapter folded into the weights  with the same
onnx           pixels to probabilities in one file  with the same facts in it and beside it
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from peft import PeftModel

from dulbe_peft.adapter.export import write_lora
from dulbe_peft.checkpoints.saving import PROCESSOR_FOLDER
from dulbe_peft.deployment.cards import export_card, onnx_code, torch_code
from dulbe_peft.deployment.classifier import choose_classifier, write_classifier
from dulbe_peft.deployment.graph import write_graph
from dulbe_peft.deployment.merged import merged_model
from dulbe_peft.training.locking import locked
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils.checks import check_int
from dulbe_peft.utils.folders import MODEL_CARD, commit_folder

FORMATS = ("lora", "transformers", "onnx")


def export_learner(
    learner: Any,
    folder: str | Path,
    format: str = "lora",
    classifier: str | None = None,
    compress_to: int | None = None,
) -> Path:
    """Write a learner in a form that works without this package; the folder's README.md has the lines that use it.

    The folder is put in place whole. What an earlier export wrote there is replaced; anything else is refused.

    Args:
        learner: a [`ClassIncrementalLearner`], or its state.
        folder: where the files go; made if it is not there.
        format: "lora", "transformers" or "onnx".
        classifier: name of the classifier to export; None: the first one, which `predict` uses.
        compress_to: with "lora" alone, see [`export_lora`].

    Raises:
        FileExistsError: the folder holds something that no export wrote.
        ImportError: "onnx" needs packages that are not installed.
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
    if isinstance(learner, LearnerState):
        _export(learner, Path(folder), format, classifier, compress_to)
    else:
        with locked(learner, "export_learner"):
            _export(learner.state, Path(folder), format, classifier, compress_to)
    return Path(folder)


def _export(state: LearnerState, folder: Path, format: str, classifier: str | None, compress_to: int | None) -> None:
    chosen = choose_classifier(state, classifier)
    if format == "lora" and state.adapter is None:
        raise ValueError(
            f"the learner has no adapter to export: its strategy {state.strategy.name!r} trains nothing; take the "
            "format 'transformers' or 'onnx'"
        )

    def write(temporary: Path) -> None:
        if format == "onnx":
            code = onnx_code(state, write_graph(temporary, state, chosen))
        else:
            code = torch_code(state, format, write_classifier(temporary, state, chosen))
        if format == "lora":
            write_lora(cast(PeftModel, state.model), temporary, compress_to)
        elif format == "transformers":
            merged_model(state).save_pretrained(str(temporary))
        processor_folder = temporary if format == "transformers" else temporary / PROCESSOR_FOLDER
        state.processor.save_pretrained(str(processor_folder))
        (temporary / MODEL_CARD).write_text(export_card(state, chosen, format, code), encoding="utf-8")

    commit_folder(folder, "export", write)


def export_transformers(learner: Any, folder: str | Path, classifier: str | None = None) -> Path:
    """Write a learner as a plain model of transformers, the adapter in its weights; see [`export_learner`]."""
    return export_learner(learner, folder, "transformers", classifier)


def export_onnx(learner: Any, folder: str | Path, classifier: str | None = None) -> Path:
    """Write a learner as an ONNX graph from pixel values to probabilities; see [`export_learner`]."""
    return export_learner(learner, folder, "onnx", classifier)
