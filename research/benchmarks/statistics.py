"""Measure the memory of input statistics, and compare accumulating X'X with the plain sum `S += X.T @ X`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import get_peft_model
from torch import nn

from dulbe_peft import DualModeLoraConfig, OccupationStatistics, collect_statistics
from research.benchmarks import common, models


def main(argv: Sequence[str] | None = None) -> None:
    options = common.parser(__doc__, repeats=9)
    options.add_argument("--batch", type=int, default=16, help="images per batch")
    options.add_argument("--batches", type=int, default=4)
    values = common.parse(options, argv)
    tower = models.vision_tower(values.model, "sdpa")
    settings = tower.config
    tokens = (settings.image_size // settings.patch_size) ** 2 + 1
    name = common.model_name(values.model)
    rows = []
    for width in (settings.hidden_size, settings.intermediate_size):
        inputs = [torch.randn(values.batch, tokens, width) for _ in range(values.batches)]
        sides = {"ours": library_sum(inputs), "plain": plain_sum(inputs)}
        torch.testing.assert_close(sides["ours"](), sides["plain"](), rtol=1e-3, atol=1e-1)
        times = common.compare(sides, values.repeats)
        what = f"X'X / plain, {width} features, {values.batches} batches of {values.batch * tokens} tokens"
        rows.append(common.row(what, times, "ours", "plain", 0.65))
    stats = whole_tower(tower)
    goal = "486.00" if values.model == "vit-b-16" else None
    size = common.value_row(f"exact statistics, {len(stats)} layers of {name}", stats.nbytes / 2**20, "MiB", goal)
    common.write("statistics", values, argv, [size, *rows])


class Reader(nn.Module):
    """A model with one layer that returns its input unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Identity()

    def dual_mode_layers(self) -> dict[str, nn.Module]:
        return {"layer": self.layer}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layer(tokens)


def library_sum(inputs: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    def accumulate() -> torch.Tensor:
        stats = OccupationStatistics()
        collect_statistics(Reader(), inputs, lambda model, batch: model(batch), into=stats)
        return stats["layer"]

    return accumulate


def plain_sum(inputs: list[torch.Tensor]) -> Callable[[], torch.Tensor]:
    def accumulate() -> torch.Tensor:
        total = torch.zeros(inputs[0].shape[-1], inputs[0].shape[-1])
        for batch in inputs:
            rows = batch.reshape(-1, batch.shape[-1])
            total += rows.T @ rows
        return total

    return accumulate


def whole_tower(tower: Any) -> OccupationStatistics:
    """Return the statistics of one image. Their size does not depend on the number of images."""
    model = get_peft_model(tower, DualModeLoraConfig(text_rank=0))
    stats = OccupationStatistics()
    image = models.pixels(1, tower.config.image_size)
    return collect_statistics(model, [image], lambda _, batch: models.encode(model, batch), into=stats)


if __name__ == "__main__":
    main()
