"""Learn several data sets, one task each, and measure Transfer, Average and Last as the benchmark MTIL does.

    python examples/domains.py examples/protocols/mtil.yaml --data DATA --output out

DATA has a folder for each data set of the file, with `train/<class>/*.jpg` and `test/<class>/*.jpg`. A text file
`class_names.txt` beside them renames the classes, as the command's `--class-names` does: two data sets must not have a
class of the same name. Started again, it goes on after the newest finished data set.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import get_peft_model

from dulbe_peft import (
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
    Task,
    load_dual_encoder,
    run_stream,
)
from dulbe_peft.data.folders import ImageFolder
from dulbe_peft.metrics.accuracy import transfer_measures


def task_of(folder: Path, protocol: dict[str, Any]) -> Task:
    """One data set, with the numbers of classes and images that the protocol says."""
    train, test = ImageFolder(folder, "train"), ImageFolder(folder, "test")
    names = folder / "class_names.txt"
    if names.is_file():
        train, test = train.renamed(names), test.renamed(names)
    found = {"classes": len(train.class_names), "train": len(train), "test": len(test)}
    for what, count in found.items():
        if protocol.get(what) not in (None, count):
            raise ValueError(f"{folder.name}: {what} is {count}, the protocol has {protocol[what]}")
    return Task(train, test, tuple(train.class_names))


def accuracies(learner: ClassIncrementalLearner, tasks: list[Task]) -> list[float]:
    """Of each data set among its own classes: by the classifier where it has learned them, else by their names."""
    found = []
    for task in tasks:
        images, names = learner.image_embeds(task.test), list(task.class_names)
        if set(names) <= set(learner.class_names):
            columns = [learner.class_names.index(name) for name in names]
            scores = learner.classifier.logits(images)[:, columns]
        else:
            scores = images @ learner.text_embeds(names).T
        found.append((scores.argmax(dim=-1).cpu() == torch.as_tensor(task.test.labels)).float().mean().item())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("protocol", type=Path)
    parser.add_argument("--data", required=True, type=Path, help="folder with a folder for each data set")
    parser.add_argument("--output", required=True, type=Path)
    arguments = parser.parse_args()
    protocol = yaml.safe_load(arguments.protocol.read_text(encoding="utf-8"))
    domains = protocol["domains"]

    tasks = [task_of(arguments.data / name, counts) for name, counts in domains.items()]
    torch.manual_seed(0)
    clip, processor = load_dual_encoder(protocol["model"])
    model = get_peft_model(clip, DualModeLoraConfig(**protocol.get("adapter", {})))
    args = LearnerArguments(**protocol.get("learner", {}))
    learner = ClassIncrementalLearner(model, processor, args=args, strategy=protocol["strategy"])
    for (name, counts), found in zip(domains.items(), accuracies(learner, tasks), strict=True):
        print(f"{name}: {100 * found:.1f} % by the names of its classes, before training")
        off = abs(100 * found - counts.get("zero_shot", 100 * found))
        if off > protocol["zero_shot_tolerance"]:
            raise ValueError(f"{name}: that is {off:.1f} points off the published {counts['zero_shot']} %")
    run_stream(learner, tasks, arguments.output)

    matrix = []
    for number, name in enumerate(domains, 1):
        learner = ClassIncrementalLearner.from_pretrained(arguments.output / f"task-{number:03d}")
        matrix.append(accuracies(learner, tasks))
        print(f"after {name}: " + " ".join(f"{100 * accuracy:.1f}" for accuracy in matrix[-1]))
    figures = transfer_measures(matrix)
    (arguments.output / "domains.json").write_text(json.dumps({"matrix": matrix, **figures}, indent=2) + "\n")
    print(", ".join(f"{measure} {100 * value:.1f} %" for measure, value in figures.items()))


if __name__ == "__main__":
    main()
