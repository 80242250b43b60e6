"""Measure what planning a task from some of its images changes, on held-out training images.

Streams with more images in a task than `planning_images`: handwriting, 110 classes in five tasks of 660 images;
photographs, 15 classes drawn by the seed, in three tasks of 400; and the demo's digits, of which eight are learned in
two tasks of 292. `never_learned` is the accuracy by names on other classes, as in `research.benchmarks.shares`, which
also describes the folders. `captured` is the share of |G|^2 inside the planned bases, where G is the gradient of all
images of a task: the mean over tasks and layers, measured with the first seed.

Measured rows of the output are kept, so the command can be stopped and repeated; rows of another model or other images
are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import get_peft_model

from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments, class_incremental_tasks
from dulbe_peft.data.digits import load_digit_images
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.loading import load_dual_encoder
from dulbe_peft.streams.tasks import Task
from dulbe_peft.training.task_trainer import TaskTrainer
from research.benchmarks import common
from research.benchmarks.shares import by_names, origin, split

COUNTS: tuple[int | str, ...] = ("all", 256, 128, 64)
CLASSIFIERS = ("text", "bayes", "pooled_bridge")
STREAMS = ("digits", "handwriting", "photographs")


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=3, model=None)
    options.add_argument("--data", type=Path, default=Path("data"), help="folder with the images")
    options.add_argument("--models", type=Path, default=Path("models"), help="folder with the models")
    options.add_argument("--streams", nargs="+", default=STREAMS, choices=STREAMS)
    options.add_argument("--images", nargs="+", default=[str(count) for count in COUNTS], help="planning_images")
    values = common.parse(options, argv)
    if values.quick:
        values.streams, values.images = ["digits"], ["64"]
    out = values.out or common.RESULTS / "planning.json"
    rows = common.measured_before(out, lambda row: origin(values.data, values.models, row["stream"]))
    done = {(row["stream"], row["planning_images"], row["seed"]) for row in rows}
    for seed, stream, count in product(range(values.repeats), values.streams, values.images):
        if (stream, count, seed) not in done and (here := origin(values.data, values.models, stream)) is not None:
            rows.append(measured(values, stream, count, seed) | {"origin": here})
            common.write("planning", values, argv, rows)


def measured(values: Any, stream: str, count: str, seed: int) -> dict[str, Any]:
    """Learn the stream, and return the accuracies in percent."""
    model, tasks, never, template, rank = parts(values, stream, seed)
    torch.manual_seed(seed)
    clip, processor = load_dual_encoder(model)
    number = "all" if count == "all" else int(count)
    fields: dict[str, Any] = {"prompt_template": template, "planning_images": number}
    if values.quick:
        fields["epochs"] = 1
    args = LearnerArguments(seed=seed, device="cpu", precision="float32", progress=False, **fields)
    network = get_peft_model(clip, DualModeLoraConfig(support_rank=rank))
    learner = ClassIncrementalLearner(network, processor, args, "dulbe", CLASSIFIERS)
    captured: list[float] = []

    class Probed(TaskTrainer):
        def begin(self) -> None:
            super().begin()
            if seed == 0:
                drawn, self.sample = self.sample, list(range(len(self.images)))
                captured.extend(captured_share(self.adapter, self.probe()[0]))
                self.sample = drawn

    for task in tasks:
        learner.learn_task(task.train, task.class_names, trainer=Probed)
    tests = learner.evaluations([(task.test, task.class_names) for task in tasks])
    figures = {
        name: 100 * float(np.mean([test.accuracy(test.classifiers[name]) for test in tests])) for name in CLASSIFIERS
    }
    names = list(never.class_names) if stream != "digits" else [*learner.class_names, *never.class_names]
    figures["never_learned"] = 100 * by_names(learner, never, names)
    if captured:
        figures["captured"] = 100 * float(np.mean(captured))
    rounded = {name: common.rounded(value) for name, value in figures.items()}
    what = f"{stream}, planned from {count}, seed {seed}: learned classes by names"
    where = {"stream": stream, "planning_images": count, "seed": seed}
    return common.value_row(what, rounded.pop("text"), "%") | where | rounded


def captured_share(adapter: Any, gradients: dict[str, torch.Tensor]) -> list[float]:
    """Return |G P|^2 / |G|^2 of each layer, for its present bases P."""
    layers, shares = adapter.dual_mode_layers(), []
    for name, gradient in gradients.items():
        basis = layers[name].dulbe_P[adapter.adapter_name]
        shares.append(float((gradient @ basis).square().sum() / gradient.square().sum()))
    return shares


def parts(values: Any, stream: str, seed: int) -> tuple[str, list[Task], LabelledImages, str, int]:
    """Return the model, the tasks, images of other classes, the prompt, and K_h."""
    if stream == "handwriting":
        train, test = split(load_data(values.data / stream, "train"), 30, 20, seed)
        tasks = class_incremental_tasks(train, test, increment=22, seed=seed)
        never, model = load_data(values.data / "printed", "train"), str(values.models / "glyph-clip")
        return model, tasks, never, "a photo of a {}.", 128
    if stream == "photographs":
        images = load_data(values.data / stream, "train")
        order = [images.class_names[place] for place in np.random.default_rng(7 + seed).permutation(75)]
        train, test = split(images, 80, 20, seed)
        some = (each.select(order[:15], others=True) for each in (train, test))
        never = split(images, 1, 20, 0)[1].select(order[40:55], others=True)
        tasks = class_incremental_tasks(*some, increment=5, seed=seed)
        return str(values.models / "small-clip"), tasks, never, "a photo of a {}.", 128
    images = load_digit_images("train")
    each = (20, 2) if values.quick else (73, 58)
    tasks = class_incremental_tasks(*split(images, *each, seed), increment=4, seed=seed)
    return "demo", tasks[:2], tasks[2].test, "a photo of the digit {}.", 16


if __name__ == "__main__":
    main()
