"""Measure whether `DualModeTrainer` forgets less than plain LoRA, with the same stream, steps, loss and heads.

Plain LoRA is PEFT's adapter on the same layers of both towers, with at least as many trained parameters. The `Trainer`
of transformers continues to train it from task to task. Both sides use every learning rate with every seed. For each
head, the rate is chosen that has the best mean accuracy on held-out training images after the last task. Intervals
are computed as by `python -m research compare`: by Student's t, over seeds and test images.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from dulbe_peft import (
    BridgeEnsembleHead,
    DualModeLoraConfig,
    DualModeTrainer,
    Task,
    class_incremental_tasks,
    cross_modal_loss,
    load_clip,
)
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.readers import load_data
from research.benchmarks import common
from research.comparison.intervals import image_shares, mean_interval

HEADS, MEASURES = ("bridge", "text"), ("last", "average", "forgetting")
OURS, LORA, FROZEN = "DualModeTrainer", "plain LoRA", "nothing trained"
# In k, v, fc1 and fc2 of a block, A and B of rank 5 have 70 d parameters; the B of ranks 1 and 8 have 63 d.
VISION_RANK, TEXT_RANK = 5, 8
LAYERS = r"(vision_model|text_model)\..*\.(k_proj|v_proj|fc1|fc2)"


class Pixels(Dataset[dict[str, Any]]):
    """A data set of preprocessed images and labels, for the collator of transformers."""

    def __init__(self, images: LabelledImages, processor: Any) -> None:
        pictures = [images.image(index) for index in range(len(images))]
        self.pixels = processor.image_processor(images=pictures, return_tensors="pt")["pixel_values"]
        self.labels = torch.as_tensor(images.labels)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": self.pixels[index], "labels": self.labels[index]}


class LoraTrainer(Trainer):
    """The `Trainer` of transformers with the cross-modal loss over the current classes."""

    side: PlainLora
    names: Sequence[str]

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
        text = self.side.text_embeds(self.names)
        return cross_modal_loss(self.side.image_embeds(inputs["pixel_values"]), text, inputs["labels"], self.side.tau)


class PlainLora:
    """A model with one LoRA adapter for all tasks, or without an adapter, and the bridge ensemble on its features."""

    def __init__(self, clip: Any, processor: Any, args: TrainingArguments, trained: bool) -> None:
        text = {r"text_model.*": TEXT_RANK}
        config = LoraConfig(
            r=VISION_RANK,
            lora_alpha=VISION_RANK,
            target_modules=LAYERS,
            rank_pattern=text,
            alpha_pattern=dict.fromkeys(text, 1),
        )
        self.clip, self.processor, self.args, self.trained = clip, processor, args, trained
        self.model = get_peft_model(clip, config) if trained else clip.requires_grad_(False)
        self.tau = float(clip.logit_scale.exp())
        self.head = BridgeEnsembleHead(clip.config.projection_dim, logit_scale=self.tau)

    def image_embeds(self, pixels: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.clip.get_image_features(pixel_values=pixels).pooler_output, dim=-1)

    def text_embeds(self, names: Sequence[str]) -> torch.Tensor:
        prompts = [f"a photo of a {name}." for name in names]
        tokens = self.processor.tokenizer(prompts, padding=True, return_tensors="pt")
        return F.normalize(self.clip.get_text_features(**tokens).pooler_output, dim=-1)

    @torch.no_grad()
    def features(self, data: Pixels) -> torch.Tensor:
        self.model.eval()
        return torch.cat([self.image_embeds(pixels) for pixels in data.pixels.split(64)])

    def learn(self, train: LabelledImages) -> None:
        data = Pixels(train, self.processor)
        if self.trained:
            trainer = LoraTrainer(self.model, self.args, train_dataset=data)
            trainer.side, trainer.names = self, train.class_names
            trainer.loss_is_scaled_for_ga = trainer.model_accepts_loss_kwargs = False
            trainer.train()
        with torch.no_grad():
            texts = self.text_embeds([*self.head.class_names, *train.class_names])
        self.head.add_classes(list(train.class_names), self.features(data), data.labels, texts)


class Ours:
    """The training loop of `docs/by-hand.md`."""

    def __init__(self, clip: Any, processor: Any, args: TrainingArguments, support_rank: int) -> None:
        self.model = get_peft_model(clip, DualModeLoraConfig(support_rank=support_rank))
        self.trainer = DualModeTrainer(self.model, args, processing_class=processor)

    @property
    def head(self) -> BridgeEnsembleHead:
        return self.trainer.head

    def learn(self, train: LabelledImages) -> None:
        self.trainer.train_dataset = train
        self.trainer.train()

    def features(self, data: Pixels) -> torch.Tensor:
        return self.trainer.learner.image_embeds(list(data.pixels))


@torch.no_grad()
def right(head: BridgeEnsembleHead, features: torch.Tensor, truth: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return head -> whether each image is classified correctly."""
    scores = {"bridge": head(features), "text": features @ head.text_embeds.T}
    return {name: values.argmax(dim=1) == truth for name, values in scores.items()}


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=3, model=None)
    options.add_argument("--clip", default="demo", help="a model, as for `dulbe-peft run --model`")
    options.add_argument("--data", default="demo-digits", help="a data set, as for `dulbe-peft run --data`")
    options.add_argument("--increment", type=int, default=2, help="classes per task")
    options.add_argument("--images", type=int, default=40, help="training images per class")
    options.add_argument("--held-back", type=int, default=10, help="held-out training images per class")
    options.add_argument("--tests", type=int, default=20, help="test images per class")
    options.add_argument("--epochs", type=int, default=3)
    options.add_argument("--support-rank", type=int, default=32)
    options.add_argument("--cells", help="folder of finished runs, with which a stopped benchmark continues")
    options.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3])
    values = common.parse(options, argv)
    if values.quick:
        values.images, values.held_back, values.tests, values.epochs = 8, 2, 2, 1
    results: dict[tuple[str, float], list[Any]] = {}
    names: list[Sequence[str]] = []
    sizes = {}
    folder, here = tempfile.mkdtemp(), origin(values)
    for seed in range(values.repeats):
        tasks, held_back = stream(values, seed)
        names.append([name for task in tasks for name in task.class_names])
        for side in (OURS, LORA, FROZEN):
            for rate in [0.0] if side == FROZEN else values.rates[:1] if values.quick else values.rates:
                cell = Path(values.cells or folder) / f"{side}-{rate:g}-{seed}.pt"
                if not cell.is_file():
                    torch.save((here, learn(values, side, rate, seed, tasks, held_back)), cell)
                before, done = torch.load(cell, weights_only=False)
                if before != here:
                    raise ValueError(f"{cell} is of another run, {before}, now it is {here}: use other --cells")
                answers, kept, sizes[side] = done
                results.setdefault((side, rate), []).append((answers, kept))
                last = {head: round(float(answers[head][-1].right.double().mean()), 4) for head in HEADS}
                print(f"{side}, rate {rate:g}, seed {seed}: {last}", flush=True)
    rows = [common.value_row(f"trained numbers, {side}", size, "parameters") for side, size in sizes.items()]
    for head in HEADS:
        rows += compared(head, results, names)
    common.write("loop", values, argv, rows)


