"""Draw the figures of what training changed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from dulbe_peft.metrics.results import TaskFacts
from dulbe_peft.photos.report.plots import LEGEND, SERIES, new_figure
from research.diagnostics.measures import DepthAccuracy, ReliabilityProfile


def capture_figure(records: Sequence[TaskFacts]) -> Any:
    """Draw the shares of each task's gradient along the shared mode, the residual modes, and neither."""
    names = ("shared_capture", "residual_capture")
    parts = 100 * np.array([[getattr(record, name) or 0.0 for name in names] for record in records]).T
    measured = [record.shared_capture is not None for record in records]
    rest = np.where(measured, (100 - parts.sum(axis=0)).clip(min=0), 0)
    figure, axes = new_figure(3.0, ylim=(0, 100), xlabel="task", ylabel="part of the gradient (%)")
    bottom = np.zeros(len(records))
    labels = {"shared mode": 3, "residual modes": 2, "neither": 0}
    for (label, colour), values in zip(labels.items(), (*parts, rest), strict=True):
        style = {"color": SERIES[colour], "label": label, "width": 0.7}
        axes.bar(range(1, len(records) + 1), values, bottom=bottom, **style)
        bottom = bottom + values
    figure.legend(ncols=3, **LEGEND)
    return figure


def depth_figure(profile: ReliabilityProfile, accuracy: DepthAccuracy | None = None) -> Any:
    """Draw the reliability over the depths, with its standard deviation, and the accuracy of each depth."""
    labels = {"xlabel": "depth: 0 images, 1 name", "ylabel": "percent"}
    figure, axes = new_figure(3.4, xlim=(0, 1), ylim=(0, 100), **labels)
    depths, mean, spread = profile.depths.tolist(), 100 * profile.mean, 100 * profile.spread
    low, high = (mean - spread).clamp(min=0).tolist(), (mean + spread).tolist()
    axes.fill_between(depths, low, high, color=SERIES[3], alpha=0.2, linewidth=0)
    axes.plot(depths, mean.tolist(), "o-", color=SERIES[3], markersize=4, label="reliability, mean and deviation")
    if accuracy is not None:
        style: Any = {"color": SERIES[1], "markersize": 4, "label": "accuracy, single depth"}
        axes.plot(accuracy.depths.tolist(), (100 * accuracy.alone).tolist(), "s-", **style)
        for label, value, line in (("uniform", accuracy.uniform, ":"), ("weighted", accuracy.weighted, "--")):
            axes.axhline(100 * value, color=SERIES[1], linestyle=line, linewidth=1.2, label=f"accuracy, {label}")
    figure.legend(ncols=2, **LEGEND)
    return figure


def arrow_figure(before: torch.Tensor, after: torch.Tensor) -> Any:
    """Draw how images move in a plane, from `before` to `after`, both (n, 2), as `coordinate_plane` returns them."""
    figure, axes = new_figure(4.8, xlabel="first principal component", ylabel="second principal component")
    start, move = before.T.tolist(), (after - before).T.tolist()
    axes.scatter(*start, s=6, color=SERIES[0])
    axes.quiver(*start, *move, angles="xy", scale_units="xy", scale=1, color=SERIES[5], width=0.003)
    axes.set_aspect("equal", adjustable="datalim")
    return figure
