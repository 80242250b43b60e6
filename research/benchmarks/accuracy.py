"""Measure how an approximate option changes accuracy: learn a class-incremental stream with and without it.

The default is the demo's stream of handwritten digits. With `--data`, it is the stream that `dulbe-peft run` learns
from that data set if `--seed` and `--order-seed` are both 0, both 1, and so on.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from peft import get_peft_model

from dulbe_peft import (
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
    class_incremental_tasks,
    run_stream,
)
from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.photos.demo import SETTINGS
from dulbe_peft.streams.digits import digit_tasks
from dulbe_peft.streams.tasks import Task
from research.benchmarks import common, models

OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {},
    "bf16 autocast": {"precision": "bfloat16"},
}


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=3, model=str(demo_model_folder()))
    options.add_argument("--data", help="a data set, as for `dulbe-peft run`; default: the demo's digits")
    options.add_argument("--increment", type=int, default=2, help="classes per task")
    options.add_argument("--support-rank", type=int, default=16)
    options.add_argument("--options", nargs="+", choices=OPTIONS, default=list(OPTIONS), help="options to compare")
    values = common.parse(options, argv)
    results = {name: [run(values, seed, OPTIONS[name]) for seed in range(values.repeats)] for name in values.options}
    where = f"{os.path.basename(values.data) if values.data else 'digits'}, mean of {values.repeats} seeds"
    approximate = [name for name in results if name != "exact"] if "exact" in results else []
    rows = []
    for title, key in (("A_last", "last_accuracy"), ("A_bar", "average_accuracy")):
        figures = {name: [100 * result[key] for result in by_seed] for name, by_seed in results.items()}
        rows += [mean_row(f"{title}, {where}, {name}", figures[name], "%") for name in figures]
        for name in approximate:
            differences = [ours - exact for ours, exact in zip(figures[name], figures["exact"], strict=True)]
            rows.append(mean_row(f"{title}, {where}, {name} less exact", differences, "points"))
    common.write("accuracy", values, argv, rows)


def mean_row(what: str, figures: list[float], unit: str) -> dict[str, Any]:
    """Return a row of the table: the mean over the seeds, the minimum and the maximum."""
    low, high = (round(figure, 1) + 0.0 for figure in (min(figures), max(figures)))  # + 0.0 turns -0.0 into 0.0
    spread = f"{unit}, {low:.1f} to {high:.1f}"
    return common.value_row(what, common.rounded(sum(figures) / len(figures)), spread)


def run(values: argparse.Namespace, seed: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Learn one stream and return the results of the head."""
    tasks = stream(values, seed)
    settings = fields if values.data else SETTINGS | fields
    if values.quick:
        train, test = (common.some(images, values, 16) for images in (tasks[0].train, tasks[0].test))
        tasks, settings = [Task(train, test, tasks[0].class_names)], settings | {"epochs": 1}
    clip, processor = models.clip(values.model, "eager")
    torch.manual_seed(seed)
    model = get_peft_model(clip, DualModeLoraConfig(support_rank=values.support_rank))
    args = LearnerArguments(seed=seed, device="cpu", progress=False, **settings)
    with tempfile.TemporaryDirectory() as folder:
        results = run_stream(ClassIncrementalLearner(model, processor, args=args), tasks, folder).contents()
    return results["head"]


def stream(values: argparse.Namespace, seed: int) -> list[Task]:
    """Return the tasks of the demo, or those of a data set with its classes in random order."""
    if not values.data:
        return digit_tasks(values.increment)
    train, test = (load_data(values.data, split) for split in ("train", "test"))
    return class_incremental_tasks(train, test, increment=values.increment, seed=seed)


if __name__ == "__main__":
    main()