def origin(values: Any) -> dict[str, Any]:
    """Return what a finished run depends on besides its method, rate and seed."""
    names = ("increment", "images", "held_back", "tests", "epochs", "support_rank", "quick")
    data = (load_data(values.data, split) for split in ("train", "test"))
    return {"origin": common.origin_of(values.clip, *data)} | {name: getattr(values, name) for name in names}


def stream(values: Any, seed: int) -> tuple[list[Task], list[LabelledImages]]:
    """Return the tasks, with class order and training images drawn by the seed, and held-out images of each task."""
    train, test = (load_data(values.data, split) for split in ("train", "test"))
    generator = np.random.default_rng(seed)
    training, held_out = parts(train, (values.images, values.held_back), generator)
    (tests,) = parts(test, (values.tests,), np.random.default_rng(0))  # the same for all seeds
    tasks = class_incremental_tasks(training, tests, increment=values.increment, seed=seed)
    tasks = tasks[:2] if values.quick else tasks
    return tasks, [held_out.select(task.class_names) for task in tasks]


def parts(images: LabelledImages, counts: Sequence[int], generator: np.random.Generator) -> list[LabelledImages]:
    """Draw disjoint parts of `images`, with `counts` random images per class."""
    chosen: list[list[int]] = [[] for _ in counts]
    for label in range(len(images.class_names)):
        rows = generator.permutation(np.flatnonzero(images.labels == label))
        for part, start, count in zip(chosen, np.cumsum([0, *counts]), counts):
            part += rows[start : start + count].tolist()
    return [images.at(np.array(rows)) for rows in chosen]


