"""Measure the time to encode images with a merged and with an unmerged adapter, relative to the base model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from research.benchmarks import common, models, ours


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=15)
    options.add_argument("--batch", type=int, default=4)
    options.add_argument("--attention", default="sdpa")
    values = common.parse(options, argv)
    tower = models.vision_tower(values.model, values.attention)
    pixels = models.pixels(values.batch, tower.config.image_size)
    adapted = ours.adapted(copy.deepcopy(tower), tasks=2).eval()
    merged = copy.deepcopy(adapted)
    merged.merge_adapter()

    def forward(model: Any) -> Callable[[], torch.Tensor]:
        return torch.no_grad()(lambda: models.encode(model, pixels))

    times = common.compare(
        {"merged": forward(merged), "base": forward(tower), "adapted": forward(adapted)}, values.repeats
    )
    where = f"{common.model_name(values.model)}, {values.attention}, batch {values.batch}"
    rows = [
        common.row(f"merged inference / base model, {where}", times, "merged", "base", 1.02),
        common.row(f"inference, not merged / base model, {where}", times, "adapted", "base"),
    ]
    common.write("inference", values, argv, rows)


if __name__ == "__main__":
    main()
