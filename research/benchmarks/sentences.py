"""Write the sentences of the docs that state measured figures from the files in `research/benchmarks/results`.

Each function returns Markdown for a marker of `research.benchmarks.table`. Differences of accuracies are in points. A
range in brackets is over the lines of a table unless the sentence says otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from research.benchmarks import real
from research.benchmarks.evidence import (
    DEFAULT,
    Line,
    Row,
    bad,
    compared,
    figures_of,
    lines_of,
    measured_lines,
    named,
    percent,
    short,
    signed,
)

RIVALS = (
    *("text", "bridge", "pooled_bridge", "prototype", "lda", "gda", "ridge", "ranpac:features=1000"),
    *("tip_adapter", "mixed_prototypes", "linear_probe"),
)
CALIBRATED = ("lda", "ranpac:features=1000", DEFAULT)
NONE, OWN = "no names", "own names"
ALL_LINES = "../research/benchmarks/tables.md#features-of-published-networks"


def plus(points: float) -> str:
    """Format a difference in points with its sign."""
    return signed(str(points / 100))


def spread(values: Iterable[float], form: Callable[[float], str] = plus, over: str = "lines") -> str:
    """Format the mean of some values and their range, and say over what: "+1.2 (lines: −0.3 to +2.0)"."""
    each = list(values)
    return f"{form(fmean(each))} ({over}{': ' * bool(over)}{form(min(each))} to {form(max(each))})"


def one(value: float) -> str:
    return f"{value:.1f}"


def where(line: Line) -> str:
    return f"{line[0]}, {line[1]} {'image' if line[1] == '1' else 'images'}"


def leads(results: Path, counts: str, folder: str = "real") -> list[list[str]]:
    """Return a line for each other classifier: how far `bayes` is ahead of it in four situations."""
    wanted = counts.split(",")
    lines = {key: row for key, row in lines_of(results, folder=folder).items() if key[1] in wanted and DEFAULT in row}
    groups: dict[str, Callable[[Line], bool]] = {
        "own names, one image": lambda key: OWN in key[0] and key[1] == "1",
        "noisy names, one image": lambda key: "noise" in key[0] and key[1] == "1",
        "names, more images": lambda key: NONE not in key[0] and key[1] != "1",
        "no names, one image": lambda key: NONE in key[0] and key[1] == "1",
        "no names, more images": lambda key: NONE in key[0] and key[1] != "1",
    }
    table = [["", *groups]]
    for rival in RIVALS:
        cells = []
        for belongs in groups.values():
            ahead = [row[DEFAULT] - row[rival] for key, row in lines.items() if belongs(key) and rival in row]
            cells.append(spread(ahead, over="") if ahead else "")
        table.append([f"`{short(rival)}`", *cells])
    return table


def published(results: Path, counts: str) -> str:
    """Return sentences on all lines of published features."""
    wanted = counts.split(",")
    number, means, worst = dict[str, int](), dict[str, str](), dict[str, str]()
    for figure in ("A_last", "ECE", "covered"):
        rows = measured_lines(results, ",".join(CALIBRATED), figure, counts=counts)
        ends = [_worst(figure, rows, name) for name in CALIBRATED]
        number[figure] = len(rows)
        means[figure] = _listed([fmean(row[name] for row in rows.values()) for name in CALIBRATED])
        values = [rows[line][name] for line, name in zip(ends, CALIBRATED, strict=True)]
        worst[figure] = f"{_listed(values)} ({where(ends[-1])})"
    lines = {key: row for key, row in lines_of(results).items() if key[1] in wanted and DEFAULT in row}
    several = {key: row for key, row in lines.items() if key[1] != "1"}
    behind = {key: max(row.values()) - row[DEFAULT] for key, row in several.items()}
    line = max(behind, key=lambda key: behind[key])
    best = max(several[line], key=lambda name: several[line][name])
    chosen = sum(stream.split(", ")[0] in real.CHOSEN for stream, _ in behind)
    names = ", ".join(f"`{short(name)}`" for name in CALIBRATED)
    return (
        f"- **From two images on**, `{DEFAULT}` is the best of all in {sum(gap <= 0 for gap in behind.values())} of "
        f"{len(behind)} lines, and at most {one(behind[line])} points behind (`{short(best)}`; {where(line)}). Of "
        f"these lines, {chosen} are of streams on which its settings were chosen.\n"
        f"- **With one image and right names**, it is ahead {_ahead(lines, OWN)}.\n"
        f"- **With one image and no names**, it is ahead {_ahead(lines, NONE)}.\n\n"
        f"For {names}, the mean accuracy over all {number['A_last']} lines is {means['A_last']} %. The expected "
        f"calibration error is {means['ECE']} points, at worst {worst['ECE']}. Sets of 90 % hold the right class for "
        f"{means['covered']} % of the images, at worst for {worst['covered']}."
    )


def _ahead(lines: dict[Line, dict[str, float]], names: str) -> str:
    """Return how far `bayes` is ahead of the closest other classifiers with one image."""
    rivals = {"the names alone": "text", "`mixed_prototypes`": "mixed_prototypes"}
    if names == NONE:
        rivals = {"`lda`": "lda", "`ridge`": "ridge", "`ranpac`": "ranpac:features=1000"}
        rivals["logistic regression"] = "linear_probe"
    ahead = {
        title: [
            row[DEFAULT] - row[name] for key, row in lines.items() if names in key[0] and key[1] == "1" and name in row
        ]
        for title, name in rivals.items()
    }
    return ", ".join(f"of {title} by {spread(each)}" for title, each in ahead.items() if each)


def _worst(figure: str, rows: dict[Line, dict[str, float]], name: str) -> Line:
    return max(rows, key=lambda line: bad(figure, rows[line], name))


def _listed(values: Sequence[float]) -> str:
    *first, last = map(one, values)
    return f"{', '.join(first)} and {last}"


def chosen_on(results: Path) -> str:
    """Return which streams were used to choose settings."""
    chosen = "; ".join(f"`{name}`" for name in real.CHOSEN)
    return (
        f"Settings were chosen on held-out training images of some streams: {chosen}. The other streams confirmed "
        "them.\nThe training images of `cars`, and all of `imagenet-even`, are means of ten augmented views."
    )


def changes(results: Path, files: str, methods: str = "", streams: str = "", classifiers: str = "") -> str:
    """Return a bullet for each stream and method of comparisons: the differences whose interval excludes zero.

    They are differences to the same classifier without training, or to DuLBE if this is the comparison's reference; a
    classifier that then chose another learning rate is followed by both. The accuracy on classes that are never
    learned is that of the runs shown, before and after. Arguments are lists, separated by semicolons; a file can be
    followed by the name of its data: "drift=handwriting".
    """
    bullets = []
    for file, _, data in (part.partition("=") for part in files.split(";")):
        rows, wanted = compared(results, file), dict[tuple[str, str], list[Row]]()
        for (stream, method, name), row in rows.items():
            lists = ((methods, method), (streams, stream), (classifiers, name))
            if row["gain"] and all(not listed or each in listed.split(";") for listed, each in lists):
                wanted.setdefault((stream, method), []).append(row)
        several = [len({pair[place] for pair in wanted}) > 1 for place in (0, 1)]
        for pair, these in wanted.items():
            shown = [data, *(named(part) for part, more in zip(pair, several, strict=True) if more)]
            bullets.append(": ".join(filter(None, [", ".join(filter(None, shown)), changed(these, rows)])))
    return "\n".join(f"- {bullet}." for bullet in bullets)


def changed(rows: Sequence[Row], every: dict[tuple[str, str, str], Row]) -> str:
    """Return the clear differences of a method's rows, how many are not clear, and what the model still knows."""
    clear = [row for row in rows if float(row["gain_low"]) > 0 or float(row["gain_high"]) < 0]
    texts = [
        f"`{short(row['classifier'])}` {signed(row['gain'])} ({signed(row['gain_low'])} to {signed(row['gain_high'])})"
        f"{_other_rate(row, every)}"
        for row in clear
    ]
    text = ", ".join(texts) or "no clear difference"
    shown = clear or rows
    known = sorted({(row["retention_before"], row["retention"]) for row in shown if row["retention"]})
    if known:
        before, after = percent(known[0][0]), [percent(each) for _, each in (known[0], known[-1])]
        text += f"; known {before} → {' to '.join(dict.fromkeys(after))}"
    return text


