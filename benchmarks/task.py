"""A whole task, probe to close, with the learner and the literal way; text tower and image loading included.

Task after task on the same images under new class names: the first is not counted, all others have a history, old
classes and a structure loss.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from peft import get_peft_model

from benchmarks import common, models
from benchmarks.literal import LiteralLearner
from dulbe_peft import ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments

PHASES = ("probe", "allocate", "train", "close")


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=3)
    options.add_argument("--num-images", type=int, default=64, help="images of a task")
    options.add_argument("--classes", type=int, default=10, help="classes of a task")
    options.add_argument("--batch", type=int, default=16, help="images per step, and per batch elsewhere")
    options.add_argument("--epochs", type=int, default=2)
    options.add_argument("--attention", default="sdpa")
    options.add_argument("--images", help="a data set to take the images from; default: noise")
    values = common.parse(options, argv)
    if values.quick:
        values.num_images, values.classes, values.batch = 8, 2, 4
    tasks = Tasks(values)
    times = common.compare({"ours": tasks.ours, "literal": tasks.literal}, values.repeats)
    where = f"{common.model_name(values.model)}, {values.attention}, {values.num_images} images, batch {values.batch}"
    rows = [common.row(f"whole task / literal, {where}", times, "ours", "literal", 0.70)]
    rows += [tasks.phase_row([phase], where) for phase in PHASES]
    rows.append(tasks.phase_row([phase for phase in PHASES if phase != "allocate"], where))
    common.write("task", values, argv, rows)


class Tasks:
    """Both learners, each with a task counter and the seconds of its phases."""

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
        self.simple = LiteralLearner(*models.clip(values.model, values.attention), values.batch, values.epochs)
        self.seconds: dict[str, list[dict[str, float]]] = {"ours": [], "literal": []}

    def names(self, side: str) -> list[str]:
        first = len(self.seconds[side]) * self.values.classes
        return [f"class {number}" for number in range(first, first + self.values.classes)]

    def ours(self) -> None:
        data = list(zip(self.pixels, self.labels.tolist(), strict=True))
        self.learner.learn_task(data, self.names("ours"))
        self.seconds["ours"].append(dict(self.learner.profile.seconds))

    def literal(self) -> None:
        self.simple.profile.clear()
        self.simple.learn_task(self.pixels, self.labels, self.names("literal"))
        self.seconds["literal"].append(dict(self.simple.profile.seconds))

    def phase_row(self, phases: Sequence[str], where: str) -> dict[str, Any]:
        """The ratio of some phases alone, by wall clock."""
        times = {
            side: {"wall": [sum(task[p] for p in phases) for task in tasks[1:]]}
            for side, tasks in self.seconds.items()
        }
        pairs = zip(times["ours"]["wall"], times["literal"]["wall"], strict=True)
        seconds = {side: common.rounded(statistics.median(time["wall"])) for side, time in times.items()}
        ratio = {"wall": common.spread([a / b for a, b in pairs]), "seconds": seconds}
        return {"what": f"of it {', '.join(phases)}, {where}", "goal": None, "ratio": ratio}


if __name__ == "__main__":
    main()
