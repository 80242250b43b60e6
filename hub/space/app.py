"""A page that teaches a CLIP new classes and classifies images. Nothing is trained, and no image is kept.

The environment variable MODEL names the model, such as openai/clip-vit-base-patch16, and PROMPT its prompt. The
default is the tiny CLIP of the package, which knows printed characters.
"""

import os
from pathlib import Path
from typing import Any

import gradio as gr

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, load_dual_encoder
from dulbe_peft.arguments import Query

MODEL = os.environ.get("MODEL", "demo")
PROMPT = os.environ.get("PROMPT", "a photo of the digit {}." if MODEL == "demo" else "a photo of a {}.")
CLIP, PROCESSOR = load_dual_encoder(MODEL)
SHOWN = 5  # classes of an answer


def new_learner() -> ClassIncrementalLearner:
    """Return a learner without classes. All visitors share the model, which never changes."""
    args = LearnerArguments(device="cpu", progress=False, prompt_template=PROMPT)
    return ClassIncrementalLearner(CLIP, PROCESSOR, args=args, strategy="frozen")


def teach(learner: Any, files: list[str] | None, name: str) -> tuple[Any, str]:
    """Learn the images in `files` as class `name`, which is new or known."""
    if not files or not name.strip():
        raise gr.Error("Choose some images, and write the name of their class.")
    learner, name = learner or new_learner(), name.strip()
    rows = [{"image": Path(file), "label": 0} for file in files]
    try:
        (learner.update_classes if name in learner.class_names else learner.learn_task)(rows, [name])
    except (OSError, ValueError) as error:
        raise gr.Error(str(error)) from error
    return learner, known(learner)


def digits(learner: Any) -> tuple[Any, str]:
    """Return a new learner that has learned eight handwritten digits of each class."""
    from dulbe_peft.data.readers import load_data
    from dulbe_peft.photos.data.splits import draw_per_class

    learner = new_learner()
    learner.learn_task(draw_per_class(load_data("demo-digits", "train"), 8))
    return learner, known(learner)


def ask(learner: Any, image: Any) -> dict[str, float]:
    """Return the most likely classes of an image with their probabilities."""
    if learner is None or image is None:
        raise gr.Error("Teach two classes first, then choose an image.")
    (prediction,) = learner.predictions(image, Query(min(SHOWN, len(learner.class_names))))
    return dict(zip(prediction.classes, prediction.probabilities, strict=True))


def known(learner: Any) -> str:
    """Return a line that lists the classes of the learner."""
    return f"It knows {len(learner.class_names)} classes: {', '.join(learner.class_names)}."


with gr.Blocks(title="dulbe_peft") as page:
    gr.Markdown(f"# Teach a CLIP new classes\nOne class after the other, without training. The model is `{MODEL}`.")
    state = gr.State(None)
    with gr.Row():
        with gr.Column():
            chosen = gr.Files(label="Images of one class", file_types=["image"])
            called = gr.Textbox(label="Name of the class")
            button = gr.Button("Teach", variant="primary")
            begin = gr.Button("Begin with handwritten digits", visible=MODEL == "demo")
            words = gr.Markdown("It knows no class yet.")
        with gr.Column():
            picture = gr.Image(label="What is this?", type="pil")
            answer = gr.Label(label="Answer", num_top_classes=SHOWN)
    button.click(teach, [state, chosen, called], [state, words], api_name="teach")
    begin.click(digits, [state], [state, words], api_name="digits")
    picture.upload(ask, [state, picture], answer, api_name="ask")

if __name__ == "__main__":
    page.launch()