def differences(results: Path, file: str, classifier: str) -> str:
    """Return a bullet for each stream: the accuracy of a classifier, and its difference to the reference."""
    rows = [row for row in compared(results, file).values() if row["classifier"] == classifier and row["last_low"]]
    ends = ("last_difference", "last_low", "last_high")
    return "\n".join(
        "- {}: {} %, {} ({} to {}).".format(row["stream"], percent(row["last"]), *(signed(row[end]) for end in ends))
        for row in rows
    )


def _other_rate(row: Row, every: dict[tuple[str, str, str], Row]) -> str:
    """Return both rates if DuLBE is the reference, and chose another one for the same classifier."""
    usual = every.get((row["stream"], "DuLBE", short(row["classifier"])))
    if usual is None or usual["gain"] or "" in (usual["chosen"], row["chosen"]) or usual["chosen"] == row["chosen"]:
        return ""
    own, other = (float(each["chosen"].partition("=")[2]) for each in (row, usual))
    return f" with the rate {own:g} instead of {other:g}"


def small(results: Path, classifiers: str) -> str:
    """Return sentences on the lines of the small models, where all of the `classifiers` were measured."""
    names = classifiers.split(",")
    lines = measured_lines(results, classifiers, folder="frozen")
    behind = {key: max(row[name] for name in names) - row[DEFAULT] for key, row in lines.items()}
    far = sorted((key for key in behind if behind[key] > 1.5), key=lambda key: -behind[key])
    errors = {key: row[DEFAULT] for key, row in lines_of(results, "ECE", "frozen").items() if key in lines}
    line = max(errors, key=lambda key: errors[key])
    means = ", ".join(f"`{short(name)}` {one(fmean(row[name] for row in lines.values()))}" for name in names)
    listed = "; ".join(f"{one(behind[key])} on {where(key)}" for key in far)
    return (
        f"Mean accuracy over {len(lines)} lines, in percent: {means}. `{DEFAULT}` is more than 1.5 points behind the "
        f"best in {len(far)} lines: {listed}. Its expected calibration error is {one(fmean(errors.values()))} points, "
        f"at worst {one(errors[line])} ({where(line)})."
    )


