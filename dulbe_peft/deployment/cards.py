"""The README.md of an exported folder: what it is, how to install what it needs, and the lines that use it."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from dulbe_peft.checkpoints.card import is_repo_id, project, render_card
from dulbe_peft.checkpoints.saving import PROCESSOR_FOLDER
from dulbe_peft.classifiers import Classifier, spec
from dulbe_peft.deployment.graph import ENCODER_FILE, GRAPH_FACTS_FILE, HEAD_FILE, PRECISIONS
from dulbe_peft.deployment.pixels import pixel_values, rgb
from dulbe_peft.encoders.loading import encoder_of, has_text
from dulbe_peft.training.state import LearnerState


def export_card(state: LearnerState, classifier: Classifier, kind: str, code: str) -> str:
    """README.md of an exported folder of a kind, which `code` uses."""
    base = state.base_name[0] or "a base model without a name"
    tag = "image-classification"
    if kind == "lora":  # what a pipeline does with the folder
        tag = "zero-shot-image-classification" if has_text(state.base) else "image-feature-extraction"
    header = ModelCardData(
        base_model=base if is_repo_id(base) else None,
        library_name={"lora": "peft"}.get(kind, kind),
        pipeline_tag=tag,
        tags=["class-incremental-learning", state.base.config.model_type, "dulbe_peft"],
    )
    return render_card(
        "export.md",
        header=header.to_yaml().strip(),
        title=encoder_of(state.base).title,
        kind=kind,
        base=base if is_repo_id(base) else Path(base).name,
        strategy=state.strategy.name,
        classifier=spec(classifier),
        project=project(),
        code=code,
        reads_text=has_text(state.base),
        count=len(classifier.class_names),
        class_names=json.dumps(classifier.class_names, ensure_ascii=False),
    )


def onnx_code(state: LearnerState, facts: dict[str, Any]) -> str:
    """The lines that use a graph: with Pillow and numpy, or with the processor where these cannot do what it does."""
    code = render_card(
        "use_onnx.txt",
        image_processor=encoder_of(state.base).image_processor,
        processor_folder=PROCESSOR_FOLDER,
        encoder_file=ENCODER_FILE,
        head_file=HEAD_FILE,
        facts_file=GRAPH_FACTS_FILE,
        rgb=inspect.getsource(rgb),
        pixel_values=None if facts["preprocessing"] is None else inspect.getsource(pixel_values),
    )
    return code.rstrip()


def javascript_code(folder: Path, precision: str) -> str:
    """The lines of JavaScript that use a folder."""
    return render_card("use_javascript.txt", name=folder.name, dtype=PRECISIONS[precision][1]).rstrip()
