"""A learner as a stock LoRA adapter, with the classifier in two files beside it that need no package."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import cast

from peft import PeftModel

from dulbe_peft.adapter.export import write_lora
from dulbe_peft.checkpoints.card import render_card
from dulbe_peft.checkpoints.saving import PROCESSOR_FOLDER
from dulbe_peft.classifiers import Classifier
from dulbe_peft.deployment.classifier import FACTS_FILE, checked_formula, class_facts, head_tensors
from dulbe_peft.deployment.pixels import rgb
from dulbe_peft.encoders.loading import encoder_of
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils.files import write_json
from dulbe_peft.utils.tensors import write_tensors

TENSORS_FILE = "classifier.safetensors"


def write_lora_folder(folder: Path, state: LearnerState, classifier: Classifier, compress_to: int | None) -> str:
    """Write adapter and classifier into an existing folder; returns the lines that use them."""
    function, tensors = checked_formula(classifier)
    source = inspect.getsource(function)
    write_tensors(folder / TENSORS_FILE, head_tensors(classifier, tensors), {"format": "pt"})
    write_json(folder / FACTS_FILE, class_facts(state, classifier) | {"formula": source})
    write_lora(cast(PeftModel, state.model), folder, compress_to)
    state.processor.save_pretrained(str(folder / PROCESSOR_FOLDER))
    code = render_card(
        "use_lora.txt",
        record=encoder_of(state.base),
        base=json.dumps(state.base_name[0] or "path/to/the/base/model"),
        processor_folder=PROCESSOR_FOLDER,
        tensors_file=TENSORS_FILE,
        facts_file=FACTS_FILE,
        rgb=inspect.getsource(rgb),
        formula=source,
        function=function.__name__,
    )
    return code.rstrip()
