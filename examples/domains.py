"""Learn several data sets, one task each, and measure what becomes of those that are still to come.

    python examples/domains.py aircraft caltech101 cifar100 --model openai/clip-vit-base-patch16 --output out

Each folder holds `train/<class>/*.jpg` and `test/<class>/*.jpg`. A file `class_names.txt` beside them renames the
classes, as the command's `--class-names` does: two data sets must not have a class of the same name. Started again,
it goes on after the newest finished data set.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peft import get_peft_model

from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, ImageFolder, LearnerArguments, Task, load_clip
from dulbe_peft.streams.protocols import rename_classes


def task_of(folder: Path) -> Task:
    train, test = ImageFolder(folder, "train"), ImageFolder(folder, "test")
    names = folder / "class_names.txt"
    if names.is_file():
        train, test = rename_classes(train, str(names)), rename_classes(test, str(names))
    return Task(train, test, tuple(train.class_names))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--strategy", default="dulbe")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--output", default="out")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    clip, processor = load_clip(arguments.model)
    model = get_peft_model(clip, DualModeLoraConfig())
    args = LearnerArguments(epochs=arguments.epochs)
    learner = ClassIncrementalLearner(model, processor, args=args, strategy=arguments.strategy)
    results = learner.run([task_of(folder) for folder in arguments.folders], arguments.output, test_ahead=True)
    for name, figures in results["ahead"]["classifiers"].items():
        print(f"{name}: " + ", ".join(f"{measure} {100 * value:.1f} %" for measure, value in figures.items()))


if __name__ == "__main__":
    main()
