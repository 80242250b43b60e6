"""Charts of a comparison: accuracy, cost, and the difference of each row to the reference."""

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from dulbe_peft.photos.report.plots import INK, LEGEND, SERIES, line_style, new_figure, whole_numbers
from research.comparison.comparison_file import Comparison, Entry
from research.comparison.plan import Row
from research.comparison.summary import by_stream

MOST_DRAWN = 24  # the chart of differences is not legible with more rows
_LONGEST = 60  # characters per line of text in a chart
_LAST = "accuracy after the last task (%)"


def image_counts(streams: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Return the number of training images per class of each stream; empty if the streams differ in anything else."""
    counts = {name: settings.get("images_per_class") for name, settings in streams.items()}
    others = [{**settings, "images_per_class": None} for settings in streams.values()]
    numbers = {name: count for name, count in counts.items() if isinstance(count, int)}
    alike = all(other == others[0] for other in others) and len(set(numbers.values())) == len(streams)
    return numbers if alike and len(streams) > 1 else {}


def important_rows(comparison: Comparison) -> list[Row]:
    """Return the reference, the best row of each stream, and the best row of each method or classifier.

    The rows of the last kind are added only up to the number of colours, eight rows in total.
    """
    accuracies: dict[Row, list[float]] = {}
    for entry in comparison.entries:
        accuracies.setdefault(entry.row, []).append(entry.means["last"])
    ranked = sorted(accuracies, key=lambda row: (len(accuracies[row]), math.fsum(accuracies[row])), reverse=True)
    winners = [entries[0].row for entries in by_stream(comparison.entries).values()]
    first = [row for row in accuracies if row == comparison.scope.reference]
    required = {*first, *winners}
    kind = best_of_each(comparison)
    best = {getattr(row, kind): row for row in reversed(ranked)}.values()
    others = [row for row in ranked if row in best and row not in required]
    chosen = required.union(others[: max(0, len(SERIES) - len(required))])
    return first + [row for row in ranked if row in chosen and row not in first]


def best_of_each(comparison: Comparison) -> str:
    """Return "method" or "classifier": a chart with few rows shows the best row of each."""
    return "method" if len({row.method for row in comparison.scope.rows}) > 1 else "classifier"


def streams_figure(comparison: Comparison, rows: Sequence[Row]) -> Any:
    """Draw A_last of the rows on each stream, or by images per class if nothing else differs."""
    counts = image_counts(comparison.scope.streams)
    names = sorted(counts, key=counts.__getitem__) if counts else list(comparison.scope.streams)
    look: dict[str, Any] = {"ylim": (0, 100), "xlabel": "training images per class", "ylabel": _LAST}
    if not counts:
        look = {"ylim": (len(names) - 0.5, -0.5), "xlim": (0, 100), "xlabel": _LAST}
    figure, axes = new_figure((3.0 if counts else 0.8 + 0.45 * len(names)) + 0.2 * len(rows), **look)
    handles = []
    for number, row in enumerate(rows):
        by_name = {entry.stream: entry for entry in comparison.entries if entry.row == row}
        entries = [by_name[name] for name in names if name in by_name]
        shares = [100 * entry.means["last"] for entry in entries]
        ends = [100 * e.intervals["last"].high if e.intervals else share for e, share in zip(entries, shares)]
        bars = [end - share for end, share in zip(ends, shares)]
        style = {**line_style(number), "markersize": 4, "linewidth": 1.5, "elinewidth": 0.8, "capsize": 2}
        if counts:
            handles.append(axes.errorbar([counts[entry.stream] for entry in entries], shares, yerr=bars, **style))
        else:  # streams have no order, so no line connects them; the rows of a stream are drawn next to each other
            step = 0.5 * ((number + 0.5) / len(rows) - 0.5)
            places = [names.index(entry.stream) + step for entry in entries]
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
    """Draw the accuracy of the rows on one stream after each task."""
    shown = [entry for row in rows for entry in entries if entry.row == row and entry.curve]
    labels = {"xlabel": "task", "ylabel": "accuracy on all classes seen (%)"}
    figure, axes = new_figure(2.8 + 0.2 * len(shown), ylim=(0, 100), **labels)
    handles = []
    for entry in shown:
        look: dict[str, Any] = {**line_style(rows.index(entry.row)), "markersize": 4, "linewidth": 1.5}
        handles += axes.plot(range(1, len(entry.curve) + 1), [100 * value for value in entry.curve], **look)
    axes.xaxis.set_major_locator(whole_numbers())
    _legend(figure, handles, [entry.row.title for entry in shown])
    return figure


def cost_figure(entries: Sequence[Entry]) -> Any:
    """Draw A_last of each row on one stream against its CPU seconds. Each method has one colour and marker."""
    methods = list(dict.fromkeys(entry.row.method for entry in entries))
    labels = {"xlabel": "CPU seconds", "ylabel": _LAST}
    figure, axes = new_figure(2.8 + 0.2 * len(methods), xscale="log", **labels)
    handles = []
    for number, method in enumerate(methods):
        shown = [entry for entry in entries if entry.row.method == method]
        seconds = [max(entry.cpu_seconds, 0.1) for entry in shown]
        look: dict[str, Any] = {**line_style(number), "linestyle": "none", "markersize": 5}
        handles += axes.plot(seconds, [100 * entry.means["last"] for entry in shown], **look)
    _legend(figure, handles, methods)
    return figure


def _legend(figure: Any, handles: Sequence[Any], names: Sequence[str]) -> None:
    legend = figure.legend(handles, ["row"] * len(names), **LEGEND)
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(_plain(name))  # set afterwards, because matplotlib drops a legend entry that begins with "_"


def with_difference(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries that have a difference to the reference, the best first."""
    compared = [entry for entry in entries if entry.differences["last"] is not None]
    return sorted(compared, key=lambda entry: entry.differences["last"].mean, reverse=True)  # type: ignore[union-attr]


def forest_figure(entries: Sequence[Entry]) -> Any:
    """Draw the differences to the reference with their intervals, for the first `MOST_DRAWN` entries."""
    rows = list(entries[:MOST_DRAWN])
    look = {"ylim": (len(rows) - 0.5, -0.9), "yticks": [], "xlabel": "difference to the reference (percentage points)"}
    figure, axes = new_figure(0.8 + 0.36 * len(rows), **look)
    axes.axvline(0, color=INK, linewidth=1)
    for place, entry in enumerate(rows):
        difference = entry.differences["last"]
        assert difference is not None
        colour = SERIES[3] if difference.clear else SERIES[0]
        low, mean, high = (100 * value for value in (difference.low, difference.mean, difference.high))
        axes.plot([low, high], [place, place], color=colour, linewidth=1.5)
        axes.plot([mean], [place], "o", color=colour, markersize=5, **({} if difference.clear else {"mfc": "none"}))
        # The name stands above its interval. Beside it, a long name would leave no room for the axis on a phone.
        where = {"transform": axes.get_yaxis_transform(), "va": "bottom", "fontsize": 7.5, "color": INK}
        axes.text(0.0, place - 0.25, _plain(entry.row.title, 90), in_layout=False, **where)
    axes.spines["left"].set_visible(False)
    return figure


def _plain(text: str, longest: int = _LONGEST) -> str:
    """Wrap a name into short lines and escape it, so that matplotlib does not read it as mathematics."""
    return textwrap.fill(text, longest).replace("$", r"\$")
