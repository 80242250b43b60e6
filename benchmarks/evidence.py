"""The tables of accuracies in the docs, each from the files that it cites."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Row = dict[str, str]


def frozen(results: Path, classifiers: str, figure: str = "A_last", streams: str = "") -> list[list[str]]:
    """One line a stream and number of images, the best classifier bold; and the mean of all lines.

    `classifiers` and `streams` are names with commas between them; no `streams` are all there are.
    """
    found: dict[tuple[str, str], dict[str, float]] = {}
    for path in sorted(results.glob("frozen/*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if row["figure"] == figure and (not streams or row["stream"] in streams.split(",")):
                found.setdefault((row["stream"], row["counts"]), {})[row["classifier"]] = row["value"]
    columns = classifiers.split(",")
    lines = [
        [f"{stream}, {counts}", *best_bold([row[name] for name in columns])] for (stream, counts), row in found.items()
    ]
    means = [sum(row[name] for row in found.values()) / len(found) for name in columns]
    return [["images a class", *map(short, columns)], *lines, ["mean of the lines", *best_bold(means)]]


def trained(results: Path, file: str, classifiers: str) -> list[list[str]]:
    """One line a stream and method: A_last, and the interval of what training adds; bold where that is clear."""
    rows, columns = compared(results, file), classifiers.split(",")
    lines = [
        [f"{stream}: {named(method)}", *(gained(rows[stream, method, name]) for name in columns)]
        for stream, method in dict.fromkeys(key[:2] for key in rows)
    ]
    return [["", *map(short, columns)], *lines]


def family(results: Path, file: str, stream: str, classifiers: str) -> list[list[str]]:
    """One line a method: A_last and the difference to no training, what the model still knows, what is trained."""
    rows, columns = compared(results, file), classifiers.split(",")
    lines = []
    for method in methods_of(rows, stream):
        each = [rows[stream, method, name] for name in columns]
        known, trainable = percent(each[0]["retention"]), f"{int(each[0]['trainable_parameters']):,}"
        lines.append([named(method), *(gained(row, interval=False) for row in each), known, trainable])
    return [["method", *map(short, columns), "still known", "trained"], *lines]


def ablation(results: Path, files: str) -> list[list[str]]:
    """One line a row of the ablations with `bridge`: A_last and the interval of its difference to the reference."""
    lines = []
    for file in files.split(","):
        rows = compared(results, f"ablations/{file}", drift="none")
        for (_, method, classifier), row in rows.items():
            if classifier.startswith("bridge"):
                name = classifier.replace("bridge:", "") if method == "dulbe" else method
                lines.append([name, written(row, "last_low", "last_high", percent(row["last"]))])
    return [["setting", "bridge"], *lines]


def scales(results: Path) -> list[list[str]]:
    """One line a model and set of classes: accuracy of `text` by the share of what was learned that is used."""
    entries = json.loads((results / "comparisons/scales.json").read_text(encoding="utf-8"))["entries"]
    shares = [f"{row['scale']:g}" for row in entries[0]["retention"]["scales"]]
    lines = []
    for entry in entries:
        name = f"{entry['row']['method']}, {entry['stream']}"
        for kind, what in (("learned", "learned classes"), ("unlearned", "other characters")):
            lines.append([f"{name}: {what}", *(percent(row[kind]) for row in entry["retention"]["scales"])])
    return [["share of what was learned", *shares], *lines]


def compared(results: Path, file: str, drift: str = "linear") -> dict[tuple[str, str, str], Row]:
    """(stream, method, classifier) -> the row of a comparison; the one with this drift, where there are two."""
    path = results / (f"{file}.csv" if "/" in file else f"comparisons/{file}.csv")
    with path.open(newline="", encoding="utf-8") as lines:
        rows = sorted(csv.DictReader(lines), key=lambda row: row["drift"] == drift)
    return {(row["stream"], row["method"], short(row["classifier"])): row for row in rows}


def methods_of(rows: Iterable[tuple[str, str, str]], stream: str) -> list[str]:
    return list(dict.fromkeys(method for each, method, _ in rows if each == stream))


def named(method: str) -> str:
    return {"frozen": "nothing trained"}.get(method, method)


def short(classifier: str) -> str:
    """The classifier without the setting that all tables share."""
    return classifier.removesuffix(":features=1000")


def gained(row: Row, interval: bool = True) -> str:
    figure = percent(row["last"])
    if row["method"] == "frozen" or not row["gain"]:
        return figure
    if interval:
        return written(row, "gain_low", "gain_high", figure)
    text = f"{figure} ({signed(row['gain'])})"
    return f"**{text}**" if clear(row, "gain_low", "gain_high") else text


def written(row: Row, low: str, high: str, figure: str) -> str:
    if not row[low]:
        return figure
    text = f"{figure} ({signed(row[low])} to {signed(row[high])})"
    return f"**{text}**" if clear(row, low, high) else text


def clear(row: Row, low: str, high: str) -> bool:
    return float(row[low]) > 0 or float(row[high]) < 0


def percent(share: str) -> str:
    return f"{100 * float(share):.1f}"


def signed(share: str) -> str:
    text = f"{100 * float(share):+.1f}"
    return "0.0" if float(text) == 0 else text.replace("-", "−")


def best_bold(figures: list[float]) -> list[str]:
    texts = [f"{figure:.1f}" for figure in figures]
    best = max(map(float, texts))
    return [f"**{text}**" if float(text) == best else text for text in texts]


TABLES: dict[str, Any] = {table.__name__: table for table in (frozen, trained, family, ablation, scales)}
