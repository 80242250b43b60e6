"""What a finished stream looks like: a plot of accuracy over tasks, and a table."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from dulbe_peft.streams.metrics import percent, result_rows


def plot_results(results: dict[str, Any], path: str | Path) -> None:
    """Draw accuracy over all seen classes after each task, for every classifier, the text alone and zero-shot.

    Args:
        results: what `ClassIncrementalLearner.run` returned, of a stream with test data.
        path: the picture's file, its format by the ending.

    Raises:
        ValueError: the results hold no accuracies.
    """
    if "classifiers" not in results:
        raise ValueError("the results hold no accuracies: the stream's tasks had no test data")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    classes = [sum(len(task) for task in results["class_names"][: t + 1]) for t in range(len(results["class_names"]))]
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for (label, block), style in zip(result_rows(results), cycle(("^:", "s--", "o-", "d-", "v-", "P-", "X-"))):
        accuracies = [float("nan") if value is None else 100 * value for value in block["overall"]]
        axes.plot(classes, accuracies, style, label=label)
    axes.set_xlabel("classes seen")
    axes.set_ylabel("top-1 accuracy over all seen classes (%)")
    axes.set_xticks(classes)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def format_summary(results: dict[str, Any]) -> str:
    """A small table of the stream's figures in percent: A_bar, A_last, forgetting and backward transfer."""
    rows = ["                       A_bar  A_last  forgetting  backward transfer"]
    for label, block in result_rows(results):
        row = f"{label:<22}{percent(block['average_accuracy']):>6}  {percent(block['last_accuracy']):>6}"
        if "forgetting" in block:
            row += f"  {percent(block['forgetting']):>10}  {percent(block['backward_transfer']):>17}"
        rows.append(row)
    return "\n".join(rows)
