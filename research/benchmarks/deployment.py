"""Compare exports of a learner with the learner: the answers of the code in their model cards, and the speed."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from torch import nn
from transformers import pipeline

from dulbe_peft import ClassIncrementalLearner, load_clip
from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.loading import image_shape
from dulbe_peft.encoders.onnx_graphs import ImageEncoder
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.photos.demo import SETTINGS
from dulbe_peft.photos.deployment.formats import export_learner
from dulbe_peft.photos.deployment.parts import Head, choose_classifier, merged_model
from dulbe_peft.streams.digits import digit_tasks
from research.benchmarks import common

FORMATS = ("lora", "transformers", "onnx", "onnx float16", "onnx int8")


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=30, model=None)
    options.add_argument("--learner", help="a saved learner; default: learn digits with frozen features")
    options.add_argument(
        "--data", help="test images, in a format of `dulbe-peft run --data`; default: the demo's digits"
    )
    options.add_argument("--classifier", help="name of the exported classifier; default: the first")
    options.add_argument("--images", type=int, default=500, help="compare at most this many images")
    options.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    values = common.parse(options, argv)
    if values.quick:
        values.images, values.batch = 3, [1]
    learner, test = _learner(values)
    classifier = choose_classifier(learner.state, values.classifier)
    where = f"{Path(learner.state.base_name[0]).name}, {len(learner.class_names)} classes, `{classifier.name}`"
    images, labels = _images(test, learner.class_names, values.images)
    z = learner.image_embeds([(image, -1) for image in images])
    expected = classifier.probabilities(z)
    rows = [common.value_row(f"accuracy of the learner, {where}", _percent(expected, labels), "%")]
    formats = FORMATS if learner.state.adapter is not None else FORMATS[1:]
    with tempfile.TemporaryDirectory() as root:
        for kind in formats:
            form, _, precision = kind.partition(" ")
            folder = export_learner(
                learner, Path(root) / kind, form, classifier.name, precision=precision or "float32"
            )
            predict = _pipeline(folder) if form == "transformers" else _card_code(folder)
            exported = torch.stack([predict(image) for image in images])
            different = float((exported.argmax(dim=1) != expected.argmax(dim=1)).sum())
            rows += [
                common.value_row(f"accuracy by the card's lines, {kind}", _percent(exported, labels), "%"),
                common.value_row(f"largest difference of a probability, {kind}", _largest(exported, expected), ""),
                common.value_row(f"images with another answer, {kind}", different, "images"),
                common.value_row(f"size of the folder, {kind}", _mebibytes(folder), "MiB"),
            ]
        rows += _speed(learner, classifier, Path(root) / "onnx", values, where)
    common.write("deployment", values, argv, rows)


def _learner(values: Any) -> tuple[ClassIncrementalLearner, Any]:
    tasks = digit_tasks()
    if values.learner:
        learner = ClassIncrementalLearner.from_pretrained(values.learner)
    else:
        clip, processor = load_clip(demo_model_folder())
        args = LearnerArguments(**{**SETTINGS, "device": "cpu", "progress": False})
        learner = ClassIncrementalLearner(clip, processor, args=args, strategy="frozen", classifiers="ranpac")
        for task in tasks[: 1 if values.quick else None]:
            learner.learn_task(task.train, task.class_names)
    return learner, load_data(values.data, split="test") if values.data else tasks


def _images(test: Any, names: Sequence[str], count: int) -> tuple[list[Any], torch.Tensor]:
    """Return images of learned classes, spread evenly over the data, and their labels as indices of `names`."""
    rows = []
    for part in [task.test for task in test] if isinstance(test, list) else [test]:
        if not (learned := [name for name in part.class_names if name in names]):
            continue
        known = part.select(learned)
        rows += [(sample["image"], list(names).index(known.class_names[sample["label"]])) for sample in known]
    rows = rows[:: max(1, len(rows) // count)][:count]
    return [image for image, _ in rows], torch.tensor([label for _, label in rows])


def _card_code(folder: Path) -> Any:
    """Return the code of the model card as a function of an image. The code before the image is run once."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    before, image, after = code.replace("path/to/this/folder", str(folder)).partition("\nimage = ")
    space: dict[str, Any] = {}
    exec(before, space)
    rest = compile((image + after).replace('Image.open("photo.jpg")', "given").partition("\nprint")[0], "card", "exec")

    def run(image: Any) -> torch.Tensor:
        exec(rest, space | {"given": image}, space)
        return torch.as_tensor(space["probabilities"][0])

    return run


def _pipeline(folder: Path) -> Any:
    classify = pipeline("image-classification", str(folder), trust_remote_code=True)
    names = [name for _, name in sorted(classify.model.config.id2label.items())]

    def run(image: Any) -> torch.Tensor:
        scores = {row["label"]: row["score"] for row in classify(image, top_k=len(names))}
        return torch.tensor([scores[name] for name in names])

    return run


def _speed(learner: Any, classifier: Any, folder: Path, values: Any, where: str) -> list[dict[str, Any]]:
    """Compare the ONNX graphs with the merged model and classifier in PyTorch, with the same number of threads."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = values.threads
    encoder, head = (onnxruntime.InferenceSession(folder / f"{name}.onnx", settings) for name in ("encoder", "head"))
    module = nn.Sequential(ImageEncoder(merged_model(learner.state)), Head(classifier)).eval()

    def graphs(pixels: Any) -> Any:
        return head.run(None, {"image_embeds": encoder.run(None, {"pixel_values": pixels})[0]})

    size, rows = image_shape(learner.clip, learner.processor)[-1], []
    for batch in values.batch:
        pixels = torch.randn(batch, 3, size, size)
        sides = {
            "onnx": partial(graphs, pixels.numpy()),
            "torch": partial(torch.no_grad()(module), pixels),
        }
        times = common.compare(sides, values.repeats, warmup=5)
        rows.append(common.row(f"ONNX graph / PyTorch, {where}, batch {batch}", times, "onnx", "torch"))
    return rows


def _percent(probabilities: torch.Tensor, labels: torch.Tensor) -> float:
    return common.rounded(100 * float((probabilities.argmax(dim=1) == labels).float().mean()))


def _largest(exported: torch.Tensor, expected: torch.Tensor) -> float:
    return common.rounded(float((exported - expected).abs().max()))


def _mebibytes(folder: Path) -> float:
    return common.rounded(sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20)


if __name__ == "__main__":
    main()
