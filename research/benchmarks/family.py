"""Measure the cost of every strategy relative to stock LoRA, and of every classifier when a task closes.

All sides learn the same task: the same images, classes, batch size and epochs, and a text tower with LoRA of rank 8.
The first task is not counted, so that all measured tasks have a history. Stock is PEFT's LoRA. It continues training
from task to task and does nothing before or after its steps. The paper's overhead tables are computed from shapes.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch.nn import functional as F
from transformers import CLIPModel

from dulbe_peft import CLASSIFIERS, STRATEGIES, ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments
from dulbe_peft.classifiers.registry import make_classifier
from dulbe_peft.encoders.loading import unit_image_embeds, unit_text_embeds
from dulbe_peft.photos.cost import statistics_bytes, trainable_parameters
from dulbe_peft.strategies.registry import make_strategy
from research.benchmarks import common, models, stock
from research.comparison.cells import memory_bytes

REFERRING = {"zscl": "zscl:reference_images=demo-digits"}
VARIANTS = ["loda:towers=2"]  # measured beside the strategies' defaults


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=5, model="small")
    options.add_argument("--num-images", type=int, default=64, help="images per task")
    options.add_argument("--classes", type=int, default=8, help="classes per task")
    options.add_argument("--batch", type=int, default=16, help="images per batch, in training and elsewhere")
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--strategies", nargs="+", default=sorted([*STRATEGIES, *VARIANTS]))
    options.add_argument("--classifiers", nargs="+", default=sorted(CLASSIFIERS))
    values = common.parse(options, argv)
    if values.quick:
        values.num_images, values.classes, values.batch = 8, 2, 4
    rows = strategy_rows(values) + classifier_rows(values) + overhead_rows()
    common.write("family", values, argv, rows)


# ---------------------------------------------------------------------- strategies


def strategy_rows(values: Any) -> list[dict[str, Any]]:
    """Measure the memory of every strategy, and the time of a task and of its steps relative to stock LoRA."""
    learners = {name: Learner(name, values) for name in values.strategies}
    sides = {name: learner.task for name, learner in learners.items()}
    times = common.compare(sides | {"stock": Stock(values).task}, values.repeats)
    where = f"{common.model_name(values.model)}, {values.num_images} images, batch {values.batch}"
    rows = []
    for name, learner in learners.items():
        rows.append(common.row(f"{name}: task / stock LoRA task, {where}", times, name, "stock"))
        if learner.steps:
            pairs = [a / b for a, b in zip(learner.steps[1:], times["stock"]["wall"], strict=True)]
            seconds = {name: common.rounded(statistics.median(learner.steps[1:]))}
            ratio = {"wall": common.spread(pairs), "seconds": seconds}
            rows.append(
                {"what": f"{name}: its training steps / stock LoRA task, {where}", "goal": None, "ratio": ratio}
            )
        kept = common.rounded(learner.kept() / 2**20)
        rows.append(common.value_row(f"{name}: kept after {values.repeats + 1} tasks", kept, "MiB"))
    return rows


def problem(values: Any) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
    """Return the model, its processor, the images of a task and their labels."""
    clip, processor = models.clip(values.model, "eager")
    pixels = models.pixels(values.num_images, clip.config.vision_config.image_size)
    return clip, processor, pixels, torch.arange(values.num_images) % values.classes


class Learner:
    """A learner of one strategy, which learns the same images in each task under new class names."""

    def __init__(self, strategy: str, values: Any) -> None:
        clip, processor, self.pixels, self.labels = problem(values)
        self.classes, self.steps = values.classes, []  # type: ignore[var-annotated]
        args = LearnerArguments(
            epochs=values.epochs, batch_size=values.batch, eval_batch_size=values.batch, device="cpu", progress=False
        )
        kind = make_strategy(REFERRING.get(strategy, strategy))
        model = clip
        if kind.adapts:
            targets = sorted(kind.target_modules) if kind.target_modules else None
            model = get_peft_model(clip, DualModeLoraConfig(support_rank=32, target_modules=targets))
        classifiers = "prototype" if kind.classifiers == ("bridge",) else kind.classifiers[:1]
        self.learner = ClassIncrementalLearner(model, processor, args=args, strategy=kind, classifiers=classifiers)

    def task(self) -> None:
        first = len(self.learner.class_names)
        names = [f"class {number}" for number in range(first, first + self.classes)]
        self.learner.learn_task(list(zip(self.pixels, self.labels.tolist(), strict=True)), names)
        if "train" in self.learner.profile.seconds:
            self.steps.append(self.learner.profile.seconds["train"])

    def kept(self) -> int:
        """Return the bytes of the adapter and of the strategy's memory."""
        state = self.learner.state
        total = 0
        if state.adapter is not None:
            adapter = get_peft_model_state_dict(state.model, save_embedding_layers=False)
            total += sum(tensor.nbytes for tensor in adapter.values())
        return total + memory_bytes(state.memory)


