"""The pictures of what training changed: captures, bridge depths, and drift."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dulbe_peft.metrics.diagnostics import DepthAccuracy, ReliabilityProfile
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
