"""Build the tables of accuracies in the docs from the result files that they cite."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from dulbe_peft.photos.runs.run_settings import read_yaml
from research.comparison.summary import FEW

COMPARISONS_FOLDER = Path(__file__).parents[2] / "examples" / "comparisons"

Row = dict[str, str]
Line = tuple[str, str]  # stream, and images per class
DEFAULT, KNOWN, UNKNOWN = "bayes", "still known", "not measured"
WORST = {  # the columns of `extremes` for each figure
    "A_last": ("accuracy", "furthest behind the best"),
    "ECE": ("calibration error", "largest"),
    "covered": ("coverage of sets of 90 %", "lowest"),
}
DRIFTS = ("none", "linear", "auto")  # the tables show the last of these that was measured


def frozen(
    results: Path,
    classifiers: str,
    figure: str = "A_last",
    streams: str = "",
    counts: str = "",
    by: str = "counts",
    folder: str = "frozen",
) -> list[list[str]]:
    """Return a line for each stream and number of images, or for each stream with `by=streams`, and the mean line.

    The best figure of a line is bold. `classifiers` and `counts` are separated by commas, `streams` by semicolons.
    Without `counts` or `streams`, all of them are shown.
    """
    columns, measured = classifiers.split(","), measured_lines(results, classifiers, figure, streams, counts, folder)

    def means(rows: Collection[dict[str, float]]) -> list[str]:
        best = {"ECE": min, "ECE_exact": None, "covered": None}.get(figure, max)
        return best_bold([sum(row[name] for row in rows) / len(rows) for name in columns], best)

    groups: dict[str, list[dict[str, float]]] = {}
    for (stream, count), row in measured.items():
        groups.setdefault(f"{stream}, {count}" if by == "counts" else stream, []).append(row)
    lines = [[name, *means(rows)] for name, rows in groups.items()]
    head = "images a class" if by == "counts" else "mean of the stream's lines"
    return [[head, *map(short, columns)], *lines, ["mean of the lines", *means(measured.values())]]


def extremes(
    results: Path, classifiers: str, figures: str, streams: str = "", counts: str = "", folder: str = "frozen"
) -> list[list[str]]:
    """Return a line for each classifier: the mean of each of the `figures`, and the line of `frozen` that is worst.

    For `A_last`, the worst line is the one in which the classifier is furthest behind the best of the `classifiers`.
    """
    head, lines = [""], [[f"`{short(name)}`"] for name in classifiers.split(",")]
    for figure in figures.split(";"):
        measured = measured_lines(results, classifiers, figure, streams, counts, folder)
        head += WORST[figure]
        for name, line in zip(classifiers.split(","), lines, strict=True):
            losses = {key: bad(figure, row, name) for key, row in measured.items()}
            where = max(losses, key=lambda key: losses[key])
            worst = losses[where] if figure == "A_last" else measured[where][name]
            mean = sum(row[name] for row in measured.values()) / len(measured)
            line += [f"{mean:.1f}", f"{worst:.1f} ({', '.join(where)})"]
    return [head, *lines]


def bad(figure: str, row: dict[str, float], name: str) -> float:
    """Return how bad a classifier's figure in a line is: an error itself, or what is missing to the best or to 100."""
    return {"A_last": max(row.values()) - row[name], "ECE": row[name], "covered": 100 - row[name]}[figure]


