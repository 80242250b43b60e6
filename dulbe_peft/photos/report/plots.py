"""Draw charts of the results of a run. Axes of accuracy run from 0 to 100 %.

On a page, a chart is an SVG whose colours are variables of the style sheet, so it follows the light or dark scheme.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dulbe_peft.classifiers.registry import CLASSIFIERS, answering
from dulbe_peft.metrics.accuracy import BESIDE_CLASSIFIERS, TITLES, accuracy_matrix
from dulbe_peft.metrics.results import Results
from dulbe_peft.photos.report.shares import Share
from dulbe_peft.utils.extras import installed

if TYPE_CHECKING:  # matplotlib is an extra
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import Locator

INK, GRID = "#1b1f24", "#d0d7de"
SERIES = ("#57606a", "#9a6700", "#1a7f4b", "#0b62a8", "#a3378c", "#b3350f", "#0e7490", "#6e40aa")
STYLES = ("^:", "s--", "v-.", "o-", "d-.", "P-", "X--", "*-")
_DASHES = ("-", ":", "-.", "--")
_MOST_NUMBERS = 12  # the matrix shows its values for at most this many tasks
# The legend stands below the axes, because anywhere inside them it could hide a line.
LEGEND: dict[str, object] = {"loc": "outside lower center", "frameon": False, "labelcolor": INK, "fontsize": 8}


def plot_results(results: Results | Mapping[str, object], path: str | Path) -> None:
    """Plot the accuracy on all seen classes after each task, for every classifier and for zero-shot classification.

    Args:
        results: What `run_stream` returned for a stream with test data, or a record of it.
        path: The file to write; its suffix selects the format.

    Raises:
        ValueError: If the stream had no test data.
    """
    accuracy_figure(Results.of(results)).savefig(path, dpi=150)


def plot_matrix(results: Results | Mapping[str, object], path: str | Path) -> None:
    """Plot the first classifier's accuracy on each task after every later task; see `plot_results`."""
    matrix_figure(Results.of(results)).savefig(path, dpi=150)


# ---------------------------------------------------------------------- charts of results


def accuracy_figure(results: Results) -> Figure:
    """Plot the accuracy after each task, with one line for each classifier and baseline."""
    _check_tested(results)
    rows = results.rows
    steps = max(len(measures.overall) for _, measures in rows)
    classes = [sum(len(task) for task in results.class_names[: t + 1]) for t in range(steps)]
    words = {"xlabel": "classes seen", "ylabel": "accuracy on all seen classes (%)"}
    figure, axes = new_figure(max(3.8, 3.0 + 0.1 * len(rows)), ylim=(0, 100), xticks=_thinned(classes), **words)
    # Known classifiers have the same style in every chart.
    places = list(dict.fromkeys([*BESIDE_CLASSIFIERS, *CLASSIFIERS, *(name for name, _ in rows)]))
    for name, measures in rows:
        # Wide, hollow marks keep zero-shot visible where the text classifier has the same accuracy.
        marks = {"markersize": 9, "markerfacecolor": "none"} if name == "zero_shot" else {"markersize": 4}
        look: dict[str, Any] = {"linewidth": 1.5, "clip_on": False, **line_style(places.index(name)), **marks}
        overall = 100 * np.array(measures.overall, dtype=np.float64)  # None is NaN
        axes.plot(classes[: len(overall)], overall, label=TITLES.get(name, name), **look)
    figure.legend(ncols=2, handlelength=4, **LEGEND)  # long samples show the dashes
    return figure


def line_style(place: int) -> dict[str, str]:
    """Return a line's colour, marker and dash. Each of the first 32 places has another pair of colour and dash."""
    turn, series = divmod(place, len(SERIES))
    mark, first_dash = STYLES[(series + turn) % len(STYLES)][0], STYLES[series][1:]
    dash = _DASHES[(_DASHES.index(first_dash) + turn) % len(_DASHES)]
    return {"color": SERIES[series], "marker": mark, "linestyle": dash}