def learn(
    values: Any, side: str, rate: float, seed: int, tasks: Sequence[Task], held_back: Sequence[LabelledImages]
) -> tuple[dict[str, list[Any]], dict[str, float], int]:
    """Learn a stream; return head -> answers after each task, head -> held-out accuracy, and trained parameters."""
    clip, processor = load_clip(values.clip)
    torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            num_train_epochs=values.epochs,
            per_device_train_batch_size=32,
            learning_rate=rate,
            lr_scheduler_type="cosine",
            max_grad_norm=0.0,
            optim="adamw_torch",
            save_strategy="no",
            remove_unused_columns=False,
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            seed=seed,
        )
        if side == OURS:
            learner: Any = Ours(clip, processor, args, values.support_rank)
        else:
            learner = PlainLora(clip, processor, args, trained=side == LORA)
        size = sum(p.numel() for p in learner.model.parameters() if p.requires_grad)
        tests = [Pixels(task.test, processor) for task in tasks]
        answers: dict[str, list[Any]] = {head: [] for head in HEADS}
        for number, task in enumerate(tasks, start=1):
            learner.learn(task.train)
            of_task = torch.cat([torch.full((len(data),), place + 1) for place, data in enumerate(tests[:number])])
            truth = truths(tasks, tests[:number])
            correct = right(learner.head, torch.cat([learner.features(data) for data in tests[:number]]), truth)
            for head, by_image in correct.items():
                answers[head].append(SimpleNamespace(right=by_image, truth=truth, task=of_task))
        held_out = [Pixels(images, processor) for images in held_back]
        features = torch.cat([learner.features(data) for data in held_out])
        correct = right(learner.head, features, truths(tasks, held_out))
    return answers, {head: float(by_image.double().mean()) for head, by_image in correct.items()}, size


def truths(tasks: Sequence[Task], parts: Sequence[Pixels]) -> torch.Tensor:
    """Return the label of each image as an index of all classes seen."""
    starts = np.cumsum([0, *(len(task.class_names) for task in tasks)]).tolist()
    return torch.cat([data.labels + start for start, data in zip(starts, parts)])


def compared(head: str, results: dict[tuple[str, float], list[Any]], names: Sequence[Sequence[str]]) -> list[Any]:
    """Return the rows of a head: each side with each rate, and the differences with the chosen rates, in points."""
    rows, shares, best = [], {}, {}
    for (side, rate), seeds in results.items():
        shares[side, rate] = [image_shares(seed[0][head], classes) for seed, classes in zip(seeds, names)]
        kept = statistics.fmean(seed[1][head] for seed in seeds)
        if side not in best or kept > best[side][0]:
            best[side] = kept, rate
        for measure in MEASURES:
            each = [100 * float(seed[measure].mean()) for seed in shares[side, rate]]
            row = common.value_row(
                f"{side}, {head}, rate {rate:g}: {measure}", common.rounded(sum(each) / len(each)), "%"
            )
            rows.append(row | {"side": side, "head": head, "rate": rate, "figure": measure, "each": each})
    for row in rows:
        row["chosen"] = row["rate"] == best[row["side"]][1]
    for other, measure in product((LORA, FROZEN), MEASURES):
        sides = [np.stack([seed[measure] for seed in shares[side, best[side][1]]]) for side in (OURS, other)]
        gain = mean_interval(100 * (sides[0] - sides[1]))
        row = common.value_row(f"{OURS} - {other}, {head}: {measure}", common.rounded(gain.mean), "points")
        rows.append(row | {"other": other, "head": head, "figure": measure, "low": gain.low, "high": gain.high})
    return rows


if __name__ == "__main__":
    main()
