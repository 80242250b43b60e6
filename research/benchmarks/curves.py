"""Tables, sentences and figures of the docs from the cells of frontiers in `research/benchmarks/results/frontiers`."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from dulbe_peft.metrics.accuracy import percent
from dulbe_peft.photos.runs.run_settings import read_yaml
from research.comparison.frontier import Curve, curves
from research.comparison.frontier_page import frontier_svg, hull_table, loss_table, sentence
from research.comparison.measured import TEXT, Measured, read_all

FILES = Path(__file__).parents[2] / "examples" / "frontiers"
CELLS = Path(__file__).parent / "results" / "frontiers"
FROZEN, AUTO = "nothing trained", "`auto`"
REFERENCE, NOT_MEASURED = "DuLBE", "Not measured."
# Figures of the docs: name -> file, stream and methods.
FIGURES = {
    "frontier": ("handwriting", "16 images, ten tasks", ("frozen", "DuLBE", "LoRA", "merged LoRA", "InfLoRA", "SPU")),
}


def frontier(
    results: Path, file: str, stream: str, classifier: str = TEXT, methods: str = ""
) -> list[list[str]] | str:
    """Return the learned accuracy of each method at equal losses on never learned classes; see `loss_table`."""
    by_method = found(results, file, stream, classifier, methods.split(";") if methods else ())
    if REFERENCE not in by_method:
        return NOT_MEASURED
    return [[minus(cell) for cell in line] for line in loss_table(by_method, REFERENCE)]


def hulls(results: Path, file: str, stream: str, classifier: str = TEXT) -> list[list[str]]:
    """Return the places on each method's curve; see `hull_table`."""
    return hull_table(found(results, file, stream, classifier))


def said(results: Path, file: str, stream: str, classifier: str = TEXT, methods: str = "") -> str:
    """Return the sentence that says which curves DuLBE's is above and below, and where."""
    by_method = found(results, file, stream, classifier, methods.split(";") if methods else ())
    return minus(sentence(by_method, REFERENCE)) if REFERENCE in by_method else NOT_MEASURED


def cells(results: Path, files: str) -> str:
    """Return a bullet for each stream of some files: which of its cells are measured, and which are not."""
    return "\n".join(bullet for file in files.split(";") for bullet in _cells(results, file))


def _cells(results: Path, file: str) -> list[str]:
    content, bullets = read_yaml(FILES / f"{file}.yaml", "comparison"), []
    records = of_file(results, file)
    for stream in content["streams"]:
        whole, partly, none = [], [], []
        for method, settings in content["methods"].items():
            planned = len(content["seeds"]) * math.prod(len(values) for values in settings.get("choose", {}).values())
            done = sum((record.stream, record.method) == (stream, method) for record in records)
            group = none if not done else whole if done == planned else partly
            group.append(method if group is not partly else f"{method} ({done} of {planned} cells)")
        parts = (("measured: ", whole), ("in part: ", partly), ("not measured: ", none))
        text = "; ".join(words + ", ".join(names) for words, names in parts if names)
        bullets.append(f"- `{file}.yaml`, {stream}: {text}.")
    return bullets


def half(results: Path, file: str = "scales") -> str:
    """Return a bullet for each stream of a comparison with scales: accuracies by names with half of the update."""
    entries = json.loads((results / f"comparisons/{file}.json").read_text(encoding="utf-8"))["entries"]
    streams: dict[str, list[str]] = {}
    for entry in entries:
        point = next(each for each in entry["retention"]["scales"] if each["scale"] == 0.5)
        figures = f"{percent(point['learned'])} and {percent(point['unlearned'])}"
        streams.setdefault(entry["stream"], []).append(f"{entry['row']['method']} {figures}")
    return "\n".join(f"- {stream}: {', '.join(methods)}." for stream, methods in streams.items())


def minus(text: str) -> str:
    """Write negative numbers as the docs do."""
    return re.sub(r"(?<![\w.])-(?=\d)", "−", text)