def keeping(results: Path, classifiers: str, counts: str) -> str:
    """Return the mean accuracies of classifiers that keep the features of all images."""
    lines = measured_lines(results, classifiers, counts=counts, folder="frozen")
    each = ((name, fmean(row[name] for row in lines.values())) for name in classifiers.split(","))
    means = ", ".join(f"`{short(name)}` {one(mean)}" for name, mean in each)
    streams = len({stream for stream, _ in lines})
    return f"On {streams} small streams with {counts.replace(',', ' or ')} images of each class, in percent: {means}."


def estimated(results: Path, classifier: str) -> str:
    """Return how far estimates are from tests, and how wide their intervals are."""
    draws: dict[str, dict[tuple[str, str], dict[str, list[float]]]] = {"published": {}, "small": {}}
    for kind in draws:
        for path in sorted((results / "estimates").glob("*.json")):
            if path.name.startswith("real-") == (kind == "published"):
                for parts, values in figures_of(results, "estimates", ESTIMATE, path.stem):
                    if parts[0] == classifier:
                        draws[kind].setdefault((parts[2], parts[1]), {})[parts[3]] = values
    errors = {
        kind: {key: row["estimate"][0] - row["test"][0] for key, row in lines.items()} for kind, lines in draws.items()
    }
    held, widths = 0, list[float]()
    for row in draws["published"].values():
        for test, low, high in zip(row["test"][1:], row["low"][1:], row["high"][1:], strict=True):
            held += low <= test <= high
            widths.append(high - low)
    ends = {kind: [choose(each, key=lambda key: each[key]) for choose in (min, max)] for kind, each in errors.items()}
    far = {kind: [f"{plus(errors[kind][line])} on {where(line)}" for line in ends[kind]] for kind in draws}
    sizes = {kind: fmean(abs(error) for error in errors[kind].values()) for kind in draws}
    wide = spread(widths, lambda width: f"{width:.0f}", "draws")
    return (
        f"With published features, its error is {one(sizes['published'])} points on average over "
        f"{len(errors['published'])} lines ({' and '.join(far['published'])} at the ends). Its interval contained the "
        f"test accuracy in {held} of {len(widths)} draws, but it is {wide} points wide. On small models, mostly with "
        f"former rules, the error is {one(sizes['small'])} points ({' and '.join(far['small'])})."
    )


