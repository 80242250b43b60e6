"""Compare mode allocation for all adapted layers with a full eigendecomposition and a full SVD per layer.

Both sides get the same gradients, from a probe of the model, and the same statistics, from its activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from peft import get_peft_model
from torch.nn import functional as F

from dulbe_peft import DualModeLoraConfig, OccupationStatistics, allocate_modes, collect_statistics, probe_gradients
from dulbe_peft.subspaces.allocation import historical_support
from research.benchmarks import common, literal, models


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=5)
    options.add_argument("--num-images", type=int, default=32, help="images for gradients and statistics")
    options.add_argument("--images", help="a data set to take the images from; default: noise")
    options.add_argument("--support-rank", type=int, default=128)
    values = common.parse(options, argv)
    if values.quick:
        values.num_images, values.support_rank = 8, 8
    probe, stats = measured(values)
    ranks: dict[str, Any] = {"shared_rank": 1, "residual_rank": 8, "support_rank": values.support_rank}
    sides = {
        "ours": partial(allocate_modes, probe, stats, **ranks),
        "literal": partial(literal.allocate, probe, dict(stats), **ranks),
    }
    times = common.compare(sides, values.repeats)
    images = "photographs" if values.images else "noise"
    where = f"{len(probe)} layers, {common.model_name(values.model)}, {values.num_images} images of {images}"
    distance = max(projector_distance(stats[names[0]], values.support_rank) for names in stats.groups)
    rows = [
        common.row(f"allocation / literal, {where}", times, "ours", "literal"),
        common.value_row(f"CPU of allocation, {where}", common.rounded(median(times["ours"]["cpu"])), "s"),
        common.value_row(f"supports, {where}", common.rounded(distance), "projector distance", "≤ 1e-4"),
    ]
    common.write("allocation", values, argv, rows)


def measured(values: Any) -> tuple[dict[str, torch.Tensor], OccupationStatistics]:
    """Return gradients of ten classes, and occupation statistics, of a model that has no history yet."""
    tower = models.vision_tower(values.model, "sdpa")
    model = get_peft_model(tower, DualModeLoraConfig(text_rank=0))
    pixels = models.pixels(values.num_images, tower.config.image_size, values.images)
    text = models.unit(10, tower.config.projection_dim, seed=2)
    batches = list(zip(pixels.split(8), (torch.arange(len(pixels)) % 10).split(8), strict=True))

    def loss_fn(_: Any, batch: Any) -> tuple[torch.Tensor, int]:
        logits = models.LOGIT_SCALE * models.encode(model, batch[0]) @ text.T
        return F.cross_entropy(logits, batch[1]), len(batch[0])

    probe = probe_gradients(model, batches, loss_fn)
    stats = OccupationStatistics()
    collect_statistics(model, batches, lambda _, batch: models.encode(model, batch[0]), into=stats)
    return probe, stats


def projector_distance(statistic: torch.Tensor, support_rank: int) -> float:
    """Return the spectral norm of the difference between our projector and that of a full decomposition in float64."""
    support = historical_support(statistic, support_rank, residual_rank=8).double()
    exact = torch.linalg.eigh(statistic.double())[1].flip(1)[:, : support.shape[1]]
    # Both have the same rank, so this is the sine of the largest angle. This form avoids cancellation.
    return float(torch.linalg.matrix_norm(exact - support @ (support.T @ exact), 2))


if __name__ == "__main__":
    main()
