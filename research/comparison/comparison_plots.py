"""The pictures of a comparison: rows over the streams, and each row's difference to the reference."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from dulbe_peft.photos.report.plots import INK, LEGEND, SERIES, line_style, new_figure, whole_numbers
from research.comparison.comparison_file import Comparison, Entry
from research.comparison.plan import Row
from research.comparison.summary import by_stream

MOST = 24  # rows that a picture of differences still shows legibly
_LONGEST = 60  # letters of a line in a picture
_LAST = "right after the last task (%)"


def image_counts(streams: dict[str, dict[str, Any]]) -> dict[str, int]:
    """The number of training images of each class on each stream; empty where the streams differ in more than that."""
    counts = {name: settings.get("images_per_class") for name, settings in streams.items()}
    others = [{**settings, "images_per_class": None} for settings in streams.values()]
    numbers = {name: count for name, count in counts.items() if isinstance(count, int)}
    alike = all(other == others[0] for other in others) and len(set(numbers.values())) == len(streams)
    return numbers if alike and len(streams) > 1 else {}


def important_rows(comparison: Comparison) -> list[Row]:
    """The reference, the best row of each stream, and up to eight rows the best of each method or classifier."""
    found: dict[Row, list[float]] = {}
    for entry in comparison.entries:
        found.setdefault(entry.row, []).append(entry.means["last"])
    ranked = sorted(found, key=lambda row: (len(found[row]), math.fsum(found[row])), reverse=True)
    won = [own[0].row for own in by_stream(comparison.entries).values()]
    first = [row for row in found if row == comparison.scope.reference]
    sure = {*first, *won}
    kind = best_of_each(comparison)
    best = {getattr(row, kind): row for row in reversed(ranked)}.values()
    others = [row for row in ranked if row in best and row not in sure]
    chosen = sure.union(others[: max(0, len(SERIES) - len(sure))])
    return first + [row for row in ranked if row in chosen and row not in first]


def best_of_each(comparison: Comparison) -> str:
    """Of what a picture of few rows shows the best one: of each "method", or of each "classifier"."""
    return "method" if len({row.method for row in comparison.scope.rows}) > 1 else "classifier"


def streams_figure(comparison: Comparison, rows: Sequence[Row]) -> Any:
    """A_last of some rows over the streams, or over their numbers of images a class."""
    counts = image_counts(comparison.scope.streams)
    names = sorted(counts, key=counts.__getitem__) if counts else list(comparison.scope.streams)
    look: dict[str, Any] = {"ylim": (0, 100), "xlabel": "training images of each class", "ylabel": _LAST}
    if not counts:
        look = {"ylim": (len(names) - 0.5, -0.5), "xlim": (0, 100), "xlabel": _LAST}
    figure, axes = new_figure((3.0 if counts else 0.8 + 0.45 * len(names)) + 0.2 * len(rows), **look)
    handles = []
    for number, row in enumerate(rows):
        own = {entry.stream: entry for entry in comparison.entries if entry.row == row}
        found = [own[name] for name in names if name in own]
        shares = [100 * entry.means["last"] for entry in found]
        ends = [100 * one.intervals["last"].high if one.intervals else at for one, at in zip(found, shares)]
        bars = [end - at for end, at in zip(ends, shares)]
        style = {**line_style(number), "markersize": 4, "linewidth": 1.5, "elinewidth": 0.8, "capsize": 2}
        if counts:
            handles.append(axes.errorbar([counts[entry.stream] for entry in found], shares, yerr=bars, **style))
        else:  # nothing lies between two streams, so no line joins them; rows stand beside each other
            step = 0.5 * ((number + 0.5) / len(rows) - 0.5)
            places = [names.index(entry.stream) + step for entry in found]
            handles.append(axes.errorbar(shares, places, xerr=bars, **style | {"linestyle": "none"}))
    if counts:
        axes.set_xscale("log")
        axes.set_xticks([counts[name] for name in names], [str(counts[name]) for name in names])
        axes.set_xticks([], minor=True)
    else:
        axes.set_yticks(range(len(names)), [_plain(name, _LONGEST // 3) for name in names])
    _legend(figure, handles, [row.title for row in rows])
    return figure


def curves_figure(entries: Sequence[Entry], rows: Sequence[Row]) -> Any:
    """How many test images of one stream some rows name right after each task."""
    own = [entry for row in rows for entry in entries if entry.row == row and entry.curve]
    words = {"xlabel": "task", "ylabel": "right, of all seen classes (%)"}
    figure, axes = new_figure(2.8 + 0.2 * len(own), ylim=(0, 100), **words)
    handles = []
    for entry in own:
        look: dict[str, Any] = {**line_style(rows.index(entry.row)), "markersize": 4, "linewidth": 1.5}
        handles += axes.plot(range(1, len(entry.curve) + 1), [100 * value for value in entry.curve], **look)
    axes.xaxis.set_major_locator(whole_numbers())
    _legend(figure, handles, [entry.row.title for entry in own])
    return figure


def cost_figure(entries: Sequence[Entry]) -> Any:
    """A_last of every row on one stream against its seconds; a method has one colour and mark."""
    methods = list(dict.fromkeys(entry.row.method for entry in entries))
    words = {"xlabel": "seconds of the CPU", "ylabel": _LAST}
    figure, axes = new_figure(2.8 + 0.2 * len(methods), xscale="log", **words)
    handles = []
    for number, method in enumerate(methods):
        own = [entry for entry in entries if entry.row.method == method]
        seconds = [max(entry.cpu_seconds, 0.1) for entry in own]
        look: dict[str, Any] = {**line_style(number), "linestyle": "none", "markersize": 5}
        handles += axes.plot(seconds, [100 * entry.means["last"] for entry in own], **look)
    _legend(figure, handles, methods)
    return figure


def _legend(figure: Any, handles: Sequence[Any], names: Sequence[str]) -> None:
    legend = figure.legend(handles, ["row"] * len(names), **LEGEND)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(_plain(name))  # the legend itself would leave out a name that begins with "_"


def with_difference(entries: Sequence[Entry]) -> list[Entry]:
    """The rows that have a difference to the reference, the best first."""
    found = [entry for entry in entries if entry.differences["last"] is not None]
    return sorted(found, key=lambda entry: entry.differences["last"].mean, reverse=True)  # type: ignore[union-attr]


def forest_figure(entries: Sequence[Entry]) -> Any:
    """Differences to the reference with their intervals, of the first `MOST` entries."""
    rows = list(entries[:MOST])
    look = {"ylim": (len(rows) - 0.5, -0.9), "yticks": [], "xlabel": "difference to the reference (percentage points)"}
    figure, axes = new_figure(0.8 + 0.36 * len(rows), **look)
    axes.axvline(0, color=INK, linewidth=1)
    for place, entry in enumerate(rows):
        found = entry.differences["last"]
        assert found is not None
        colour = SERIES[3] if found.clear else SERIES[0]
        low, mean, high = (100 * value for value in (found.low, found.mean, found.high))
        axes.plot([low, high], [place, place], color=colour, linewidth=1.5)
        axes.plot([mean], [place], "o", color=colour, markersize=5, **({} if found.clear else {"mfc": "none"}))
        # Above its interval: beside it, a long name would leave no room for the axis on a phone.
        where = {"transform": axes.get_yaxis_transform(), "va": "bottom", "fontsize": 7.5, "color": INK}
        axes.text(0.0, place - 0.25, _plain(entry.row.title, 90), in_layout=False, **where)
    axes.spines["left"].set_visible(False)
    return figure


def _plain(text: str, longest: int = _LONGEST) -> str:
    """A name as matplotlib shows it as it is, in lines that are short enough."""
    return textwrap.fill(text, longest).replace("$", r"\$")
