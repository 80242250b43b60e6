"""Compare a training step of a late task, with more old classes and a longer history, with one of an early task."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial

import torch

from research.benchmarks import common, models, ours, stock


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=15)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--attention", default="sdpa")
    options.add_argument("--early", type=int, default=2, help="number of the early task")
    options.add_argument("--late", type=int, default=10, help="number of the late task")
    options.add_argument("--classes", type=int, default=10, help="classes per task")
    values = common.parse(options, argv)
    tower = models.vision_tower(values.model, values.attention)
    dim = tower.config.projection_dim
    batch = (models.pixels(values.batch, tower.config.image_size), torch.arange(values.batch) % values.classes)
    text = models.unit(values.classes, dim, seed=2)
    sides = {}
    for name, task in (("late", values.late), ("early", values.early)):
        model = ours.adapted(copy.deepcopy(tower), tasks=task - 1)
        old_text = models.unit(values.classes * (task - 1), dim, seed=3)
        teacher = ours.teacher_embeds(model, batch[0])
        sides[name] = partial(ours.step, model, stock.adam(model), batch, text, old_text, teacher)
    times = common.compare(sides, values.repeats)
    where = f"{common.model_name(values.model)}, {values.attention}, batch {values.batch}"
    what = f"step at task {values.late} / step at task {values.early}, {where}"
    common.write("growth", values, argv, [common.row(what, times, "late", "early", 1.05)])


if __name__ == "__main__":
    main()
