"""Sketched statistics beside exact ones, over several tasks: what they take, what they keep, and what a cut costs.

Energy is tr(U' S U) of a support U, with the exact S of all tasks: the share of what the exact support covers that the
sketch's support covers too.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from peft import get_peft_model

from benchmarks import common, models
from dulbe_peft import DualModeLoraConfig, OccupationStatistics, collect_statistics
from dulbe_peft.subspaces.allocation import historical_support
from dulbe_peft.subspaces.decompositions import eigh


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=1)
    options.add_argument("--tasks", type=int, default=2, help="the images are split into so many tasks")
    options.add_argument("--num-images", type=int, default=32, help="images of all tasks")
    options.add_argument("--batch", type=int, default=16, help="images per batch")
    options.add_argument("--images", help="a data set to take the images from; default: noise")
    options.add_argument("--support-rank", type=int, default=128)
    values = common.parse(options, argv)
    if values.quick:
        values.num_images, values.batch, values.support_rank = 8, 4, 8
    tower = models.vision_tower(values.model, "sdpa")
    pixels = models.pixels(values.num_images, tower.config.image_size, values.images)
    model = get_peft_model(tower, DualModeLoraConfig(text_rank=0))
    exact, sketch = OccupationStatistics(), OccupationStatistics(2 * values.support_rank)
    seconds = []
    for part in pixels.chunk(values.tasks):
        batches, task = part.split(values.batch), OccupationStatistics()
        collect_statistics(model, batches, lambda _, batch: models.encode(model, batch), into=task)
        exact.merge(task)
        started = time.process_time()
        sketch.merge(task)
        seconds.append(time.process_time() - started)
    found = energies(exact, sketch, values.support_rank)
    if not found:
        options.error(f"no layer reads more than 2 * {values.support_rank} features: lower --support-rank")
    images = "photographs" if values.images else "noise"
    name = common.model_name(values.model)
    where = f"{name}, {values.tasks} tasks, {values.num_images} images of {images}, K_h = {values.support_rank}"
    goals = ("≤ 64.00", "≥ 99.00") if values.model == "vit-b-16" else (None, None)
    cut = common.rounded(sum(seconds) / len(seconds))
    rows = [
        common.value_row(f"sketches, {where}", sketch.nbytes / 2**20, f"of {exact.nbytes / 2**20:.2f} MiB", goals[0]),
        common.value_row(f"energy of sketched supports, least of {len(found)}, {where}", min(found), "%", goals[1]),
        common.value_row(f"energy of sketched supports, mean, {where}", sum(found) / len(found), "%"),
        common.value_row(f"cut of {len(found)} matrices after a task, {where}", cut, "s of CPU time"),
    ]
    common.write("sketch", values, argv, rows)


def energies(exact: OccupationStatistics, sketch: OccupationStatistics, support_rank: int) -> list[float]:
    """Of every matrix that is a sketch, the percentage of the exact support's energy that the sketch's support has."""
    found = []
    for names in sketch.groups:
        matrix, factor = exact[names[0]].double(), sketch[names[0]]
        if factor.shape[0] < factor.shape[1]:
            support = historical_support(factor, support_rank, residual_rank=8).double()
            largest, _ = eigh(matrix, names[0], support_rank)
            found.append(100 * float(torch.sum(support * (matrix @ support)) / largest.sum()))
    return found


if __name__ == "__main__":
    main()