ESTIMATE = r"(.+), (\S+) images a class, (.+): (.+)"


def refused(results: Path) -> str:
    """Return what rejection and prediction sets did on small models, and how novelty separates published features."""
    drawn: dict[str, dict[Line, list[float]]] = {}
    for parts, values in figures_of(results, "rejection", ESTIMATE):
        drawn.setdefault(parts[3], {})[parts[2], parts[1]] = values

    def ends(figure: str) -> str:
        lines = drawn[figure]
        low, high = (choose(lines, key=lambda key: lines[key][0]) for choose in (min, max))
        return f"{one(lines[low][0])} ({where(low)}) to {one(lines[high][0])} % ({where(high)})"

    each = {kind: [value for values in drawn[kind].values() for value in values[1:]] for kind in ("known refused",)}
    lines: dict[Line, dict[str, float]] = {}
    for parts, values in figures_of(results, "rejection/real", ESTIMATE):
        lines.setdefault((parts[2], parts[1]), {})[parts[3]] = values[0]
    found = {key: row["near, novelty"] for key, row in lines.items()}
    over = {
        kind: {key: found[key] - lines[key][f"near, {kind}"] for key in lines} for kind in ("probability", "energy")
    }
    said = [row["near, said"] - found[key] for key, row in lines.items() if "near, said" in row]
    held, told = inside(results)
    refusals = [row["known refused"] for row in lines.values() if "known refused" in row]
    below = {kind: sum(gap < 0 for gap in gaps.values()) for kind, gaps in over.items()}
    four = {key: value for key, value in found.items() if key[1] == "4"}
    hard, easy = (choose(four, key=lambda key: four[key]) for choose in (min, max))
    return (
        f"On small models, with 70 % of the classes known, `--coverage 0.95` gave sets with the right class for "
        f"{ends('covered')} of the test images of known classes. `--reject 0.05` refused {ends('known refused')} of "
        f"these images, and in single draws {one(min(each['known refused']))} to {one(max(each['known refused']))} %. "
        f"Of other classes of the same data, it refused {ends('near found')}.\n\n"
        f"On published features, with half of the classes known, `--reject 0.05` refused {spread(refusals, one)} % of "
        f"the known images. The area under the ROC curve of novelty is larger than that of the largest probability by "
        f"{spread(over['probability'].values())} points and than that of the energy by "
        f"{spread(over['energy'].values())}; it is smaller in {below['probability']} and {below['energy']} of "
        f"{len(lines)} lines. With four images of each class it is {one(four[hard])} % ({hard[0]}) to "
        f"{one(four[easy])} % ({easy[0]}). `classifier.roc_area` estimates it from left-out images and classes. The "
        f"estimate is too high by {spread(said)} points. `classifier.roc_interval` contains the area in {held} of "
        f"{told} draws."
    )


def inside(results: Path) -> tuple[int, int]:
    """Return in how many draws the interval of the area under the ROC curve contains the area, and of how many."""
    draws: dict[Line, dict[str, list[float]]] = {}
    for parts, values in figures_of(results, "rejection/real", ESTIMATE):
        draws.setdefault((parts[2], parts[1]), {})[parts[3]] = values[1:]
    ends = [
        (row["near, low"], row["near, novelty"], row["near, high"]) for row in draws.values() if "near, low" in row
    ]
    each = [low <= area <= high for line in ends for low, area, high in zip(*line, strict=True)]
    return sum(each), len(each)