def found(
    results: Path, file: str, stream: str, classifier: str = TEXT, methods: Sequence[str] = ()
) -> dict[str, Curve]:
    """Return the curves of a stream in the order of the methods in the file."""
    order = read_yaml(FILES / f"{file}.yaml", "comparison")["methods"]
    records = [record for record in of_file(results, file) if record.stream == stream]
    every = curves(with_equal_shares(records, methods or list(order)), stream, classifier)
    return {method: every[method] for method in order if method in every and (not methods or method in methods)}


def with_equal_shares(records: Sequence[Measured], methods: Sequence[str]) -> list[Measured]:
    """Return the records of some methods of a stream with the shares of each task's update that all of them have.

    With more shares than the others, a method's curve would be higher for that reason alone. Methods without a choice
    of shares do not count.
    """
    shares: dict[str, set[Any]] = {}
    chosen = [record for record in records if record.method in methods]
    for record in chosen:
        if "update_share" in record.point:
            shares.setdefault(record.method, set()).add(record.point["update_share"])
    common = set.intersection(*shares.values()) if shares else set()
    return [each for each in chosen if each.point.get("update_share") in common or "update_share" not in each.point]


@cache
def of_file(results: Path, file: str) -> tuple[Measured, ...]:
    return tuple(read_all(results / "frontiers" / file))


def figure(results: Path, name: str) -> str:
    """Return a figure of the docs as an SVG file."""
    file, stream, methods = FIGURES[name]
    records = with_equal_shares([each for each in of_file(results, file) if each.stream == stream], methods)
    return frontier_svg(sorted(records, key=lambda record: methods.index(record.method)), stream, REFERENCE)


def shares(results: Path) -> list[list[str]]:
    """Return the accuracies by names on learned and on never learned classes for each share that has every seed."""
    streams, columns = _shares(results)
    lines = [["", *columns, "seeds"]]
    for stream, cells in streams.items():
        seeds = _seeds(cells)
        whole = {share for share, by_seed in cells.items() if by_seed.keys() >= seeds}
        means = {
            share: ", ".join(f"{_mean(cells[share], seeds, name):.1f}" for name in ("value", "never_learned"))
            for share in whole
        }
        lines.append([stream, *(means.get(column, "") for column in columns), str(len(seeds))])
    return lines


def share_changes(results: Path) -> list[list[str]]:
    """Return the change of each accuracy by the rule, with other limits, and by all, in points: means over seeds."""
    measures = {"names": "value", "never learned": "never_learned"}
    measures |= {f"`{name}`": name for name in ("bayes", "pooled_bridge", "lda")}
    lines = [["", "share", *measures, "seeds"]]
    for stream, cells in _shares(results)[0].items():
        for share in (AUTO, f"{AUTO}, at most a quarter", f"{AUTO}, no limit", "all"):
            pair = [{s: row for s, row in cells.get(each, {}).items() if "lda" in row} for each in (share, FROZEN)]
            if seeds := pair[0].keys() & pair[1].keys():
                changes = [_mean(pair[0], seeds, name) - _mean(pair[1], seeds, name) for name in measures.values()]
                figures = [minus(f"{change:+.1f}") for change in changes]
                lines.append([stream, share, *figures, str(len(seeds))])
    return lines


def _shares(results: Path) -> tuple[dict[str, dict[str, dict[int, dict[str, Any]]]], list[str]]:
    """Return stream -> share -> seed -> row of `research.benchmarks.shares`, and the shares in their order."""
    rows = json.loads((results / "shares.json").read_text(encoding="utf-8"))["rows"]
    streams: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        streams.setdefault(row["stream"], {}).setdefault(row["share"], {})[row["seed"]] = row
    return streams, [FROZEN, "a quarter of each task", "a half", "all", AUTO]


def _seeds(cells: dict[str, dict[int, dict[str, Any]]]) -> set[int]:
    return cells[FROZEN].keys() & cells.get(AUTO, cells[FROZEN]).keys()


def _mean(by_seed: dict[int, dict[str, Any]], seeds: set[int], name: str) -> float:
    return sum(by_seed[seed][name] for seed in seeds) / len(seeds)


CURVES: dict[str, Any] = {each.__name__: each for each in (frontier, hulls, said, cells, half, shares, share_changes)}
