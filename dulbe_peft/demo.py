"""The embedded demo: handwritten digits, offline, with a tiny CLIP that comes with the package."""

from pathlib import Path
from typing import Any

from dulbe_peft.arguments import LearnerArguments
from dulbe_peft.data.readers import DIGITS, digit_images, load_digit_images
from dulbe_peft.data.store import FeatureStore
from dulbe_peft.encoders.loading import load_clip
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.metrics.accuracy import percent
from dulbe_peft.report import write_report
from dulbe_peft.report.pictures import write_pictures
from dulbe_peft.streams.tasks import Task, class_incremental_tasks

__all__ = ["DIGITS", "SETTINGS", "demo_model_folder", "digit_images", "digit_tasks", "run_demo"]
MONTHS = ("January", "February", "March")
SETTINGS: dict[str, Any] = {"epochs": 4, "prompt_template": "a photo of the digit {}."}


def digit_tasks(increment: int = 2) -> list[Task]:
    """The digits as a stream: three quarters of the 1,797 digits to learn from, the rest to test on."""
    return class_incremental_tasks(load_digit_images("train"), load_digit_images("test"), increment=increment)


def run_demo(output_dir: str | Path) -> dict[str, Any]:
    """Three months of digits: nothing is trained, and no month is seen again; returns the results.

    Each month brings new classes, and the model is tested on all of them so far. The report is `report.html`.
    """
    import torch

    torch.set_num_threads(1)  # a model this small only waits for a second thread
    output, args = Path(output_dir), LearnerArguments(**SETTINGS, device="cpu")
    learner = ClassIncrementalLearner(*load_clip(demo_model_folder()), args=args, strategy="frozen")
    learner.encoder.store = FeatureStore()
    tasks = class_incremental_tasks(
        load_digit_images("train"), load_digit_images("test"), increment=3, initial_increment=4
    )
    results = learner.run(tasks, output)
    trains, tests = [task.train for task in tasks], [task.test for task in tasks]
    write_pictures(output, tests, results, learner=learner, trains=trains)
    matrix = next(iter(results["classifiers"].values()))["matrix"]
    for month, task, row in zip(MONTHS, tasks, matrix, strict=True):
        old = f"; of {MONTHS[0]}'s, {percent(row[0])} %" if len(row) > 1 else ""
        print(f"{month} brought {', '.join(task.class_names)}: {percent(row[-1])} % of them are named right{old}")
    print(f"written: {write_report(output, output / 'report.html')}, for a browser")
    return results
