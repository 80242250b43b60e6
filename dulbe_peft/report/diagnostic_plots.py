"""The pictures of what training changed: captures, bridge depths, drift, layers, and the patches of an image."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dulbe_peft.metrics.diagnostics import DepthAccuracy, LayerDemand, ReliabilityProfile
from dulbe_peft.report.plots import INK, SERIES, new_figure


def capture_figure(records: Sequence[Mapping[str, Any]]) -> Any:
    """A figure of each task's gradient: its parts along the shared mode, the residual modes, and neither."""
    shared = [100 * (record.get("shared_capture") or 0.0) for record in records]
    residual = [100 * (record.get("residual_capture") or 0.0) for record in records]
    measured = [record.get("shared_capture") is not None for record in records]
    rest = [max(0.0, 100 - s - r) if known else 0.0 for s, r, known in zip(shared, residual, measured)]
    figure, axes = new_figure(3.0)
    numbers, bottom = range(1, len(records) + 1), [0.0] * len(records)
    for label, values, colour in (
        ("shared mode", shared, SERIES[3]),
        ("residual modes", residual, SERIES[2]),
        ("neither", rest, SERIES[0]),
    ):
        axes.bar(numbers, values, bottom=bottom, color=colour, label=label, width=0.7)
        bottom = [b + v for b, v in zip(bottom, values)]
    axes.set_ylim(0, 100)
    axes.set_xlabel("task")
    axes.set_ylabel("part of the gradient (%)")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, labelcolor=INK, fontsize=8)
    return figure


def depth_figure(profile: ReliabilityProfile, accuracy: DepthAccuracy | None = None) -> Any:
    """matplotlib's figure of the reliability over the depths, with its spread, and of the accuracy of each depth."""
    figure, axes = new_figure(3.4)
    depths, mean, spread = profile.depths.tolist(), 100 * profile.mean, 100 * profile.spread
    low, high = (mean - spread).clamp(min=0).tolist(), (mean + spread).tolist()
    axes.fill_between(depths, low, high, color=SERIES[3], alpha=0.2, linewidth=0)
    axes.plot(depths, mean.tolist(), "o-", color=SERIES[3], markersize=4, label="trust in the depth, mean and spread")
    if accuracy is not None:
        alone = (100 * accuracy.alone).tolist()
        axes.plot(
            accuracy.depths.tolist(), alone, "s-", color=SERIES[1], markersize=4, label="right, this depth alone"
        )
        for label, value, style in (("uniform", accuracy.uniform, ":"), ("weighted", accuracy.weighted, "--")):
            axes.axhline(100 * value, color=SERIES[1], linestyle=style, linewidth=1.2, label=f"right, {label}")
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 100)
    axes.set_xlabel("depth: 0 images, 1 name")
    axes.set_ylabel("percent")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, labelcolor=INK, fontsize=8)
    return figure


def arrow_figure(before: torch.Tensor, after: torch.Tensor) -> Any:
    """matplotlib's figure of images that move in a plane; both are (n, 2), as `coordinate_plane` gives them."""
    figure, axes = new_figure(4.8)
    start, way = before.T.tolist(), (after - before).T.tolist()
    axes.scatter(*start, s=6, color=SERIES[0])
    axes.quiver(*start, *way, angles="xy", scale_units="xy", scale=1, color=SERIES[5], width=0.003)
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_xlabel("first direction of the coordinates")
    axes.set_ylabel("second direction")
    return figure


def layer_figure(tasks: Sequence[Mapping[str, LayerDemand]]) -> Any:
    """A figure of what `inspect_task` gives, layer by layer: each task's energy, and the mean parts of it."""
    names = list(tasks[0])
    figure, axes = new_figure(3.4)
    figure.set_figwidth(9.6)
    axes.remove()
    left, right = figure.subplots(1, 2)
    energy = [[math.log10(task[name].energy or math.nan) for name in names] for task in tasks]
    image = left.imshow(energy, aspect="auto", cmap="Blues")
    left.set_yticks(range(len(tasks)), [str(number) for number in range(1, len(tasks) + 1)])
    left.set_ylabel("task")
    left.set_xlabel("layer")
    figure.colorbar(image, ax=left, label="log10 of the energy")
    later = [task for task in tasks if task[names[0]].occupied is not None] or list(tasks)
    for field, colour, style in (
        ("shared", SERIES[3], "o-"),
        ("residual", SERIES[2], "s-"),
        ("occupied", SERIES[1], "^-"),
        ("chance", SERIES[0], ":"),
    ):
        values = [[getattr(task[name], field) for task in later] for name in names]
        if None not in values[0]:
            means = [100 * sum(row) / len(row) for row in values]
            right.plot(range(len(names)), means, style, color=colour, markersize=3, linewidth=1.2, label=field)
    right.set_ylim(0, 100)
    right.set_xlabel("layer")
    right.set_ylabel("part of the gradient (%)")
    blocks = [re.search(r"\.(\d+)\.", name) for name in names]
    starts = [n for n, found in enumerate(blocks) if n == 0 or not found or found[1] != (blocks[n - 1] or [0, 0])[1]]
    for axis in (left, right):
        axis.set_xticks(starts, [f"block {blocks[n][1]}" if blocks[n] else names[n] for n in starts], rotation=90)  # type: ignore[index]
        axis.tick_params(color=INK, labelcolor=INK, labelsize=7)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, labelcolor=INK, fontsize=8)
    return figure


def relevance_figure(image: Any, maps: torch.Tensor, titles: Sequence[str]) -> Any:
    """matplotlib's figure of an image and its `relevance_maps` (P, grid_h, grid_w) to P prototypes, with one scale."""
    figure, axes = new_figure(2.0)
    axes.remove()
    count = len(maps)
    figure.set_figwidth(1.8 * (count + 1))
    cells = figure.subplots(1, count + 1)
    most = float(maps.clamp(min=0).amax()) or 1.0
    extent = (0, maps.shape[2], maps.shape[1], 0)
    for cell, title, map_ in zip(cells, ("image", *titles), (None, *maps), strict=True):
        cell.imshow(image, extent=extent)
        if map_ is not None:
            cell.imshow(map_.clamp(min=0).tolist(), extent=extent, cmap="inferno", vmin=0, vmax=most, alpha=0.6)
        cell.set_title(title.replace("$", r"\$"), fontsize=8, color=INK)
        cell.set_axis_off()
    return figure