class Stock:
    """PEFT's LoRA on the same layers of both towers, trained with cross-entropy and Adam and nothing else."""

    def __init__(self, values: Any) -> None:
        clip, self.processor, self.pixels, self.labels = problem(values)
        targets = ["k_proj", "v_proj", "fc1", "fc2"]
        pattern = r"text_model\..*"
        config = LoraConfig(r=9, lora_alpha=9, target_modules=targets, rank_pattern={pattern: 8})
        self.model = get_peft_model(clip, config).train()
        self.values = values
        self.tau = math.exp(float(clip.logit_scale))
        prompts = [f"a photo of a class {number}." for number in range(values.classes)]
        self.tokens = self.processor.tokenizer(prompts, padding=True, return_tensors="pt")

    def task(self) -> None:
        optimizer = stock.adam(self.model)
        ids = {"input_ids": self.tokens["input_ids"]}
        for _ in range(self.values.epochs):
            for rows in torch.randperm(len(self.pixels)).split(self.values.batch):
                text = unit_text_embeds(self.model, ids)
                images = unit_image_embeds(self.model, self.pixels[rows])
                F.cross_entropy(self.tau * images @ text.T, self.labels[rows]).backward()
                optimizer.step()
                optimizer.zero_grad()


# ---------------------------------------------------------------------- classifiers


def classifier_rows(values: Any) -> list[dict[str, Any]]:
    """Measure the memory of every classifier, and the time to close the tenth task relative to the bridge ensemble."""
    tasks, classes, each, dim = (2, 2, 4, 16) if values.quick else (10, 10, 50, 512)
    features = [models.unit(classes * each, dim, seed=task) for task in range(tasks)]
    text = models.unit(tasks * classes, dim, seed=100)
    labels = torch.arange(classes * each) % classes

    def closing(name: str) -> tuple[Callable[[], object], Any]:
        classifier = make_classifier(name, dim)
        for task in range(tasks - 1):
            names = [f"class {task * classes + number}" for number in range(classes)]
            classifier.add_classes(names, features[task], labels, text[: (task + 1) * classes])
        last = [f"class {(tasks - 1) * classes + number}" for number in range(classes)]

        def close() -> object:
            twin = classifier.fork()
            twin.add_classes(last, features[-1], labels, text)
            return twin(features[-1][:1])

        done = copy.copy(classifier.fork())
        done.add_classes(last, features[-1], labels, text)
        return close, done

    rows = []
    where = f"{classes} classes more than {(tasks - 1) * classes}, {classes * each} images, d = {dim}"
    bridge, _ = closing("bridge")
    for name in values.classifiers:
        close, done = closing(name)
        times = common.compare({"ours": close, "bridge": bridge}, values.repeats)
        rows.append(common.row(f"{name}: close a task / bridge ensemble, {where}", times, "ours", "bridge"))
        kept = common.rounded(done.nbytes / 2**20)
        rows.append(common.value_row(f"{name}: kept of {tasks * classes} classes, d = {dim}", kept, "MiB"))
    return rows


# ---------------------------------------------------------------------- the paper's overhead tables

STORED = {  # which layers the paper's variants adapt
    "keys, values and MLP": {},
    "variant A": {"target_modules": ["k_proj", "v_proj"]},
    "variant B": {"target_modules": ["k_proj", "v_proj"], "layers_to_transform": [8, 9, 10, 11]},
    "variant C": {"target_modules": ["visual_projection"]},
}


def overhead_rows(classes: int = 100) -> list[dict[str, Any]]:
    """Count, from shapes, the parameters that DuLBE trains on CLIP's ViT-B/16 and the memory that it keeps."""
    dulbe, counts = make_strategy("dulbe"), {}
    for name, settings in STORED.items():
        with torch.device("meta"):
            clip = CLIPModel._from_config(models.config("vit-b-16"), attn_implementation="eager")
        model = get_peft_model(clip, DualModeLoraConfig(**settings))  # type: ignore[arg-type]
        counts[name] = trainable_parameters(model, dulbe), statistics_bytes(model) / 2**20
    trained, _ = counts["keys, values and MLP"]
    where, shared, both = "ViT-B/16", trained["shared"], trained["shared"] + trained["residual"]
    rows = [
        common.value_row(f"trained in the vision tower, r = 1, {where}", shared, "parameters"),
        common.value_row(f"trained in the vision tower, r = 1 + 8, {where}", both, "parameters"),
        common.value_row(f"trained in all, r = 1, {where}", shared + trained["other"], "parameters"),
        common.value_row(f"trained in all, r = 1 + 8, {where}", trained["total"], "parameters"),
    ]
    for name, (_, size) in counts.items():
        rows.append(common.value_row(f"occupation statistics, {name}, {where}", size, "MiB"))
    for name in ("bridge", "rapf"):
        classifier = make_classifier(name, 512)
        kept = (classifier.state.nbytes(classes) - 4 * classes * 512) / 2**20
        rows.append(common.value_row(f"{name}: kept of {classes} classes beside their texts", kept, "MiB"))
    return rows


if __name__ == "__main__":
    main()
