"""Statistics as sketches beside the exact ones: what they take, what they keep, and the pass that collects them.

Energy is tr(U' S U) of the first K_h directions U, beside that of the exact ones: the share of what the exact support
covers that the sketch's support covers too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import get_peft_model

from benchmarks import common, models
from dulbe_peft import DualModeLoraConfig, OccupationStatistics, collect_statistics
from dulbe_peft.sketch import sketched_support


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=3)
    options.add_argument("--num-images", type=int, default=32)
    options.add_argument("--batch", type=int, default=16, help="images per batch")
    options.add_argument("--images", help="a data set to take the images from; default: noise")
    options.add_argument("--support-rank", type=int, default=128)
    values = common.parse(options, argv)
    if values.quick:
        values.num_images, values.batch, values.support_rank = 8, 4, 8
    tower = models.vision_tower(values.model, "sdpa")
    pixels = models.pixels(values.num_images, tower.config.image_size, values.images)
    model = get_peft_model(tower, DualModeLoraConfig(text_rank=0))
    batches = list(pixels.split(values.batch))
    exact, sketch = (collector(model, batches, rows) for rows in (None, 2 * values.support_rank))
    times = common.compare({"sketch": sketch, "exact": exact}, values.repeats)
    images = "photographs" if values.images else "noise"
    where = f"{common.model_name(values.model)}, {values.num_images} images of {images}, K_h = {values.support_rank}"
    truth, kept = exact(), sketch()
    found = energies(truth, kept, values.support_rank)
    if not found:
        options.error(f"no layer reads more than 2 * {values.support_rank} features: lower --support-rank")
    goals = ("≤ 64.00", "≥ 99.00") if values.model == "vit-b-16" else (None, None)
    rows = [
        common.value_row(f"sketches, {where}", kept.nbytes / 2**20, f"of {truth.nbytes / 2**20:.2f} MiB", goals[0]),
        common.value_row(f"energy of sketched supports, least of {len(found)}, {where}", min(found), "%", goals[1]),
        common.value_row(f"energy of sketched supports, mean, {where}", sum(found) / len(found), "%"),
        common.row(f"pass that collects, sketches / exact, {where}", times, "sketch", "exact"),
    ]
    common.write("sketch", values, argv, rows)


def collector(model: Any, batches: list[torch.Tensor], rows: int | None) -> Callable[[], OccupationStatistics]:
    """The pass of the library over all images, exact or with sketches of so many rows."""

    def collect() -> OccupationStatistics:
        into = OccupationStatistics(rows)
        return collect_statistics(model, batches, lambda _, batch: models.encode(model, batch), into=into)

    return collect


def energies(exact: OccupationStatistics, sketch: OccupationStatistics, support_rank: int) -> list[float]:
    """Of every matrix that is a sketch, the percentage of the exact support's energy that the sketch's support has."""
    found = []
    for names in sketch.groups:
        matrix, factor = exact[names[0]].double(), sketch[names[0]]
        if factor.shape[0] == factor.shape[1]:
            continue
        support = sketched_support(factor, support_rank, residual_rank=8).double()
        largest = torch.linalg.eigvalsh(matrix)[-support_rank:]
        found.append(100 * float((support * (matrix @ support)).sum() / largest.sum()))
    return found


if __name__ == "__main__":
    main()
