"""Write the tables and sentences of the docs from the files in `research/benchmarks/results`, between markers.

<!-- table: NAME key=value ... -->      `figures`, or a function of `evidence`, `sentences` or `curves`
<!-- end of table -->
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from research.benchmarks import curves, evidence, sentences
from research.verification.reproduced import reproduced_table

ROOT = Path(__file__).parents[2]
EVERY_LINE = ROOT / "research" / "benchmarks" / "tables.md"  # the tables that are too long for the docs
PAGES = [
    ROOT / "README.md",
    ROOT / "examples" / "README.md",
    EVERY_LINE.with_name("README.md"),
    EVERY_LINE,
    *sorted((ROOT / "docs").glob("*.md")),
]
MARKED = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def page(text: str, results: Path) -> str:
    """Return a page with its tables replaced by those of the files in `results`."""
    return MARKED.sub(lambda match: f"{match[1]}\n{made(match[2], results)}\n\n{match[3]}", text)


def made(marker: str, results: Path) -> str:
    """Return the table for a marker."""
    name, *arguments = shlex.split(marker)
    settings = dict(argument.split("=", 1) for argument in arguments)
    if name == "figures":
        return figures(results, **settings)
    if name == "reproduced":
        head, *lines = reproduced_table()
        return table_of(head, lines)
    content = (evidence.TABLES | sentences.SENTENCES | curves.CURVES)[name](results, **settings)
    if isinstance(content, str):
        return content
    head, *lines = content
    return table_of(head, lines)


def table_of(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    first, *rows = ("| " + " | ".join(line) + " |" for line in [head, *lines])
    return "\n".join([first, "|" + "---|" * len(head), *rows])


def figures(results: Path, benchmarks: str, without: str) -> str:
    """Return a row for each figure that has a goal, except those that contain `without`, and list the machines."""
    rows, commands = ["| what | goal | measured |", "|---|---|---|"], dict[str, dict[str, None]]()
    for path in sorted(results.glob("*.json")):
        report = json.loads(path.read_text(encoding="utf-8"))
        if report.get("benchmark") not in benchmarks.split(","):
            continue
        rows += [line(row) for row in report["rows"] if row.get("goal") is not None and without not in row["what"]]
        machine, versions = report["machine"], report["machine"]["versions"]
        programs = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "dulbe_peft")
        accelerator = f", {machine['accelerator']}" if machine.get("accelerator") else ""
        where = f"{machine['cpu']}, {machine['cores']} cores{accelerator}; {programs}"
        commands.setdefault(where, {})[f"`research.benchmarks.{report['benchmark']}`"] = None
    return "\n".join([*rows, "", *(f"- {where}: {', '.join(called)}" for where, called in commands.items())])


def line(row: dict[str, Any]) -> str:
    """Return the row of a figure. Ratios are shown in bytes or CPU time if available, otherwise in wall-clock time."""
    goal = row["goal"] or ""
    if isinstance(goal, float):
        goal = f"≤ {goal:.2f}"
    if "value" in row:
        known = row["value"] is not None
        value = f"**{number(row['value'])}** {row['unit']}".rstrip() if known else "not measured"
        return f"| {row['what']} | {goal} | {value} |"
    spread = next(row["ratio"][clock] for clock in ("bytes", "cpu", "wall") if clock in row["ratio"])
    return f"| {row['what']} | {goal} | {cell(spread)} |"


def number(value: float) -> str:
    """Format a value with two decimals, or in scientific notation if it is very small."""
    return f"{value:.2f}" if abs(value) >= 0.01 or value == 0 else f"{value:.1e}"


def cell(spread: dict[str, float]) -> str:
    """Format the median and the quartiles."""
    return f"**{spread['median']:.2f}** ({spread['q1']:.2f} to {spread['q3']:.2f})"
