"""Measure a run with many tasks or very many classes on random features, and a prediction by its learner.

The model has random weights and features as wide as those of ViT-B/16. Only the image of the prediction is encoded.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, class_incremental_tasks, load_clip, run_stream
from dulbe_peft.data.readers import load_data
from dulbe_peft.streams.run import Run
from dulbe_peft.streams.tasks import Task
from research.benchmarks import common, models

NUMBERS, NEAR = (2, 20, 80), 5  # tasks that have a row; each row is the median of this many tasks up to it


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=1, model="wide")
    options.add_argument("--tasks", type=int, default=300)
    options.add_argument("--classes", type=int, default=2, help="classes per task")
    options.add_argument("--images", type=int, default=4, help="images per class in each split")
    options.add_argument("--classifiers", default="bayes,lda,prototype")
    values = common.parse(options, argv)
    if values.quick:
        values.tasks = 4
    with tempfile.TemporaryDirectory() as folder:
        rows = measured(values, Path(folder))
    common.write("tasks", values, argv, rows)


def measured(values: Any, work: Path) -> list[dict[str, Any]]:
    """Learn all tasks in a run, then the last task after a single other one, and predict one image."""
    clip, processor = models.clip("wide", "sdpa")
    clip.save_pretrained(work / "model")
    processor.save_pretrained(work / "model")
    classes, (learner, other) = values.tasks * values.classes, (made(values, work) for _ in range(2))
    write_data(work / "features.parquet", learner.encoder.embed_dim, classes, values.images)
    train, test = (load_data(work / "features.parquet", split) for split in ("train", "test"))
    cut = partial(class_incremental_tasks, train, test, increment=values.classes)
    learned, tested, peaks = timed_run(learner, cut(), work / "run")
    alone = timed_run(other, cut(initial_increment=classes - values.classes), work / "other")[0][-1]
    newest = work / "run" / f"task-{values.tasks:03d}"
    notes = [(newest / name).stat().st_size for name in ("progress.json", "manifest.json", "learner.json")]
    figures = {}
    for number in sorted({number for number in NUMBERS if number < values.tasks} | {values.tasks}):
        first = max(1, number - NEAR)
        what = f"CPU of a task, learned and saved, median of {first + 1} to {number}"
        figures[what] = statistics.median(learned[first:number]), "s"
        figures[f"CPU of its test, {number * values.classes * values.images:,} images"] = tested[number - 1], "s"
        figures[f"peak memory of the process up to task {number}"] = peaks[number - 1], "MiB"
    figures |= {
        "CPU of the last task after one task with all classes before": (alone, "s"),
        "notes in the last task's folder": (sum(notes) / 1024, "KiB"),
        "CPU of `dulbe-peft predict`, one image": (predicted(work), "s"),
        "CPU of the same with the first task's learner": (predicted(work, "task-001"), "s"),
    }
    where = f"{values.tasks} tasks of {values.classes:,} classes"
    return [
        common.value_row(f"{what}, {where}", common.rounded(value), unit) for what, (value, unit) in figures.items()
    ]


def made(values: Any, work: Path) -> ClassIncrementalLearner:
    """Return a learner of the saved model that has learned nothing yet."""
    options = {"args": LearnerArguments(device="cpu", progress=False), "classifiers": values.classifiers.split(",")}
    return ClassIncrementalLearner(*load_clip(work / "model"), strategy="frozen", **options)


def timed_run(learner: ClassIncrementalLearner, tasks: list[Task], folder: Path) -> tuple[list[float], ...]:
    """Run all tasks; return for each the CPU seconds to learn and save, those to test, and the peak memory in MiB."""
    seconds: dict[str, list[float]] = {"learn": [], "measure": []}
    peaks, methods = [], {name: getattr(Run, name) for name in seconds}

    def timed(name: str, run: Run, *arguments: Any) -> Any:
        before = time.process_time()
        result = methods[name](run, *arguments)
        seconds[name].append(time.process_time() - before)
        if name == "learn":
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
        return result

    try:
        for name in methods:
            setattr(Run, name, partialmethod(lambda run, name, *given: timed(name, run, *given), name))
        run_stream(learner, tasks, folder)
    finally:
        for name, method in methods.items():
            setattr(Run, name, method)
    tested = seconds["measure"]
    return [whole - test for whole, test in zip(seconds["learn"], tested, strict=True)], tested, peaks


def predicted(work: Path, task: str = "") -> float:
    """Return the CPU seconds of `predict` for one image, with the learner of the run or of one task."""
    Image.fromarray(np.zeros((16, 16, 3), dtype=np.uint8)).save(work / "image.png")
    command = [sys.executable, "-m", "dulbe_peft", "predict", str(work / "run" / task), str(work / "image.png")]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([*command, "--device", "cpu"], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def write_data(file: Path, width: int, classes: int, images: int) -> None:
    """Write features around a random centre for each class, in both splits."""
    random, parts = np.random.default_rng(0), []
    centres = random.normal(size=(classes, width))
    for split in ("train", "test"):
        labels = np.repeat(np.arange(classes), images)
        rows = centres[labels] + random.normal(size=(len(labels), width))
        rows = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
        columns = {"split": [split] * len(labels), "label": [f"{label:05d}" for label in labels]}
        embedding = pa.FixedSizeListArray.from_arrays(rows.reshape(-1), width)
        parts.append(pa.table(columns | {"embedding": embedding}))
    pq.write_table(pa.concat_tables(parts), file)


if __name__ == "__main__":
    main()
