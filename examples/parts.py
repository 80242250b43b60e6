"""Leave out one part of DuLBE at a time: what do the names of the classes lose?

The camera is a poor one: its pictures of handwritten digits are grey in grey, which the model has never seen, so that
it recognises a third of them by their names instead of nine of ten. Four tasks teach two digits each, and two digits
are never learned. An image is right if the nearest of all ten names is its own. The settings are the paper's, with 40
images of each digit and five epochs. Without a mode, the rank is lower, too; "at equal rank", the other mode has it.

    python examples/parts.py                                  # one seed, in about a minute
    python examples/parts.py --seeds 5 --output parts.json    # five seeds: order of the digits, images and weights
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

import numpy as np
import torch
from peft import get_peft_model

from dulbe_peft import (
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
    class_incremental_tasks,
    load_clip,
    register_strategy,
)
from dulbe_peft.data.digits import load_digit_images
from dulbe_peft.strategies.dulbe import Dulbe
from dulbe_peft.subspaces.allocation import allocate_modes


@register_strategy
@dataclass(frozen=True)
class WithoutStatistics(Dulbe):
    """DuLBE that forgets which inputs earlier tasks had: both modes are the strongest directions of the gradient."""

    name = "dulbe_without_statistics"

    def plan(self, task):
        return allocate_modes(task.gradients, {}, config=task.adapter.active_config)


RATE = 1e-3  # the paper's
SYSTEMS = {  # name: strategy, learning rate, and changes of the adapter's settings
    "nothing trained": ("frozen", RATE, {}),
    "LoRA": ("lora", RATE, {}),
    "LoRA, three times the rate": ("lora", 3 * RATE, {}),  # the best of 1, 3 and 10 times on held-back images
    "DuLBE": ("dulbe", RATE, {}),
    "DuLBE, three times the rate": ("dulbe", 3 * RATE, {}),  # as good as once on held-back images
    "without the shared mode": ("dulbe", RATE, {"shared_rank": 0}),
    "without the shared mode, at equal rank": ("dulbe", RATE, {"shared_rank": 0, "residual_rank": 9}),
    "without the residual modes": ("dulbe", RATE, {"residual_rank": 0}),
    "without the residual modes, at equal rank": ("dulbe", RATE, {"shared_rank": 9, "residual_rank": 0}),
    "without the structure loss": ("dulbe", RATE, {"structure_weight": 0}),
    "without routing": ("dulbe:routing=both", RATE, {}),
    "without statistics": ("dulbe_without_statistics", RATE, {}),
}


def photographed(images):
    """Return the images as the poor camera takes them: black and white become two shades of grey, 100 and 160."""
    return [
        {"image": item["image"].point(lambda value: 100 + 60 * value // 255), "label": item["label"]}
        for item in images
    ]


def accuracies(system: str, seed: int) -> dict[str, float]:
    """Return the accuracy of the names in percent: on the last task, on earlier tasks, and on digits never learned."""
    strategy, rate, changes = SYSTEMS[system]
    train, test = load_digit_images("train"), load_digit_images("test")
    draw = np.random.default_rng(seed)
    rows = [draw.permutation(np.flatnonzero(train.labels == label))[:40] for label in range(10)]
    train = train.at(np.concatenate(rows))
    tasks = class_incremental_tasks(photographed(train), photographed(test), test.class_names, increment=2, seed=seed)
    torch.manual_seed(seed)
    clip, processor = load_clip("demo")
    model = clip if strategy == "frozen" else get_peft_model(clip, DualModeLoraConfig(support_rank=16, **changes))
    args = LearnerArguments(
        epochs=5,
        learning_rate=rate,
        update_share=1,
        prompt_template="a photo of the digit {}.",
        seed=seed,
        progress=False,
    )
    learner = ClassIncrementalLearner(model, processor, args, strategy=strategy, classifiers="text")
    for task in tasks[:4]:
        learner.learn_task(task.train)
    texts = learner.text_embeds([name for task in tasks for name in task.class_names])
    right = []
    for number, task in enumerate(tasks):
        answers = (learner.image_embeds(task.test) @ texts.T).argmax(dim=1)
        right.append((answers == torch.as_tensor(task.test.labels) + 2 * number).double())
    groups = {"new": right[3:4], "old": right[:3], "never learned": right[4:], "all": right}
    return {name: 100 * torch.cat(group).mean().item() for name, group in groups.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS, metavar="NAME")
    parser.add_argument("--output", type=Path, help="a JSON file, to which the accuracies with each seed are added")
    options = parser.parse_args()
    results = {}
    if options.output and options.output.exists():
        results = json.loads(options.output.read_text(encoding="utf-8"))["accuracies"]
    for system in options.systems:
        each = [accuracies(system, seed) for seed in range(options.seeds)]
        results[system] = {figure: [row[figure] for row in each] for figure in each[0]}
        cells = [
            f"{figure} {fmean(values):.1f} ± {stdev(values) if options.seeds > 1 else 0:.1f}"
            for figure, values in results[system].items()
        ]
        print(f"{system:41}", "   ".join(cells), flush=True)
        if options.output:
            command = f"python examples/parts.py --seeds {options.seeds} --output {options.output.name}"
            text = json.dumps({"command": command, "accuracies": results}, indent=2)
            options.output.write_text(text, encoding="utf-8")
