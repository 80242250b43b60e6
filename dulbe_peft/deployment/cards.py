"""The README.md of an exported folder: what it is, how to install what it needs, and the lines that use it."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from dulbe_peft.checkpoints.card import fenced, is_repo_id, project
from dulbe_peft.checkpoints.saving import PROCESSOR_FOLDER
from dulbe_peft.classifiers import Classifier, spec
from dulbe_peft.deployment.classifier import FACTS_FILE, TENSORS_FILE
from dulbe_peft.deployment.graph import GRAPH_FACTS_FILE, GRAPH_FILE, INPUT
from dulbe_peft.deployment.pixels import pixel_values, rgb
from dulbe_peft.encoders.loading import encoder_of, has_text
from dulbe_peft.training.state import LearnerState

FOLDER = "path/to/this/folder"
INSTALL = {
    "lora": "torch transformers peft safetensors pillow",
    "transformers": "torch transformers safetensors pillow",
    "onnx": "onnxruntime numpy pillow",
}
WHAT = {
    "lora": "a stock LoRA adapter, with the classifier and the processor beside it",
    "transformers": "a plain model for transformers, with the classifier beside it",
    "onnx": "one ONNX graph, from pixel values to the probabilities of the classes",
}
OTHER_ANSWER = (
    '**A zero-shot pipeline gives another answer.** `pipeline("zero-shot-image-classification")` compares an image '
    "with texts. It knows nothing of the classifier in this folder, and is as good as the class names alone. Use the "
    "lines above for the classifier's answer."
)
FEATURES_ALONE = (
    '**No pipeline of transformers gives the classifier\'s answer.** `pipeline("image-feature-extraction")` gives the '
    "features of all tokens; the first one is the image's. Use the lines above for the classifier's answer."
)


def export_card(state: LearnerState, classifier: Classifier, kind: str, code: str) -> str:
    """README.md of an exported folder.

    Args:
        state: the learner.
        classifier: the exported one.
        kind: "lora", "transformers" or "onnx".
        code: the lines that use the folder.
    """
    count = f"{len(classifier.class_names)} classes"
    base = state.base_name[0] or "a base model without a name"
    shown = base if is_repo_id(base) else Path(base).name
    sections = [
        f"# {encoder_of(state.base).title} with {count}",
        f"This folder holds {WHAT[kind]}. The model is `{shown}` after it learned {count} with the strategy "
        f"`{state.strategy.name}`; the classifier is `{spec(classifier)}`. {project()} "
        "exported it, and is not needed to use it.",
        "## Install",
        fenced("bash", f"pip install {INSTALL[kind]}"),
        "## Use",
        fenced("python", code),
    ]
    if kind == "lora":
        sections.append(
            "The lines load the base model from where it was at the export. Where it is elsewhere, put its folder or "
            "its name on the Hub into them."
        )
    if kind != "onnx":
        sections.append(OTHER_ANSWER if has_text(state.base) else FEATURES_ALONE)
    names = json.dumps(classifier.class_names, ensure_ascii=False)
    sections += ["## Classes", fenced("json", names)]
    return f"---\n{_header(state, kind)}\n---\n\n" + "\n\n".join(sections) + "\n"


def _header(state: LearnerState, kind: str) -> str:
    base = state.base_name[0]
    tag = "image-classification"
    if kind != "onnx":  # what a pipeline does with the folder
        tag = "zero-shot-image-classification" if has_text(state.base) else "image-feature-extraction"
    data = ModelCardData(
        base_model=base if is_repo_id(base) else None,
        library_name={"lora": "peft"}.get(kind, kind),
        pipeline_tag=tag,
        tags=["class-incremental-learning", state.base.config.model_type, "dulbe_peft"],
    )
    return data.to_yaml().strip()


def torch_code(state: LearnerState, kind: str, formula: str) -> str:
    """The lines that use a folder of the format "lora" or "transformers"."""
    record = encoder_of(state.base)
    # The classifier is float32, and transformers would load a model in the type that its file has.
    settings = "dtype=torch.float32" + ", add_pooling_layer=False" * record.unused_pooler
    model = f"{record.model}.from_pretrained(folder, {settings})"
    imports, place = "", "folder"
    if kind == "lora":
        base = json.dumps(state.base_name[0] or "path/to/the/base/model")
        model = f"PeftModel.from_pretrained({model.replace('folder', base, 1)}, folder)"
        imports, place = "from peft import PeftModel\n", f'f"{{folder}}/{PROCESSOR_FOLDER}"'
    features = "model.get_image_features(pixel_values=pixels).pooler_output"
    if record.image_only:
        features = "model(pixel_values=pixels).last_hidden_state[:, 0]"
    return f'''import json
from pathlib import Path

import numpy as np
import torch
{imports}from PIL import Image, ImageOps
from safetensors.torch import load_file
from transformers import {record.image_processor}, {record.model}

folder = "{FOLDER}"
model = {model}.eval()
processor = {record.image_processor}.from_pretrained({place})
t = load_file(f"{{folder}}/{TENSORS_FILE}")
names = json.loads(Path(folder, "{FACTS_FILE}").read_text(encoding="utf-8"))["class_names"]


{inspect.getsource(rgb)}

image = rgb(Image.open("photo.jpg"))
pixels = processor(images=[image], return_tensors="pt")["pixel_values"]
with torch.no_grad():
    z = torch.nn.functional.normalize({features}, dim=1)
probabilities = (({formula}) / t["temperature"]).softmax(1)
print(names[int(probabilities.argmax())], float(probabilities.max()))'''


def onnx_code(state: LearnerState, facts: dict[str, Any]) -> str:
    """The lines that use a graph: with Pillow and numpy, or with the processor where these cannot do what it does."""
    record = encoder_of(state.base)
    imports, function = "from PIL import Image, ImageOps\n", "\n\n" + inspect.getsource(rgb)
    image = 'image = Image.open("photo.jpg")'
    pixels = 'np.stack([pixel_values(image, facts["preprocessing"])])'
    if facts["preprocessing"] is not None:
        function += "\n\n" + inspect.getsource(pixel_values)
    else:
        imports = f"{imports}from transformers import {record.image_processor}\n"
        image = 'image = rgb(Image.open("photo.jpg"))'
        processor = f'{record.image_processor}.from_pretrained(f"{{folder}}/{PROCESSOR_FOLDER}")'
        pixels = f'{processor}(images=[image], return_tensors="np")["{INPUT}"]'
    return f'''import json
from pathlib import Path

import numpy as np
import onnxruntime
{imports}
folder = "{FOLDER}"
session = onnxruntime.InferenceSession(f"{{folder}}/{GRAPH_FILE}")
facts = json.loads(Path(folder, "{GRAPH_FACTS_FILE}").read_text(encoding="utf-8"))
{function}

{image}
pixels = {pixels}  # any number of images
(probabilities,) = session.run(None, {{"{INPUT}": pixels}})
print(facts["class_names"][int(probabilities[0].argmax())], float(probabilities[0].max()))'''
