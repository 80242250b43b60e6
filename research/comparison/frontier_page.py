"""The tables, the sentence and the figure of a frontier."""

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from dulbe_peft.metrics.accuracy import percent, signed
from dulbe_peft.photos.report.plots import GRID, INK, LEGEND, SERIES, inline_svg, line_style, new_figure
from research.comparison.frontier import LOSSES, Curve, Place, curves, difference, interval, not_measured
from research.comparison.intervals import Difference
from research.comparison.measured import TEXT, Measured
from research.comparison.plan import Plan

# The page's colours in the dark scheme, in the order of `SERIES`.
_DARK = ("#8b949e", "#d29922", "#3fb950", "#58a6ff", "#e275ad", "#f0883e", "#39c5cf", "#a371f7")
_PAPER, _DARK_PAPER, _DARK_INK, _DARK_GRID = "#ffffff", "#161c26", "#eef2f8", "#3c4859"
_WIDTH = 84  # characters per line below a figure
_SHOWN = LOSSES[-1] + 0.015  # the largest loss that a figure shows


def points_off(loss: float) -> str:
    return f"{100 * loss:g}"


def before_training(found: dict[str, Curve]) -> Place:
    """Return the place before training with the most seeds."""
    return max((curve.places[0] for curve in found.values()), key=lambda place: len(place.learned))


def hull_table(found: dict[str, Curve]) -> list[list[str]]:
    """Return the places of each method's curve, with intervals over the seeds."""
    lines = [["method", "settings", "share of the update", "learned, %", "never learned, %", "seeds"]]
    for method, curve in found.items():
        for place in curve.hull:
            seeds = str(len(place.learned))
            if place.share or len(found) == 1 or len(curve.places) == 1:
                settings = place.settings.replace("=", " = ").replace(",", ", ")
                share = f"{place.share:g}" if place.share else "nothing trained"
                lines.append([method, settings, share, _mean(place.learned), _mean(place.unlearned), seeds])
    return lines


def loss_table(found: dict[str, Curve], reference: str) -> list[list[str]]:
    """Return the learned accuracy of each method at equal losses on never learned classes, and its lead."""
    start = before_training(found).x
    lines = [["learned, %, where never learned may lose", *(f"{points_off(loss)} points" for loss in LOSSES), "seeds"]]
    for method, curve in found.items():
        cells = []
        for loss in LOSSES:
            values = curve.learned_at(start - loss)
            value = "" if values is None else percent(sum(values.values()) / len(values))
            ahead = None if method == reference else difference(curve, found[reference], start - loss)
            cells.append(value if ahead is None else f"{value} ({_signed(ahead)})")
        lines.append([method, *cells, str(len(curve.seeds))])
    return lines


def sentence(found: dict[str, Curve], reference: str) -> str:
    """Say in one sentence which curves the reference's is above and below, and at which losses."""
    start, said = before_training(found).x, []
    for method, curve in found.items():
        if method != reference and len(curve.places) > 1:
            each = {loss: difference(found[reference], curve, start - loss) for loss in LOSSES}
            known = {loss: ahead for loss, ahead in each.items() if ahead is not None}
            several = len(found[reference].seeds & curve.seeds) > 1
            sides = (("above", 1), ("below", -1))
            parts = [
                _side(word, {x: a for x, a in known.items() if sign * a.mean > 0}, several) for word, sign in sides
            ]
            if any(parts):
                said.append(f"{' and '.join(filter(None, parts))} that of {method}")
            elif known:
                said.append(f"level with that of {method}")
    if not said:
        return f"No other method was measured beside {reference}."
    losses = f"{', '.join(map(points_off, LOSSES[:-1]))} or {points_off(LOSSES[-1])}"
    return (
        f"Where classes that are never learned may lose {losses} points, the curve of {reference} is "
        f"{'; '.join(said)} ({count_seeds(found)})."
    )


def _side(word: str, at: dict[float, Difference], several: bool) -> str:
    """Return on which side a curve is at some losses: "above at 2 and 4 (+0.4 to +1.2, clear at 2)"."""
    if not at:
        return ""
    ends = [signed(pick(each.mean for each in at.values())) for pick in (min, max)]
    clear = [points_off(loss) for loss, each in at.items() if several and each.clear]
    notes = [" to ".join(dict.fromkeys(ends))]
    if several:
        notes.append("clear" if len(clear) == len(at) else f"clear at {_listed(clear)}" if clear else "not clear")
    where = "" if len(at) == len(LOSSES) else f" at {_listed(map(points_off, at))}"
    return f"{word}{where} ({', '.join(notes)})"


def _listed(words: Iterable[str]) -> str:
    """Return "a", "a and b" or "a, b and c"."""
    *first, last = words
    return " and ".join(filter(None, (", ".join(first), last)))


def count_seeds(found: dict[str, Curve]) -> str:
    """Return the number of seeds of the curves, in words."""
    counts = sorted({len(curve.seeds) for curve in found.values()})
    return "one seed" if counts == [1] else f"{' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds"


