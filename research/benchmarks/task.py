"""Compare a whole task, from probe to close, of the learner, stock LoRA and the literal implementation.

Each task has the same images under new class names, and includes the text tower. The first task is not counted, so
that all measured tasks have a history, old classes and a structure loss.

The floor of a phase is the time of its unavoidable multiply-adds at the speed of a forward pass: one forward pass per
pass over the images, the same again for each backward pass through activations, the gradients of weights if they are
needed, and one triangle of X'X. Adam, adapters, losses and classifiers are not counted.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from peft import get_peft_model
from torch.utils.flop_counter import FlopCounterMode

from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments
from dulbe_peft.photos.cost import shared_inputs
from research.benchmarks import common, models, stock
from research.benchmarks.literal import LiteralLearner

PHASES = ("probe", "allocate", "train", "close")


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=3)
    options.add_argument("--num-images", type=int, default=64, help="images per task")
    options.add_argument("--classes", type=int, default=10, help="classes per task")
    options.add_argument("--batch", type=int, default=16, help="images per batch, in training and elsewhere")
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--attention", default="sdpa")
    options.add_argument("--no-literal", action="store_true", help="skip the literal implementation")
    options.add_argument("--images", help="data set of the images; default: noise")
    options.add_argument(
        "--operations", action="store_true", help="print the CPU time of each operation in a task instead"
    )
    values = common.parse(options, argv)
    if values.quick:
        values.num_images, values.classes, values.batch = 4, 2, 4
        values.epochs = 1
    tasks = Tasks(values)
    if values.operations:
        tasks.ours()
        with torch.profiler.profile() as profile:
            tasks.ours()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=25))
        return
    sides = {"ours": tasks.ours, "stock": tasks.stock, "pass": tasks.forward}
    times = common.compare(sides if values.no_literal else sides | {"literal": tasks.literal}, values.repeats)
    where = f"{common.model_name(values.model)}, {values.attention}, {values.num_images} images, batch {values.batch}"
    rows = [common.row(f"whole task / stock LoRA's, {where}", times, "ours", "stock"), *tasks.floor_rows(times, where)]
    if not values.no_literal:
        rows.append(common.row(f"whole task / literal, {where}", times, "ours", "literal", 0.70))
        rows += [tasks.phase_row([phase], where) for phase in PHASES]
        rows.append(tasks.phase_row([phase for phase in PHASES if phase != "allocate"], where))
    common.write("task", values, argv, rows)


class Tasks:
    """The learners of all sides, with the CPU seconds of each phase in each task."""

    def __init__(self, values: Any) -> None:
        self.values = values
        clip, processor = models.clip(values.model, values.attention)
        self.pixels = models.pixels(values.num_images, clip.config.vision_config.image_size, values.images)
        self.labels = torch.arange(values.num_images) % values.classes
        arguments = LearnerArguments(
            epochs=values.epochs, batch_size=values.batch, eval_batch_size=values.batch, device="cpu", progress=False
        )
        model = get_peft_model(clip, DualModeLoraConfig())
        self.learner = ClassIncrementalLearner(model, processor, args=arguments)
        settings = (values.batch, values.epochs)
        self.simple = LiteralLearner(*models.clip(values.model, values.attention), *settings)
        self.lora = stock.LoraLearner(*models.clip(values.model, values.attention), *settings)
        for profile in (self.learner.profile, self.simple.profile, self.lora.profile):
            profile.clock = time.process_time
        self.seconds: dict[str, list[dict[str, float]]] = {"ours": [], "literal": [], "stock": []}

    def names(self, side: str) -> list[str]:
        first = len(self.seconds[side]) * self.values.classes
        return [f"class {number}" for number in range(first, first + self.values.classes)]

    def ours(self) -> None:
        data = list(zip(self.pixels, self.labels.tolist(), strict=True))
        self.learner.learn_task(data, self.names("ours"))
        self.seconds["ours"].append(dict(self.learner.profile.seconds))

    def literal(self) -> None:
        self.other("literal", self.simple)

    def stock(self) -> None:
        self.other("stock", self.lora)

    def other(self, side: str, learner: LiteralLearner) -> None:
        learner.profile.clear()
        learner.learn_task(self.pixels, self.labels, self.names(side))
        self.seconds[side].append(dict(learner.profile.seconds))

    def forward(self) -> None:
        """Encode all images with the model without its adapter."""
        model = self.learner.model.get_base_model()
        with torch.no_grad(), self.learner.model.disable_adapter():
            for batch in self.pixels.split(self.values.batch):
                model.get_image_features(pixel_values=batch)

    def products_of_an_image(self) -> int:
        """Return the multiply-adds of encoding one image without the adapter."""
        with torch.no_grad(), FlopCounterMode(display=False) as counter, self.learner.model.disable_adapter():
            self.learner.model.get_base_model().get_image_features(pixel_values=self.pixels[:1])
        return counter.get_total_flops() // 2

    def floors(self, task: int) -> dict[tuple[str, str], float]:
        """Return (side, phase) -> unavoidable multiply-adds in a task; the first task has the number 0."""
        values, model = self.values, self.learner.model
        vision = model.get_base_model().config.vision_config
        tokens = (vision.image_size // vision.patch_size) ** 2 + 1
        passes = values.num_images * self.products_of_an_image()
        steps = values.epochs * math.ceil(values.num_images / values.batch)
        counter = FlopCounterMode(display=False)
        with counter, torch.no_grad():
            self.learner.text_embeds([f"class {number}" for number in range(values.classes)])
        text = counter.get_total_flops() / 2
        layers = model.dual_mode_layers().values()
        weights = values.num_images * tokens * sum(layer.in_features * layer.out_features for layer in layers)
        squares = values.num_images * tokens * sum(width**2 / 2 for width in shared_inputs(model).values())
        steps, every = steps * 2 * text, (task + 1) * text
        return {
            ("ours", "probe"): 2 * passes + weights + text,
            ("ours", "train"): values.epochs * 3 * passes + steps,
            ("ours", "close"): passes + squares + every,
            ("stock", "train"): values.epochs * 2 * passes + steps,
            ("stock", "close"): passes + every,
        }

    def floor_rows(self, times: common.Times, where: str) -> list[dict[str, Any]]:
        """Return the floors, in forward passes of all images, and the ratio of each phase to its floor."""
        forward = self.products_of_an_image() * self.values.num_images
        speed = forward / statistics.median(times["pass"]["cpu"])
        floors = self.floors(len(self.seconds["ours"]) // 2)
        rows = []
        for side in ("ours", "stock"):
            whole = sum(floor for (owner, _), floor in floors.items() if owner == side) / forward
            rows.append(common.value_row(f"floor of a task, {side}, {where}", common.rounded(whole), "forward passes"))
        for (side, phase), floor in floors.items():
            seconds = statistics.median(task[phase] for task in self.seconds[side][1:])
            what = f"{phase} of {side} / its floor, {where}"
            rows.append(common.value_row(what, common.rounded(seconds * speed / floor), "times"))
        return rows

    def phase_row(self, phases: Sequence[str], where: str) -> dict[str, Any]:
        """Return the ratio of the CPU time of some phases."""
        times = {
            side: [sum(task[p] for p in phases) for task in self.seconds[side][1:]] for side in ("ours", "literal")
        }
        pairs = zip(times["ours"], times["literal"], strict=True)
        seconds = {side: common.rounded(statistics.median(time)) for side, time in times.items()}
        ratio = {"cpu": common.spread([a / b for a, b in pairs]), "seconds": seconds}
        return {"what": f"of it {', '.join(phases)}, {where}", "goal": None, "ratio": ratio}


if __name__ == "__main__":
    main()
