"""Measure a whole stream as a user runs it, by precision: small images are enlarged, and every task is saved.

The default stream has the size of CIFAR-100: 10 tasks of 10 classes and 5,000 images of 32 x 32 pixels, which are
noise here. It runs on the accelerator if the machine has one. The figures are seconds, not ratios, and hold for the
machine that the results name.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import get_peft_model
from PIL import Image

from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments, run_stream
from dulbe_peft.streams.tasks import Task
from research.benchmarks import common, models

PRECISIONS = ("float32", "tf32", "bf16")
PHASES = ("probe", "allocate", "train", "close", "save")


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=1)
    options.add_argument("--tasks", type=int, default=10)
    options.add_argument("--classes", type=int, default=10, help="classes per task")
    options.add_argument("--num-images", type=int, default=5000, help="images per task")
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--batch", type=int, default=32)
    options.add_argument("--num-workers", type=int, default=0)
    options.add_argument("--attention", default="sdpa")
    options.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["float32", "bf16"])
    values = common.parse(options, argv)
    if values.quick:
        values.tasks, values.num_images, values.classes, values.batch = 2, 4, 2, 4
        values.epochs = 1
    shape = f"{values.tasks} x {values.num_images} images, {values.epochs} epochs"
    rows = []
    for precision in values.precision:
        if not values.quick:
            run(argparse.Namespace(**{**vars(values), "tasks": 1, "num_images": values.batch}), precision)  # warm-up
        seconds = [run(values, precision) for _ in range(values.repeats)]
        where = f"stream of {shape}, {common.model_name(values.model)}, {precision}"
        for phase in ("total", *PHASES):
            figure = common.rounded(float(np.median([times[phase] for times in seconds])))
            rows.append(common.value_row(where if phase == "total" else f"of it {phase}, {precision}", figure, "s"))
    common.write("stream", values, argv, rows)


class Noise:
    """A data set of labelled noise images of 32 x 32 pixels. An index always gives the same image."""

    def __init__(self, task: int, images: int, classes: int) -> None:
        self.task = task
        self.labels = np.arange(images) % classes

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pixels = np.random.default_rng((self.task, index)).integers(0, 256, (32, 32, 3), np.uint8)
        return {"image": Image.fromarray(pixels), "label": int(self.labels[index])}


def run(values: argparse.Namespace, precision: str) -> dict[str, float]:
    """Learn a stream with a new model; return the seconds in total and by phase."""
    clip, processor = models.clip(values.model, values.attention)
    processor.image_processor = models.image_processor(clip.config.vision_config.image_size)
    args = LearnerArguments(
        epochs=values.epochs,
        batch_size=values.batch,
        eval_batch_size=values.batch,
        num_workers=values.num_workers,
        precision="bfloat16" if precision == "bf16" else "float32",
        progress=False,
    )
    learner = ClassIncrementalLearner(get_peft_model(clip, DualModeLoraConfig()), processor, args=args)
    tasks = []
    for number in range(values.tasks):
        names = tuple(f"class {number * values.classes + index}" for index in range(values.classes))
        tasks.append(Task(Noise(number, values.num_images, values.classes), None, names))
    with tempfile.TemporaryDirectory() as folder, tf32(precision == "tf32"):
        started = time.perf_counter()
        run_stream(learner, tasks, folder)
        total = time.perf_counter() - started
        timings = json.loads((Path(folder) / "timings.json").read_text(encoding="utf-8"))["tasks"]
    phases = {name: sum(task["phases"][name] for task in timings) for name in PHASES}
    return {"total": total, **phases}


@contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid TF32 on CUDA, which rounds the inputs of float32 products and convolutions to 10 bits."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


if __name__ == "__main__":
    main()
