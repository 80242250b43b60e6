"""Leave out one part of DuLBE at a time: what do the names of the classes lose?

Four tasks teach two handwritten digits each, and two digits are never learned. An image is right if the nearest of
all ten names is its own. The settings are the paper's, with 40 images of each digit and five epochs.

    python examples/parts.py                                  # one seed, in about a minute
    python examples/parts.py --seeds 5 --output parts.json    # five seeds: order of the digits, images and weights
"""

import argparse
import json
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
)
from dulbe_peft.data.digits import load_digit_images

SYSTEMS = {  # name: strategy, and changes of the adapter's settings
    "nothing trained": ("frozen", {}),
    "LoRA": ("lora", {}),
    "DuLBE": ("dulbe", {}),
    "without the shared mode": ("dulbe", {"shared_rank": 0}),
    "without the residual modes": ("dulbe", {"residual_rank": 0}),
    "without the structure loss": ("dulbe", {"structure_weight": 0}),
    "without routing": ("dulbe:routing=both", {}),
}


def accuracies(system: str, seed: int) -> dict[str, float]:
    """Return the accuracy of the names in percent, on learned digits and on those never learned."""
    strategy, changes = SYSTEMS[system]
    train, test = load_digit_images("train"), load_digit_images("test")
    draw = np.random.default_rng(seed)
    rows = [draw.permutation(np.flatnonzero(train.labels == label))[:40] for label in range(10)]
    tasks = class_incremental_tasks(train.at(np.concatenate(rows)), test, increment=2, seed=seed)
    torch.manual_seed(seed)
    clip, processor = load_clip("demo")
    model = clip if strategy == "frozen" else get_peft_model(clip, DualModeLoraConfig(support_rank=16, **changes))
    args = LearnerArguments(
        epochs=5, learning_rate=1e-3, prompt_template="a photo of the digit {}.", seed=seed, progress=False
    )
    learner = ClassIncrementalLearner(model, processor, args, strategy=strategy, classifiers="text")
    for task in tasks[:4]:
        learner.learn_task(task.train)
    texts = learner.text_embeds([name for task in tasks for name in task.class_names])
    right = []
    for number, task in enumerate(tasks):
        answers = (learner.image_embeds(task.test) @ texts.T).argmax(dim=1)
        right.append((answers == torch.as_tensor(task.test.labels) + 2 * number).double())
    return {
        "learned": 100 * torch.cat(right[:4]).mean().item(),
        "never learned": 100 * right[4].mean().item(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--systems", nargs="+", default=list(SYSTEMS), choices=SYSTEMS, metavar="NAME")
    parser.add_argument("--output", help="a JSON file for the accuracies with each seed")
    options = parser.parse_args()
    results = {}
    for system in options.systems:
        each = [accuracies(system, seed) for seed in range(options.seeds)]
        results[system] = {figure: [row[figure] for row in each] for figure in each[0]}
        cells = [
            f"{figure} {fmean(values):.1f} ± {stdev(values) if options.seeds > 1 else 0:.1f}"
            for figure, values in results[system].items()
        ]
        print(f"{system:27}", "   ".join(cells), flush=True)
    if options.output:
        command = f"python examples/parts.py --seeds {options.seeds} --output {options.output}"
        with open(options.output, "w", encoding="utf-8") as file:
            json.dump({"command": command, "accuracies": results}, file, indent=2)
