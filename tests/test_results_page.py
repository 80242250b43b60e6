"""The tables of docs/results.md against the files that they cite."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def table(head: str) -> list[list[str]]:
    """The cells of the table whose first line begins so."""
    lines = PAGE[PAGE.index(f"| {head} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]


def measured(name: str) -> dict[tuple[str, ...], dict[str, str]]:
    """(stream, method, classifier) -> the row of the comparison; the one that follows drift, where there is one."""
    path = ROOT / "benchmarks" / "results" / "comparisons" / f"{name}.csv"
    with path.open(newline="", encoding="utf-8") as file:
        rows = sorted(csv.DictReader(file), key=lambda row: row["drift"] == "linear")
    return {(row["stream"], row["method"], row["classifier"].removesuffix(":features=1000")): row for row in rows}


def written(row: dict[str, str]) -> str:
    """A_last and, of a trained row, the interval of what training adds; bold where that is clear."""
    figure = f"{100 * float(row['last']):.1f}"
    if row["method"] == "frozen" or not row["gain"]:
        return figure
    low, high = (
        f"{100 * float(row[name]):+.1f}".replace("+0.0", "0.0").replace("-0.0", "0.0")
        for name in ("gain_low", "gain_high")
    )
    text = f"{figure} ({low} to {high})".replace("-", "−")
    return f"**{text}**" if float(row["gain_low"]) > 0 or float(row["gain_high"]) < 0 else text


@pytest.mark.parametrize(
    "head", ["1 image a class", "4 images a class", "16 images a class", "50 images a class (all)"]
)
def test_does_training_pay(head):
    found, stream = measured("handwriting"), head.partition(" a class")[0]
    (_, *classifiers), _, *rows = table(head)
    assert len(rows) == 3 and len(classifiers) == 6
    for title, *cells in rows:
        method = {"frozen": "frozen", "dulbe": "DuLBE", "lora": "LoRA"}[re.search(r"\(`(\w+)", title)[1]]
        assert cells == [written(found[stream, method, name]) for name in classifiers]


def test_all_at_once():
    found = measured("all-at-once")
    (_, *classifiers, _), _, *rows = table("LoRA, all at once")
    for title, *cells, known in rows:
        stream = title.partition(" a class")[0]
        assert cells == [written(found[stream, "LoRA", name]) for name in classifiers]
        assert known == f"{100 * float(found[stream, 'LoRA', 'text']['retention']):.1f}"
