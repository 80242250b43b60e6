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


def trained(results: Path, file: str, stream: str, classifiers: str, methods: str = "") -> list[list[str]]:
    """One line a method of a comparison: A_last, and the interval of what training adds; bold where that is clear."""
    rows = compared(results, file)
    columns, names = classifiers.split(","), methods.split(",") if methods else methods_of(rows, stream)
    lines = [[named(method), *(gained(rows[stream, method, name]) for name in columns)] for method in names]
    return [[stream, *map(short, columns)], *lines]


def family(results: Path, file: str, stream: str, classifiers: str) -> list[list[str]]:
    """One line a method: A_last and the difference to no training, what the model still knows, what is trained."""
    rows, columns = compared(results, file), classifiers.split(",")
    lines = []
    for method in methods_of(rows, stream):
        each = [rows[stream, method, name] for name in columns]
        known, trainable = percent(each[0]["retention"]), f"{int(each[0]['trainable_parameters']):,}"
        lines.append([named(method), *(gained(row, interval=False) for row in each), known, trainable])
    return [["method", *map(short, columns), "still known", "trained"], *lines]


def ablation(results: Path, file: str, classifiers: str) -> list[list[str]]:
    """One line a row of an ablation: A_last and the interval of its difference to the reference."""
    rows = compared(results, f"ablations/{file}", drift="none")
    columns = classifiers.split(",")
    (stream,) = {key[0] for key in rows}
    lines = []
    for method in methods_of(rows, stream):
        cells = [rows[key] for name in columns if (key := (stream, method, name)) in rows]
        lines.append([method, *(written(row, "last_low", "last_high", percent(row["last"])) for row in cells)])
    return [["setting", *map(short, columns)], *lines]


def advice(results: Path, files: str) -> list[list[str]]:
    """One line a comparison: the regret of the advised row, and of the row that is best on average."""
    lines = []
    for file in files.split(","):
        scored = json.loads((results / "comparisons" / f"{file}.json").read_text(encoding="utf-8"))
        lines.append(
            [file, *(f"{100 * scored[key]:.1f}" for key in ("mean_regret", "largest_regret", "fixed_regret"))]
        )
    return [["comparison", "mean regret", "largest", "best on average"], *lines]


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


TABLES: dict[str, Any] = {table.__name__: table for table in (frozen, trained, family, ablation, advice)}
