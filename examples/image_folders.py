"""Learn a stream of labelled folders, `root/train/<class>/*.jpg` and `root/test/<class>/*.jpg`.

    python examples/image_folders.py photos --model openai/clip-vit-base-patch16 --increment 10 --output out

Started again, it goes on after the newest finished task.
"""

from __future__ import annotations

import argparse

import torch
from peft import get_peft_model

from dulbe_peft import (
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
    class_incremental_tasks,
    load_clip,
    run_stream,
)
from dulbe_peft.data.folders import ImageFolder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root")
    parser.add_argument("--model", required=True)
    parser.add_argument("--increment", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output", default="out")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    clip, processor = load_clip(arguments.model)
    model = get_peft_model(clip, DualModeLoraConfig())
    learner = ClassIncrementalLearner(model, processor, args=LearnerArguments(epochs=arguments.epochs))
    tasks = class_incremental_tasks(
        ImageFolder(arguments.root, "train"), ImageFolder(arguments.root, "test"), increment=arguments.increment
    )
    results = run_stream(learner, tasks, arguments.output)
    name = learner.classifier.name  # the one that predict uses
    scores = results.classifiers[name]
    last, mean = scores.last_accuracy, scores.average_accuracy
    print(f"{name}: accuracy after the last task {last:.3f}, mean over tasks {mean:.3f}")


if __name__ == "__main__":
    main()