def untidied(
    results: Path, classifier: str, counts: str = "8", copies: str = "4", share: str = "0.1", names: str = "0.2"
) -> str:
    """Return what near copies of the images, wrong labels and wrong names do, with ranges over the streams."""
    held, errors, right = (lines_of(results, figure, "untidy") for figure in ("covered", "ECE", "A_last"))

    def ends(lines: dict[Line, dict[str, float]], kind: str) -> str:
        ending = f", {kind}" if kind else " names"
        values = [row[classifier] for key, row in lines.items() if key[1] == counts and key[0].endswith(ending)]
        return f"{one(min(values))} to {one(max(values))}"

    data = {stream.partition(",")[0] for stream, number in errors if number == counts}
    exchanged = {key: row[classifier] for key, row in right.items() if key[0].endswith(f", names:{names}")}
    lost = [right[key[0].rpartition(", ")[0], key[1]][classifier] - value for key, value in exchanged.items()]
    return (
        f"On {len(data)} data sets of published features with {counts} images of each class, sets of 90 % held the "
        f"right class of {ends(held, f'bursts:{copies}')} % of the test images with {copies} near copies of each "
        f"image, and of {ends(held, f'groups:{copies}')} % with their groups. With {100 * float(share):.0f} % wrong "
        f"labels, the calibration error was {ends(errors, f'labels:{share}')} points instead of {ends(errors, '')}. "
        f"With {100 * float(names):.0f} % of the names exchanged, {one(min(lost))} to {one(max(lost))} points of "
        f"accuracy are lost ([all lines]({ALL_LINES}))."
    )


def suggested(results: Path, labels: str = "2") -> str:
    """Return how much better `suggest` is than random photographs, and than as many random ones of each class."""
    ways: dict[str, dict[str, float]] = {}
    for path in sorted(results.glob("suggest/*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if str(row["labels"]) == labels:
                ways.setdefault(row["stream"], {})[row["way"]] = row["value"]
    drawn = {key[0]: row[DEFAULT] for key, row in lines_of(results).items() if key[1] == labels and DEFAULT in row}
    published = [stream for stream in ways if re.search(r", (own|no) names$", stream)]
    gains = {
        kind: {s: ways[s]["suggest"] - ways[s]["at random"] for s in ways if (s in published) == chosen}
        for kind, chosen in (("published", True), ("small", False))
    }
    even = {stream: ways[stream]["suggest"] - drawn[stream] for stream in published if stream in drawn}
    listed = ", ".join(f"{stream} {plus(gap)}" for stream, gap in even.items())
    ours, theirs = (spread(gains[kind].values(), over="streams") for kind in ("published", "small"))
    return (
        f"With {labels} labels for each class on average, `dulbe-peft suggest` is better than random photographs by "
        f"{ours} points on {len(gains['published'])} streams of published features, and by {theirs} on small models. "
        f"Most of this is balance, because random photographs miss classes: compared with {labels} random photographs "
        f"of each class, which needs their labels, the difference is {listed}."
    )


def parts(results: Path, file: str = "parts") -> list[list[str]]:
    """Return a table of what the names lose if a part of DuLBE is left out, from `examples/parts.py`."""
    systems = json.loads((results / f"{file}.json").read_text(encoding="utf-8"))["accuracies"]
    whole = systems["DuLBE"]["all"]
    digits = ("new", "old", "never learned", "all")
    rows = [["accuracy, %", *digits, f"worse than DuLBE on all, of {len(whole)} seeds"]]
    for name, figures in systems.items():
        worse = "" if name == "DuLBE" else str(sum(map(float.__lt__, figures["all"], whole)))
        rows.append([name, *(one(fmean(figures[each])) for each in digits), worse])
    return rows


_SENTENCES = (
    leads,
    published,
    chosen_on,
    changes,
    differences,
    small,
    keeping,
    estimated,
    refused,
    suggested,
    untidied,
    parts,
)
SENTENCES: dict[str, Any] = {each.__name__: each for each in _SENTENCES}