def matrix_figure(results: Results) -> Figure:
    """Plot the task matrix of the first classifier; tasks that were not tested stay empty."""
    _check_tested(results)
    rows = results.classifiers[answering(results.classifiers)].matrix
    size, values = len(rows), 100 * accuracy_matrix(rows)
    figure, axes = new_figure(4.8, xlabel="tested on the classes of task", ylabel="after learning task")
    image = axes.imshow(values, cmap="Blues", vmin=0, vmax=100)
    axes.grid(False)
    for (step, task), value in np.ndenumerate(values):
        if size <= _MOST_NUMBERS and not np.isnan(value):
            colour = "white" if value > 60 else INK
            axes.text(task, step, f"{value:.1f}", ha="center", va="center", fontsize=7, color=colour)
    ticks = _thinned(range(size))
    axes.set_xticks(ticks, [str(tick + 1) for tick in ticks])
    axes.set_yticks(ticks, [str(tick + 1) for tick in ticks])
    bar = figure.colorbar(image, ax=axes, label="accuracy (%)", shrink=0.8)
    bar.ax.tick_params(color=INK, labelcolor=INK, labelsize=8)
    return figure


def loss_figure(losses: Sequence[Sequence[float]]) -> Figure:
    """Plot the mean loss of every epoch, with one line for each task and an axis that begins at 0."""
    figure, axes = new_figure(2.6, xlabel="epoch, counted over all tasks", ylabel="mean loss")
    done = 0
    for task in losses:
        axes.plot(range(done + 1, done + len(task) + 1), task, "o-", color=SERIES[3], markersize=3, linewidth=1.5)
        done += len(task)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(whole_numbers())
    return figure


def reliability_figure(bins: Sequence[tuple[float, Share]]) -> Figure:
    """Plot the percentage of correct predictions against their probability."""
    words = {"xlabel": "probability of the prediction (%)", "ylabel": "correct (%)"}
    figure, axes = new_figure(3.6, xlim=(0, 100), ylim=(0, 100), **words)
    axes.plot([0, 100], [0, 100], "--", color=SERIES[0], linewidth=1)
    mean_probability, right = [100 * mean for mean, _ in bins], [100 * share.value for _, share in bins]
    ends = abs(100 * np.transpose([share.interval for _, share in bins]) - right)  # distances of the interval's ends
    axes.errorbar(mean_probability, right, yerr=ends, fmt="o", color=SERIES[3], capsize=2, clip_on=False)
    return figure


# ---------------------------------------------------------------------- charts for pages


def inline_svg(figure: Figure, name: str) -> str:
    """Return a figure as an `<svg>` element in the page's colours. Ids begin with `name`, which must be unique."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}), warnings.catch_warnings():
        # The browser draws the texts. matplotlib only measures them, with a font that has fewer characters.
        warnings.filterwarnings("ignore", "Glyph .* missing from", UserWarning)
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', r'<svg xmlns="http://www.w3.org/2000/svg" \1>', svg, count=1)
    svg = svg.replace("xlink:href", "href")
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda match: f' id="{name}-{match[1]}"' if match[1] in used else "", svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", svg)
    for number, colour in enumerate(SERIES):
        svg = svg.replace(colour, f"var(--series-{number})")
    return svg.replace(INK, "currentColor").replace(GRID, "var(--line)").strip()


def new_figure(height: float, **look: object) -> tuple[Figure, Axes]:
    """Return a figure, `height` inches high, and its axes, in the page's colours. `look` is passed to `Axes.set`."""
    with installed("a picture"):
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

    style: dict[str, object] = {"font.size": 9, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK}
    style |= {"axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(4.8, height), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
    axes.tick_params(color=INK, labelcolor=INK, labelsize=8)
    axes.grid(True, color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.set(**look)
    return figure, axes


def whole_numbers() -> Locator:
    """Return a locator of at most eight tick marks at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=8, integer=True)


def _check_tested(results: Results) -> None:
    if not results.classifiers:
        raise ValueError("the results have no accuracies, because the stream had no test data: give it test images")


def _thinned(values: Sequence[int]) -> list[int]:
    """Choose from rising values those whose tick labels do not overlap on an axis."""
    kept: list[int] = []
    for value in values:
        if not kept or value - kept[-1] >= (values[-1] - values[0]) / 10:
            kept.append(value)
    return kept
