"""A learner as an image classifier that transformers' `pipeline` answers from: model, head and their code."""

from __future__ import annotations

import inspect
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

from dulbe_peft.checkpoints.card import render_card
from dulbe_peft.classifiers import Classifier
from dulbe_peft.deployment.classifier import FACTS_FILE, checked_formula, class_facts, head_tensors
from dulbe_peft.deployment.merged import merged_model
from dulbe_peft.encoders.loading import encoder_of
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils.files import write_json

CODE_FILE = "image_classifier.py"


def write_pipeline(folder: Path, state: LearnerState, classifier: Classifier) -> str:
    """Write model, head and code into an existing folder; returns the lines that use them.

    The model keeps its own type, so that transformers' zero-shot pipeline reads the folder too. None of transformers'
    own image classifiers computes the same: they average patches, or do not bring the feature to norm 1.
    """
    function, tensors = checked_formula(classifier)
    head = head_tensors(classifier, tensors)
    model = merged_model(state)
    config = model.config
    config.id2label = dict(enumerate(classifier.class_names))
    config.label2id = {name: place for place, name in config.id2label.items()}
    config.problem_type = "single_label_classification"
    config.head = {name: list(tensor.shape) for name, tensor in head.items()}
    # A pipeline complains of a class whose name it does not know.
    name = MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type, "ImageClassifier")
    config.auto_map = {"AutoModelForImageClassification": f"{Path(CODE_FILE).stem}.{name}"}
    weights = model.state_dict() | {f"head_{name}": tensor.contiguous() for name, tensor in head.items()}
    # Names as the class of this folder has them: transformers renames older ones for its own classes alone.
    model.save_pretrained(str(folder), state_dict=weights, save_original_format=False)
    state.processor.save_pretrained(str(folder))
    code = render_card(
        "image_classifier.txt",
        name=name,
        model=type(model).__name__,
        record=encoder_of(model),
        formula=inspect.getsource(function),
        function=function.__name__,
    )
    (folder / CODE_FILE).write_text(code, encoding="utf-8")
    write_json(folder / FACTS_FILE, class_facts(state, classifier))
    return render_card("use_pipeline.txt").rstrip()