def frontier_figure(found: dict[str, Curve], caption: str, classifier: str = TEXT) -> Any:
    """Draw the curves with intervals over the seeds, and the places below them as faint marks.

    Places that lose more than the losses at which curves are compared are outside the figure.
    """
    lines, start = textwrap.wrap(caption, _WIDTH), before_training(found)
    trained = {method: curve for method, curve in found.items() if len(curve.places) > 1}
    shown = [start, *(p for curve in trained.values() for p in curve.places if p.x >= start.x - _SHOWN)]
    low, high = min(place.x for place in shown), max(place.x for place in shown)
    floor = max(min(place.y for place in shown), start.y - 0.02)
    look: dict[str, Any] = {"xlabel": "never learned classes (%)", "ylabel": f"learned classes, {classifier} (%)"}
    figure, axes = new_figure(3.4 + 0.14 * len(lines), **look)
    others = (place for place in itertools.count() if place not in _PLACES.values())
    for method, curve in trained.items():
        place = _PLACES.get(method.lower())
        style: dict[str, Any] = line_style(next(others) if place is None else place)
        below = [place for place in curve.places if place not in curve.hull and place in shown and place.share]
        faint: dict[str, Any] = {**style, "linestyle": "none", "markersize": 3, "alpha": 0.35}
        axes.plot([100 * p.x for p in below], [100 * p.y for p in below], **faint)
        bars = [[_half(getattr(p, side)) for p in curve.hull] for side in ("unlearned", "learned")]
        style |= {"markersize": 4, "linewidth": 1.5, "elinewidth": 0.6, "label": method}
        style["ecolor"] = (style["color"], 0.35)
        xs, ys = ([100 * value for value in values] for values in zip(*((p.x, p.y) for p in curve.hull)))
        axes.errorbar(xs, ys, xerr=bars[0], yerr=bars[1], **style)
    axes.plot([100 * start.x], [100 * start.y], "D", color=INK, markersize=6, label="nothing trained", zorder=5)
    axes.set(xlim=(100 * low - 0.5, 100 * high + 0.5))
    axes.set_ylim(bottom=100 * floor - 0.5)
    axes.legend(**LEGEND | {"loc": "upper right"})
    figure.supxlabel("\n".join(lines), fontsize=7.5, color=INK, x=0.02, ha="left")
    return figure


# Methods that most figures share keep their colours.
_PLACES = {"lora": 1, "merged lora": 2, "dulbe": 3}


def frontier_svg(records: Iterable[Measured], stream: str, reference: str, classifier: str = TEXT) -> str:
    """Return the figure of a stream as an SVG file, which follows the light or dark scheme and says what it shows."""
    found = curves(records, stream, classifier)
    caption = sentence(found, reference)
    svg = inline_svg(frontier_figure(found, caption, classifier), "frontier")
    head, body = svg.split(">", 1)
    light = ";".join(f"--series-{number}:{colour}" for number, colour in enumerate(SERIES))
    dark = ";".join(f"--series-{number}:{colour}" for number, colour in enumerate(_DARK))
    title = f"{stream}: accuracy on learned classes against classes that are never learned"
    return (
        f'{head} role="img" aria-labelledby="frontier-title frontier-text" '
        "font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\">\n"
        f'<title id="frontier-title">{escape(title)}</title>\n<desc id="frontier-text">{escape(caption)}</desc>\n'
        f"<style>svg{{{light};--line:{GRID};color:{INK};background:{_PAPER}}}"
        f"@media (prefers-color-scheme:dark){{svg{{{dark};--line:{_DARK_GRID};color:{_DARK_INK};"
        f"background:{_DARK_PAPER}}}}}</style>{body}\n"
    )


def _mean(values: dict[int, float]) -> str:
    found = interval(values)
    mean = percent(sum(values.values()) / len(values))
    return mean if found is None else f"{mean} ({percent(max(found.low, 0))} to {percent(min(found.high, 1))})"


def _half(values: dict[int, float]) -> float:
    found = interval(values)
    return 0.0 if found is None else max(0.0, 100 * (found.high - found.mean))


def _signed(ahead: Difference) -> str:
    if ahead.low == ahead.high:
        return signed(ahead.mean)
    return f"{signed(ahead.mean)}; {signed(ahead.low)} to {signed(ahead.high)}"


def frontier_text(plan: Plan, records: Sequence[Measured]) -> str:
    """Return the tables of all streams and classifiers as Markdown, and what is not measured."""
    parts = []
    for stream in plan.streams:
        for classifier in classifiers_of(records, stream):
            found = curves(records, stream, classifier)
            model = next(record.model for record in records if record.stream == stream)  # a digest or the Hub's name
            parts.append(f"{stream}, {classifier}, model {model[:12] if len(model) == 64 else model}")
            parts.append(markdown(hull_table(found)))
            if plan.reference.method in found:
                parts += [markdown(loss_table(found, plan.reference.method)), sentence(found, plan.reference.method)]
    if missing := not_measured(plan, records):
        parts.append("not measured:\n" + "\n".join(f"  {line}" for line in missing))
    return "\n\n".join(parts)


def classifiers_of(records: Iterable[Measured], stream: str) -> list[str]:
    """Return the classifiers that were measured on a stream; those of the names come first."""
    found = [name for record in records if record.stream == stream for name in record.points[-1].learned]
    return sorted(dict.fromkeys(found), key=lambda name: name != TEXT)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    first, *rows = ("| " + " | ".join(line) + " |" for line in lines)
    return "\n".join([first, "|" + "---|" * len(lines[0]), *rows])


def write_figures(plan: Plan, records: Sequence[Measured], folder: Path) -> list[Path]:
    """Write a figure of each stream and classifier in which the reference was measured, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for stream in plan.streams:
        for classifier in classifiers_of(records, stream):
            if plan.reference.method in curves(records, stream, classifier):
                paths.append(folder / f"{stream}, {classifier.replace(':', ' ')}.svg")
                svg = frontier_svg(records, stream, plan.reference.method, classifier)
                paths[-1].write_text(svg, encoding="utf-8")
    return paths
