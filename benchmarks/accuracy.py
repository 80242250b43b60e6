"""What the options that are approximations do to accuracy: the demo's stream of digits with each, and with none."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from peft import get_peft_model

from benchmarks import common
from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments, load_clip
from dulbe_peft.demo import demo_model_folder, digit_tasks

OPTIONS: dict[str, dict[str, Any]] = {
    "exact": {},
    "bf16 autocast": {"mixed_precision": "bf16"},
    "statistics as sketches": {"statistics": "sketch"},
}


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=3, model=None)
    values = common.parse(options, argv)
    last: dict[str, list[float]] = {name: [] for name in OPTIONS}
    mean: dict[str, list[float]] = {name: [] for name in OPTIONS}
    for seed in range(values.repeats):
        for name, fields in OPTIONS.items():
            with tempfile.TemporaryDirectory() as folder:
                learner = make_learner(seed, 1 if values.quick else 4, fields)
                results = learner.run(digit_tasks()[: 1 if values.quick else None], folder)
            last[name].append(100 * results["head"]["last_accuracy"])
            mean[name].append(100 * results["head"]["average_accuracy"])
    seeds = f"{values.repeats} seed{'s' if values.repeats > 1 else ''}"
    rows = []
    for name in OPTIONS:
        for title, figures in (("A_last", last[name]), ("A_bar", mean[name])):
            value = common.rounded(sum(figures) / len(figures))
            spread = f"%, {min(figures):.1f} to {max(figures):.1f}"
            rows.append(common.value_row(f"{title}, digits, mean of {seeds}, {name}", value, spread))
    common.write("accuracy", values, argv, rows)


def make_learner(seed: int, epochs: int, fields: dict[str, Any]) -> ClassIncrementalLearner:
    """A learner as the demo has it, with some other settings."""
    torch.manual_seed(seed)
    clip, processor = load_clip(demo_model_folder())
    model = get_peft_model(clip, DualModeLoraConfig(support_rank=16))
    prompt = "a photo of the digit {}."
    args = LearnerArguments(epochs=epochs, prompt_template=prompt, seed=seed, device="cpu", progress=False, **fields)
    return ClassIncrementalLearner(model, processor, args=args)


if __name__ == "__main__":
    main()
