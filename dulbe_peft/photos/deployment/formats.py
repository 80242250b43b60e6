"""Export a learner to formats that work without this package.

lora             a standard LoRA adapter for the base model, with the classifier, the class names and the processor
transformers     an image classifier for pipelines, with the adapter merged into its weights and the classifier as head
onnx             two graphs, from pixels to features and from features to probabilities
transformers.js  one graph in the layout that transformers.js loads
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from huggingface_hub import ModelCardData
from peft import PeftModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from dulbe_peft.adapter.lora_export import write_lora
from dulbe_peft.checkpoints.saving import PROCESSOR_FOLDER
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.registry import spec
from dulbe_peft.encoders.loading import check_saved, encoder_of, has_text
from dulbe_peft.photos.deployment import FORMATS, PRECISIONS
from dulbe_peft.photos.deployment.graph import READS, write_for_javascript, write_graphs
from dulbe_peft.photos.deployment.parts import CARDS, checked_formula, choose_classifier, class_facts, merged_model
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils.files import write_json
from dulbe_peft.utils.folders import MODEL_CARD, commit_folder
from dulbe_peft.utils.hub import is_repo_id
from dulbe_peft.utils.templates import render
from dulbe_peft.utils.tensors import write_tensors

if TYPE_CHECKING:
    from dulbe_peft.learner import ClassIncrementalLearner

FACTS_FILE, TENSORS_FILE, CODE_FILE = "classifier.json", "classifier.safetensors", "image_classifier.py"


def default_format(state: LearnerState) -> str:
    """Return the format for a learner: "lora" if it has an adapter, otherwise "transformers"."""
    return "transformers" if state.adapter is None else "lora"


def export_learner(
    learner: ClassIncrementalLearner | LearnerState,
    folder: str | Path,
    format: str | None = None,
    classifier: str | None = None,
    compress_to: int | None = None,
    precision: str = "float32",
) -> Path:
    """Export a learner to a format that works without this package; the folder's README.md shows the code to use it.

    The folder appears only when it is complete. It replaces an earlier export, but no other folder.

    Args:
        learner: A [`ClassIncrementalLearner`] or its state.
        folder: The folder to write.
        format: "lora", "transformers", "onnx" or "transformers.js". By default, "lora" if the learner has an adapter,
            otherwise "transformers".
        classifier: Name of the classifier to export. By default, the first one, which `predict` uses.
        compress_to: Rank of the exported adapter; only for the format "lora", see [`export_lora`].
        precision: Precision of the weights in an ONNX graph: "float32", "float16" or "int8".

    Raises:
        FileExistsError: If the folder exists and is not an export.
        ImportError: If packages that write a graph are not installed.
        ValueError: If the format or classifier does not exist, or the learner cannot be exported to the format.
    """
    given: object = getattr(learner, "state", learner)
    if not isinstance(given, LearnerState):
        raise TypeError(f"learner must be a ClassIncrementalLearner or its state, got {type(learner).__name__}")
    format = format or default_format(given)
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}; it must be one of {', '.join(FORMATS)}")
    if compress_to is not None and format != "lora":
        raise ValueError(f"compress_to={compress_to} is only for the format 'lora', got the format {format!r}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision is {precision!r}; it must be one of {', '.join(PRECISIONS)}")
    if precision != "float32" and format not in ("onnx", "transformers.js"):
        raise ValueError(f"precision={precision!r} is only for 'onnx' and 'transformers.js', got {format!r}")
    folder = Path(folder)
    writers: dict[str, Callable[[Path, LearnerState, Classifier], str]] = {
        "lora": partial(_write_lora_folder, compress_to=compress_to),
        "transformers": _write_pipeline,
        "onnx": partial(write_graphs, precision=precision),
        "transformers.js": partial(write_for_javascript, precision=precision, name=folder.name),
    }
    with nullcontext() if isinstance(learner, LearnerState) else learner.turn("export_learner"):
        state = learner if isinstance(learner, LearnerState) else learner.state
        check_saved(state.processor, state.base)
        state.check_plain("this learner cannot be exported")
        chosen = choose_classifier(state, classifier)
        if len(state.class_names) < 2:
            raise ValueError(
                f"the learner knows only {state.class_names[0]!r}, which an export would answer for every image: "
                "learn a second class first"
            )
        if format == "lora" and state.adapter is None:
            raise ValueError(
                f"the learner has no adapter to export: its strategy {state.strategy.name!r} trains nothing; use the "
                "format 'transformers' or 'onnx'"
            )

        def write(temporary: Path) -> None:
            code = writers[format](temporary, state, chosen)
            (temporary / MODEL_CARD).write_text(export_card(state, chosen, format, code), encoding="utf-8")

        commit_folder(folder, "export", write)
    return folder


def export_card(state: LearnerState, classifier: Classifier, kind: str, code: str) -> str:
    """Return README.md of an export: what it is, which packages it needs, and the `code` that uses it."""
    base = state.base_name[0] or "a base model without a name"
    tag = "image-classification"
    if kind == "lora":  # a pipeline loads the folder as a model without the classifier
        tag = "zero-shot-image-classification" if has_text(state.base) else "image-feature-extraction"
    header = ModelCardData(
        base_model=base if is_repo_id(base) else None,
        library_name={"lora": "peft"}.get(kind, kind),
        pipeline_tag=tag,
        tags=["class-incremental-learning", state.base.config.model_type, "dulbe_peft"],
    )
    return render(
        "export.md",
        CARDS,
        header=header.to_yaml().strip(),
        title=encoder_of(state.base).title,
        kind=kind,
        base=base if is_repo_id(base) else Path(base).name,
        strategy=state.strategy.name,
        classifier=spec(classifier),
        code=code.rstrip(),
        reads_text=has_text(state.base),
        jpeg_side=state.jpeg_side,
        doubt=state.doubt_of(classifier),
        count=len(classifier.class_names),
        class_names=json.dumps(classifier.class_names, ensure_ascii=False),
    )


def _write_lora_folder(folder: Path, state: LearnerState, classifier: Classifier, compress_to: int | None) -> str:
    """Write a standard LoRA adapter, and the classifier in two files; return the code to use them."""
    function, source, tensors = checked_formula(classifier)
    write_tensors(folder / TENSORS_FILE, tensors, {"format": "pt"})
    write_json(folder / FACTS_FILE, class_facts(state, classifier) | {"formula": source})
    write_lora(cast(PeftModel, state.model), folder, compress_to)
    state.processor.save_pretrained(str(folder / PROCESSOR_FOLDER))
    return render(
        "use_lora.txt",
        CARDS,
        record=encoder_of(state.base),
        base=json.dumps(state.base_name[0] or "path/to/the/base/model"),
        processor_folder=PROCESSOR_FOLDER,
        tensors_file=TENSORS_FILE,
        facts_file=FACTS_FILE,
        rgb=READS,
        jpeg_side=state.jpeg_side,
        formula=source,
        function=function,
    )


def _write_pipeline(folder: Path, state: LearnerState, classifier: Classifier) -> str:
    """Write a model with head and code that transformers' `pipeline` loads; return the code to use it."""
    # No image classifier of transformers computes the same function, so the export carries its own class. The model
    # type stays that of the base model, because the zero-shot pipeline reads it.
    function, source, head = checked_formula(classifier)
    model = merged_model(state)
    config = model.config
    config.id2label = dict(enumerate(classifier.class_names))
    config.label2id = {name: index for index, name in config.id2label.items()}
    config.problem_type = "single_label_classification"
    config.head = {name: list(tensor.shape) for name, tensor in head.items()}
    # A pipeline warns about classes whose names it does not know, so the class has a known name if there is one.
    name = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type, "ImageClassifier")
    module = Path(CODE_FILE).stem
    config.auto_map = {"AutoModelForImageClassification": f"{module}.{name}"}
    pipeline = {"impl": f"{module}.PhotographPipeline", "pt": [*config.auto_map]}
    config.custom_pipelines = {"image-classification": pipeline}
    weights = model.state_dict() | {f"head_{name}": tensor.contiguous() for name, tensor in head.items()}
    # Keep the present names of the weights: transformers renames older names only for its own classes.
    model.save_pretrained(str(folder), state_dict=weights, save_original_format=False)
    state.processor.save_pretrained(str(folder))
    kind, record = type(model).__name__, encoder_of(model)
    facts: dict[str, object] = {"model": kind, "record": record, "formula": source, "function": function}
    facts |= {"rgb": READS, "jpeg_side": state.jpeg_side}
    code = render("image_classifier.txt", CARDS, name=name, **facts)
    (folder / CODE_FILE).write_text(code, encoding="utf-8")
    write_json(folder / FACTS_FILE, class_facts(state, classifier))
    return render("use_pipeline.txt", CARDS)