def lines_of(results: Path, figure: str = "A_last", folder: str = "real") -> dict[Line, dict[str, float]]:
    """Return (stream, images per class) -> classifier -> figure, whichever classifiers were measured."""
    lines: dict[Line, dict[str, float]] = {}
    for path in sorted(results.glob(f"{folder}/*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if row["figure"] == figure and row["value"] is not None:
                lines.setdefault((row["stream"], row["counts"]), {})[row["classifier"]] = row["value"]
    return lines


def measured_lines(
    results: Path, classifiers: str, figure: str = "A_last", streams: str = "", counts: str = "", folder: str = "real"
) -> dict[Line, dict[str, float]]:
    """Return (stream, images per class) -> classifier -> figure, where all the `classifiers` were measured."""
    columns = classifiers.split(",")
    return {
        key: {name: row[name] for name in columns}
        for key, row in lines_of(results, figure, folder).items()
        if set(columns) <= row.keys()
        and (not streams or key[0] in streams.split(";"))
        and (not counts or key[1] in counts.split(","))
    }


def untidy(results: Path, classifier: str, folder: str = "untidy") -> list[list[str]]:
    """Return a line for each stream and each state of the folders of `research.benchmarks.untidy`."""
    head, lines = ["stream, images a class"], dict[str, list[str]]()
    for figure in ("A_last", "ECE", "covered"):
        head.append(WORST[figure][0])
        for path in sorted(results.glob(f"{folder}/*.json")):
            for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
                if row["figure"] == figure and row["classifier"] == classifier:
                    text = "refused" if row["value"] is None else f"{row['value']:.1f}"
                    lines.setdefault(f"{row['stream']}, {row['counts']}", []).append(text)
    return [head, *([name, *cells] for name, cells in lines.items())]


def edges(results: Path, classifiers: str, folder: str = "edges") -> list[list[str]]:
    """Return mean accuracies for each edge case, and how far `bayes` is behind the best classifier of a stream."""
    accuracies: dict[tuple[str, str], dict[str, float]] = {}
    columns = classifiers.split(",")
    for path in sorted(results.glob(f"{folder}/*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            key = (f"{row['edge']}, {row['counts']}", row["stream"])
            accuracies.setdefault(key, {})[row["classifier"]] = row["value"]
    lines = []
    for name in dict.fromkeys(key[0] for key in accuracies):
        rows = [row for key, row in accuracies.items() if key[0] == name]
        cells = [f"{sum(row[each] for row in rows) / len(rows):.1f}" if each in rows[0] else "" for each in columns]
        gap = max(max(value for each, value in row.items() if each != "bayes") - row["bayes"] for row in rows)
        lines.append([name, *cells, signed(str(gap / 100))])
    return [["names, images a class", *map(short, columns), "furthest behind the best of a stream"], *lines]


def trained(results: Path, file: str, classifiers: str, streams: str = "", without: str = "") -> list[list[str]]:
    """Return a `whole_line` for each stream and method, except methods whose name ends with `without`."""
    rows = compared(results, file)
    lines = [
        [f"{stream}: {named(method)}", *whole_line(rows, stream, method, classifiers.split(","))]
        for stream, method in dict.fromkeys(key[:2] for key in rows)
        if not (without and method.endswith(without)) and (not streams or stream in streams.split(";"))
    ]
    return with_unmeasured([["", *whole_head(classifiers.split(","))], *lines], unmeasured(file, rows))


def family(results: Path, file: str, stream: str, classifiers: str, methods: str = "") -> list[list[str]]:
    """Return a `whole_line` for each method on one stream, or for `methods`, with mean gains instead of intervals."""
    rows, columns = compared(results, file), classifiers.split(",")
    lines = []
    for method in methods.split(";") if methods else methods_of(rows, stream):
        method_rows = [row for key, row in rows.items() if key[:2] == (stream, method)]
        if method != "frozen" and method_rows[0]["trainable_parameters"] == "0":  # it differs only in its classifier
            continue
        lines.append([named(method), *whole_line(rows, stream, method, columns, interval=False)])
    table = [["method", *whole_head(columns)], *lines]
    return table if methods else with_unmeasured(table, unmeasured(file, rows))


def unmeasured(file: str, rows: Iterable[tuple[str, str, str]]) -> list[str]:
    """Return the methods that the YAML file of a comparison lists and that have no row."""
    path = COMPARISONS_FOLDER / f"{file}.yaml"
    planned = read_yaml(path, "comparison")["methods"] if path.is_file() else {}
    return [method for method in planned if method not in {method for _, method, _ in rows}]


def with_unmeasured(table: list[list[str]], methods: Sequence[str]) -> list[list[str]]:
    """Add a line that says which methods are not measured, if there are any."""
    return [*table, *([[", ".join(methods), *[UNKNOWN] * (len(table[0]) - 1)]] if methods else [])]


def drifts(results: Path, files: str, method: str, classifiers: str) -> list[list[str]]:
    """Return a `whole_line` for each stream without training, and for each drift correction of a method.

    `files` are comparisons separated by semicolons, each with the name of its data: "drift=handwriting".
    """
    lines, columns = [], classifiers.split(",")
    for file, _, data in (part.partition("=") for part in files.split(";")):
        rows = {drift: compared(results, file, drift) for drift in DRIFTS}
        for stream in dict.fromkeys(key[0] for key in rows["none"]):
            where = f"{data}, {stream}"
            lines.append([f"{where}: {named('frozen')}", *whole_line(rows["none"], stream, "frozen", columns)])
            lines += [[f"{where}: {drift}", *whole_line(rows[drift], stream, method, columns)] for drift in DRIFTS]
    return [["", *whole_head(columns)], *lines]


def gaps(results: Path, classifiers: str) -> list[list[str]]:
    """Return a line for each gap and method: mean A_last, zero-shot accuracy on other classes, and mean cosines."""
    by_gap: dict[str, dict[str, dict[str, list[float]]]] = {}
    for path in sorted(results.glob("gap/*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            where, _, what = row["what"].partition(": ")
            gap, _, how = where.partition(", ")
            by_gap.setdefault(gap, {}).setdefault(how.rpartition(",")[0], {}).setdefault(what, []).append(row["value"])
    lines, columns = [], classifiers.split(",")
    for gap, ways in sorted(by_gap.items()):
        cosines = {name: values[0] for name, values in ways.pop("").items()}
        pairs = (("own mean", "other means"), ("own name", "other names"))
        angles = [f"{cosines[own]:.2f}, {cosines[other]:.2f}".replace("-", "−") for own, other in pairs]
        for how, figures in sorted(ways.items(), key=lambda way: way[0] != "frozen"):
            means = {name: sum(values) / len(values) for name, values in figures.items()}
            best = max((name for name in means if name not in (DEFAULT, KNOWN)), key=lambda name: means[name])
            cells = [f"{means[name]:.1f}" for name in (DEFAULT, *columns)]
            known = f"{means[KNOWN]:.1f}" if KNOWN in means else UNKNOWN
            lines.append([f"{gap}: {named(how)}", *cells, f"{best}: {means[best]:.1f}", known, "; ".join(angles)])
    cosine = "an image's cosine with its class mean, with others; with its name, with others"
    return [["", *whole_head(columns), cosine], *lines]


def whole_head(columns: list[str]) -> list[str]:
    """Return the columns of all tables with training: classifiers, the best other one, and zero-shot accuracy."""
    return [DEFAULT, *map(short, columns), "the best other", KNOWN]


def whole_line(
    rows: dict[tuple[str, str, str], Row], stream: str, method: str, columns: list[str], interval: bool = True
) -> list[str]:
    """Return the cells of `whole_head` for a stream and method. Variants of the default do not count as other ones."""
    by_classifier = {name: row for (where, by, name), row in rows.items() if (where, by) == (stream, method)}
    cells = [gained(by_classifier.get(name), interval) for name in (DEFAULT, *columns)]
    others = [name for name in by_classifier if name.partition(":")[0] != DEFAULT]
    best = max(others, key=lambda name: float(by_classifier[name]["last"]), default=None)
    shown = [by_classifier[name] for name in (DEFAULT, *columns, best) if name in by_classifier]
    measured = sorted({float(row["retention"]) for row in shown if row["retention"]})
    # Classifiers with other settings have another run.
    known = (
        " to ".join(dict.fromkeys(percent(str(each)) for each in (measured[0], measured[-1]))) if measured else UNKNOWN
    )
    return [*cells, f"{best}: {gained(by_classifier[best], interval)}" if best else UNKNOWN, known]


def costs(results: Path, kinds: str, file: str = "family") -> list[list[str]]:
    """Return a line for each strategy or classifier of `file`; `kinds` are prefixes of the figures to show."""
    columns, by_name = kinds.split(","), dict[str, dict[str, str]]()
    for row in json.loads((results / f"{file}.json").read_text(encoding="utf-8"))["rows"]:
        name, _, what = row["what"].partition(": ")
        for kind in columns:
            if what.startswith(kind):
                figure = row["value"] if "value" in row else row["ratio"]["wall"]["median"]
                by_name.setdefault(name, {})[kind] = f"{figure:.2f}"
    return [["", *columns], *([name, *(row.get(kind, "") for kind in columns)] for name, row in by_name.items())]


def gpu(results: Path, files: str = "gpu") -> list[list[str]]:
    """Return a line for each model, batch size and precision: milliseconds, GiB and images a second of both sides."""
    lines, timm = dict[str, dict[str, float]](), "timm's images"
    for file in files.split(","):
        for row in json.loads((results / f"{file}.json").read_text(encoding="utf-8"))["rows"]:
            where, _, what = row["what"].partition(": ")
            if not where.startswith("planning"):
                lines.setdefault(where.partition(", ")[2], {})[what] = row["value"]
    head = ["", "step, ms (LoRA)", "ratio", "memory of a step, GiB (LoRA)", "encoding, images/s (timm)"]
    rows = [
        [
            where,
            f"{line['DualModeLora, time']:.0f} ({line['LoRA, time']:.0f})",
            f"{line['ratio']:.2f}",
            f"{line['DualModeLora, memory'] / 1024:.1f} ({line['LoRA, memory'] / 1024:.1f})",
            f"{line['images']:,.0f} ({line[timm]:,.0f})" if timm in line else "",
        ]
        for where, line in lines.items()
    ]
    return [head, *rows]


def beside(results: Path, folder: str, figures: str, counts: str = "") -> list[list[str]]:
    """Return a line for each stream and number of images, with a column for each figure: means over the draws."""
    by_line: dict[tuple[str, ...], dict[str, float]] = {}
    for parts, values in figures_of(results, folder, r"(.+), (\S+) images a class, (.+): (.+)"):
        if not counts or parts[1] in counts.split(","):
            by_line.setdefault((parts[2], parts[1]), {})[parts[3]] = values[0]
    columns = figures.split(";")
    cells = [[f"{row[name]:.1f}" if name in row else "" for name in columns] for row in by_line.values()]
    return [["data", "images a class", *columns], *([*key, *row] for key, row in zip(by_line, cells, strict=True))]


def constants(results: Path, figures: str, folder: str = "constants") -> list[list[str]]:
    """Return a line for each stream and value of a constant, with a column for each figure: means over the draws."""
    by_line: dict[tuple[str, str, str], dict[str, float]] = {}
    for path in sorted(results.glob(f"{folder}/*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            key = row["stream"], row["counts"], row.get("constant", "")
            by_line.setdefault(key, {})[row["figure"]] = row["value"]
    columns = figures.split(";")
    cells = [[f"{row[name]:.1f}" if name in row else "" for name in columns] for row in by_line.values()]
    head = ["data", "images a class", "constant", *columns]
    return [head, *([*key, *row] for key, row in zip(by_line, cells, strict=True))]


def estimates(results: Path, classifiers: str, counts: str) -> list[list[str]]:
    """Return a line for each stream and number of images, with "test accuracy / estimate" for each classifier."""
    by_line: dict[tuple[str, ...], dict[str, dict[str, float]]] = {}
    for parts, values in figures_of(results, "estimates", r"(.+), (\S+) images a class, (.+): (.+)"):
        if parts[1] in counts.split(","):
            by_line.setdefault((parts[2], parts[1]), {}).setdefault(short(parts[0]), {})[parts[3]] = values[0]
    columns = classifiers.split(",")
    cells = [
        [f"{row[name]['test']:.1f} / {row[name]['estimate']:.1f}" for name in columns] for row in by_line.values()
    ]
    head = ["data", "images a class", *(f"`{name}`" for name in columns)]
    return [head, *([*key, *row] for key, row in zip(by_line, cells, strict=True))]


def errors(results: Path, classifier: str, files: str) -> list[list[str]]:
    """Return a line for each number of images: how far estimates are from tests, over the data in `files`."""
    by_line: dict[str, dict[str, dict[str, float]]] = {}
    for parts, values in figures_of(results, "estimates", r"(.+), (\S+) images a class, (.+): (.+)", files):
        if parts[0] == classifier:
            by_line.setdefault(parts[1], {}).setdefault(parts[2], {})[parts[3]] = values[0]
    lines = []
    for count, rows in sorted(by_line.items(), key=lambda line: (len(line[0]), line[0])):
        by_data = {data: row["estimate"] - row["test"] for data, row in rows.items()}
        mean = sum(map(abs, by_data.values())) / len(by_data)
        ends = [extreme(by_data, key=lambda data: by_data[data]) for extreme in (min, max)]
        far = [f"{by_data[data]:+.1f} ({data})".replace("-", "−", 1) for data in ends]
        lines.append([count, str(len(by_data)), f"{mean:.1f}", *far])
    return [["images a class", "lines", "mean error", "furthest too low", "furthest too high"], *lines]


def order(results: Path, classifier: str) -> list[list[str]]:
    """Return a line for each stream: the range of the percentage of answers that change, over draws and counts."""
    by_stream: dict[str, dict[str, list[float]]] = {}
    for path in sorted(results.glob("order/*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if row["classifier"] == classifier:
                by_stream.setdefault(row["stream"], {}).setdefault(row["figure"], []).extend(row["each"])
    lines = [
        [stream, *(f"{min(each):.0f} to {max(each):.0f} %" for each in figures.values())]
        for stream, figures in sorted(by_stream.items())
    ]
    return [["stream", *next(iter(by_stream.values()))], *lines]


def suggest(results: Path, labels: str, ways: str, folder: str = "suggest") -> list[list[str]]:
    """Return a line for each stream and number of labels per class: accuracy by selection method, the best in bold."""
    by_line: dict[tuple[str, str], dict[str, float]] = {}
    for path in sorted(results.glob(f"{folder}/*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if str(row["labels"]) in labels.split(",") and row["way"] in ways.split(","):
                by_line.setdefault((row["stream"], str(row["labels"])), {})[row["way"]] = row["value"]
    lines = [[*key, *best_bold(list(row.values()), max)] for key, row in by_line.items()]
    return [["stream", "labels a class", *next(iter(by_line.values()))], *lines]


def figures_of(
    results: Path, folder: str, pattern: str, files: str = "*"
) -> Iterator[tuple[tuple[str, ...], list[float]]]:
    """Yield the parts of the name of each figure in a folder, with its mean and the values of all draws."""
    for path in sorted((results / folder).glob(f"{files}.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            match = re.fullmatch(pattern, row["what"])
            if match is None:
                raise ValueError(f"{path} has a figure that does not match {pattern!r}: {row['what']}")
            yield match.groups(), [row["value"], *row["each"]]


def compared(results: Path, file: str, drift: str | None = None) -> dict[tuple[str, str, str], Row]:
    """Return (stream, method, classifier) -> row of a comparison, with this drift or the last measured of `DRIFTS`."""
    with (results / f"comparisons/{file}.csv").open(newline="", encoding="utf-8") as lines:
        rows = sorted(csv.DictReader(lines), key=lambda row: DRIFTS.index(row["drift"]))
    rows = [row for row in rows if drift in (None, row["drift"]) or row["method"] == "frozen"]
    return {(row["stream"], row["method"], short(row["classifier"])): row for row in rows}


def methods_of(rows: Iterable[tuple[str, str, str]], stream: str) -> list[str]:
    return list(dict.fromkeys(method for each, method, _ in rows if each == stream))


def named(method: str) -> str:
    return {"frozen": "nothing trained"}.get(method, method)


def short(classifier: str) -> str:
    """Return the classifier without the setting that is the same in all tables."""
    return classifier.removesuffix(":features=1000")


def gained(row: Row | None, interval: bool = True) -> str:
    """Format A_last and the gain from training: bold if clearly positive, italic if clearly negative."""
    if row is None:
        return UNKNOWN
    figure = percent(row["last"])
    if row["method"] == "frozen" or not row["gain"]:
        return figure
    added = f"{signed(row['gain_low'])} to {signed(row['gain_high'])}" if interval else signed(row["gain"])
    text = f"{figure} ({added})"
    if int(row["seeds"]) <= FEW:  # marked, because an interval from so few seeds says little
        return f"{text} †"
    return f"**{text}**" if float(row["gain_low"]) > 0 else f"*{text}*" if float(row["gain_high"]) < 0 else text


def percent(share: str) -> str:
    return f"{100 * float(share):.1f}"


def signed(share: str) -> str:
    text = f"{100 * float(share):+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def best_bold(figures: list[float], best: Callable[..., float] | None) -> list[str]:
    texts = [f"{figure:.1f}" for figure in figures]
    return [f"**{text}**" if best and float(text) == best(map(float, texts)) else text for text in texts]


COMPARISONS = (trained, family, drifts, gaps)  # the tables with the columns of `whole_head`
_TABLES = (
    frozen,
    extremes,
    untidy,
    edges,
    *COMPARISONS,
    costs,
    gpu,
    beside,
    constants,
    estimates,
    errors,
    order,
    suggest,
)
TABLES: dict[str, Any] = {table.__name__: table for table in _TABLES}
