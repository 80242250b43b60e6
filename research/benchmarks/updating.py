"""Compare learning half of the images of each class and updating with the other half with learning all at once.

Nothing is trained, so each image is encoded once. Each seed draws other halves.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, class_incremental_tasks, load_dual_encoder
from dulbe_peft.classifiers.registry import make_classifier
from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.streams.digits import digit_tasks
from research.benchmarks import common

SPECS = ("bridge", "prototype", "lda", "ridge", "ranpac:features=2000")


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=3, model=None)
    options.add_argument("--clip", default="demo", help="the packaged demo model, or a folder")
    options.add_argument("--data", default="digits", help="the demo's digits, or a data set as for `dulbe-peft run`")
    options.add_argument("--increment", type=int, default=2, help="classes per task")
    options.add_argument("--prompt-template", default="a photo of the digit {}.")
    values = common.parse(options, argv)
    features, scale = encoded(values)
    where = f"{common.model_name(values.data)}, mean of {values.repeats} draws"
    rows = []
    for spec in SPECS[:1] if values.quick else SPECS:
        draws = [compared(spec, features, scale, seed) for seed in range(values.repeats)]
        rows += summed_up(spec, draws, where)
    common.write("updating", values, argv, rows)


def summed_up(spec: str, draws: list[dict[str, float]], where: str) -> list[dict[str, Any]]:
    """Return the rows of a classifier: the figures for the docs, with the mean and all draws of every figure."""
    means = {name: common.rounded(statistics.fmean(draw[name] for draw in draws)) for name in draws[0]}
    each = {name: [common.rounded(draw[name]) for draw in draws] for name in draws[0]}
    gap = statistics.fmean(draw["accuracy updated"] - draw["accuracy with all"] for draw in draws)
    what = f"{spec} updated with half of the images, accuracy less that of all at once, {where}"
    rows = [common.value_row(what, common.rounded(gap), "points") | {"means": means, "each": each}]
    if "weights differ by, at most" in means:
        what = f"{spec}, largest difference of a depth's weight, {where}"
        rows.append(common.value_row(what, means["weights differ by, at most"], "of 1"))
    return rows


def encoded(values: Any) -> tuple[list[dict[str, torch.Tensor]], float]:
    """Return, for each task, `train` and `test` features, their labels `y` and `truth`, and its `text`; and tau."""
    demo = values.data == "digits"
    splits = () if demo else (load_data(values.data, "train"), load_data(values.data, "test"))
    tasks = digit_tasks(values.increment) if demo else class_incremental_tasks(*splits, increment=values.increment)
    model, processor = load_dual_encoder(str(demo_model_folder()) if values.clip == "demo" else values.clip)
    args = LearnerArguments(prompt_template=values.prompt_template, progress=False)
    learner = ClassIncrementalLearner(model, processor, args=args, strategy="frozen", classifiers="prototype")
    encoded_tasks = []
    for task in tasks[:2] if values.quick else tasks:
        train, test = (common.some(images, values, 20) for images in (task.train, task.test))
        with torch.no_grad():
            part = {"text": learner.encoder.text_embeds(task.class_names)}
        part |= {"train": learner.image_embeds(train), "y": torch.as_tensor(train.labels)}
        part |= {"test": learner.image_embeds(test), "truth": torch.as_tensor(test.labels)}
        encoded_tasks.append(part)
    return encoded_tasks, learner.logit_scale


def compared(spec: str, tasks: list[dict[str, torch.Tensor]], scale: float, seed: int) -> dict[str, float]:
    """Return the accuracy with half of the images, after the update, and with all, in percent; and differences."""
    generator = torch.Generator().manual_seed(seed)
    firsts = [half(task["y"], generator) for task in tasks]
    parts = taught(spec, tasks, scale, firsts)
    figures = {"accuracy with half": accuracy(parts, tasks)}
    start = 0
    for task, first in zip(tasks, firsts, strict=True):
        parts.update_classes(task["train"][~first], task["y"][~first] + start)
        start += len(task["text"])
    whole = taught(spec, tasks, scale, [torch.ones_like(first) for first in firsts])
    figures |= {"accuracy updated": accuracy(parts, tasks), "accuracy with all": accuracy(whole, tasks)}
    if spec == "bridge":
        figures["prototypes differ by"] = float((parts.visual_prototypes - whole.visual_prototypes).abs().max())
        change = (parts.reliability - whole.reliability).abs()
        figures |= {"weights differ by, at most": float(change.max()), "weights differ by, mean": float(change.mean())}
        depth = (parts.expected_depth() - whole.expected_depth()).abs()
        figures["expected depth differs by, mean"] = float(depth.mean())
    elif hasattr(parts, "strength"):
        parts.ridge = whole.ridge = whole.strength()  # was chosen on fewer held-out images
        parts.cpu(), whole.cpu()  # clears the cached solution, so that both solve again
    images = torch.cat([task["test"] for task in tasks])
    scores = whole(images)
    figures["scores differ by, relative"] = float((parts(images) - scores).norm() / scores.norm())
    return figures


def half(labels: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Return a mask of a random half of the images of each class."""
    chosen = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        rows = (labels == label).nonzero()[:, 0]
        chosen[rows[torch.randperm(len(rows), generator=generator)][: (len(rows) + 1) // 2]] = True
    return chosen


def taught(spec: str, tasks: list[dict[str, torch.Tensor]], scale: float, masks: list[torch.Tensor]) -> Any:
    """Return a classifier that has learned the images of the masks, task by task."""
    classifier = make_classifier(spec, tasks[0]["train"].shape[1], scale)
    for number, (task, mask) in enumerate(zip(tasks, masks, strict=True)):
        names = [f"{number}.{index}" for index in range(len(task["text"]))]
        texts = torch.cat([earlier["text"] for earlier in tasks[: number + 1]])
        classifier.add_classes(names, task["train"][mask], task["y"][mask], texts)
    return classifier


def accuracy(classifier: Any, tasks: list[dict[str, torch.Tensor]]) -> float:
    """Return the top-1 accuracy on the test images of all tasks, in percent."""
    right = total = start = 0
    for task in tasks:
        right += int((classifier(task["test"]).argmax(dim=1) == task["truth"] + start).sum())
        total, start = total + len(task["truth"]), start + len(task["text"])
    return 100 * right / total


if __name__ == "__main__":
    main()
