"""CPU seconds of a late task beside an early one, in a run of many small tasks whose images are encoded already.

python -m benchmarks.tasks --tasks 80
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, class_incremental_tasks, load_clip, load_data
from dulbe_peft.data.features import FeatureFile, write_classes, write_shard
from dulbe_peft.demo import demo_model_folder
from dulbe_peft.runs.run import Run


def write_data(folder: Path, learner: ClassIncrementalLearner, classes: int, images: int) -> None:
    """Features of images around a random centre for each class, in both splits."""
    random, width = np.random.default_rng(0), learner.encoder.embed_dim
    names = [f"{number:05d}" for number in range(classes)]
    centres = random.normal(size=(classes, width))
    scale = learner.logit_scale
    facts = FeatureFile(model="demo", key=learner.encoder.key, width=width, logit_scale=scale, class_names=names)
    write_classes(folder, facts, None)
    for split in ("train", "test"):
        labels = np.repeat(np.arange(classes), images)
        rows = centres[labels] + random.normal(size=(len(labels), width))
        rows /= np.linalg.norm(rows, axis=1, keepdims=True)
        entries = [f"{split}/{number}" for number in range(len(labels))]
        write_shard(folder, split, 0, entries, labels, rows.astype(np.float32), entries)


def main() -> None:
    """Print CPU seconds a task around task 20 and around the last one, and the bytes of the last folder's notes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=80)
    parser.add_argument("--classes", type=int, default=2, help="of a task")
    parser.add_argument("--images", type=int, default=10, help="of a class, in each split")
    parser.add_argument("--classifiers", default="bayes,lda,prototype")
    values = parser.parse_args()
    torch.set_num_threads(1)
    work = Path(tempfile.mkdtemp())
    try:
        args = LearnerArguments(device="cpu", progress=False)
        made = values.classifiers.split(",")
        learner = ClassIncrementalLearner(
            *load_clip(demo_model_folder()), args=args, strategy="frozen", classifiers=made
        )
        (work / "features").mkdir()
        write_data(work / "features", learner, values.tasks * values.classes, values.images)
        train, test = (load_data(work / "features", split) for split in ("train", "test"))
        ends, learn = [], Run.learn

        def timed(run: Run, *arguments: Any) -> None:
            learn(run, *arguments)
            ends.append(time.process_time())

        Run.learn = timed  # type: ignore[method-assign]
        learner.run(class_incremental_tasks(train, test, increment=values.classes), work / "run")
        seconds = np.diff(ends)
        early, late = statistics.median(seconds[15:24]), statistics.median(seconds[-10:])
        print(f"CPU seconds a task: {early:.3f} around task 20, {late:.3f} at the end, ratio {late / early:.2f}")
        newest = work / "run" / f"task-{values.tasks:03d}"
        sizes = {name: (newest / name).stat().st_size for name in ("progress.json", "manifest.json", "learner.json")}
        print(f"bytes of notes in the last folder: {sizes}")
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    main()
