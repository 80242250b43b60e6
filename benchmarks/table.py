"""Write the tables of the docs from the files of `benchmarks/results`, between their markers.

<!-- table: NAME key=value ... -->      a function of `benchmarks.evidence`, or `figures`, with its arguments
<!-- end of table -->
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import evidence
from benchmarks.common import RESULTS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(r"(<!-- table: (.+?) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main() -> None:
    for path in PAGES:
        path.write_text(page(path.read_text(encoding="utf-8"), RESULTS), encoding="utf-8")


def page(text: str, results: Path) -> str:
    """The page with the tables of a folder's files between its markers."""
    return MARKED.sub(lambda found: f"{found[1]}\n{made(found[2], results)}\n\n{found[3]}", text)


def made(marker: str, results: Path) -> str:
    """The table that a marker asks for."""
    name, *arguments = shlex.split(marker)
    settings = dict(argument.split("=", 1) for argument in arguments)
    if name == "figures":
        reports = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]
        return tables([report for report in reports if "benchmark" in report])
    head, *lines = evidence.TABLES[name](results, **settings)
    return "\n".join("| " + " | ".join(line) + " |" for line in [head, ["---"] * len(head), *lines])


def tables(reports: Sequence[dict[str, Any]]) -> str:
    """One table of all rows, and one of the commands and the machines they ran on."""
    lines = ["| what | goal | wall clock | CPU time | seconds, by side | rounds |", "|---|---|---|---|---|---|"]
    for report in reports:
        lines += [line(row) for row in report["rows"]]
    lines += ["", "| command | threads | load | processor, versions |", "|---|---|---|---|"]
    for report in reports:
        machine, versions = report["machine"], report["machine"]["versions"]
        programs = ", ".join(f"{name} {version}" for name, version in versions.items() if name != "dulbe_peft")
        accelerator = f", {machine['accelerator']}" if machine.get("accelerator") else ""
        where = f"{machine['cpu']}, {machine['cores']} cores{accelerator}; {programs}"
        lines.append(f"| `{report['command']}` | {report['settings']['threads']} | {machine['load']} | {where} |")
    return "\n".join(lines)


def line(row: dict[str, Any]) -> str:
    """One figure, with its spread."""
    goal = row["goal"] or ""
    if isinstance(goal, float):
        goal = f"≤ {goal:.2f}"
    if "value" in row:
        return f"| {row['what']} | {goal} | {number(row['value'])} {row['unit']} | | | |"
    ratio = row["ratio"]
    if "bytes" in ratio:
        sizes = ", ".join(f"{side} {mebibytes:.0f}" for side, mebibytes in ratio["MiB"].items())
        spread = ratio["bytes"]
        return f"| {row['what']} | {goal} | {cell(spread)} of bytes | | {sizes} MiB | {spread['rounds']} |"
    seconds = ", ".join(f"{side} {value:.3g}" for side, value in ratio["seconds"].items())
    cpu = cell(ratio["cpu"]) if "cpu" in ratio else ""
    return f"| {row['what']} | {goal} | {cell(ratio['wall'])} | {cpu} | {seconds} | {ratio['wall']['rounds']} |"


def number(value: float) -> str:
    """Two decimals where they show something."""
    return f"{value:.2f}" if abs(value) >= 0.01 or value == 0 else f"{value:.1e}"


def cell(spread: dict[str, float]) -> str:
    """Median and quartiles."""
    return f"**{spread['median']:.3f}** ({spread['q1']:.3f} to {spread['q3']:.3f})"


if __name__ == "__main__":
    main()
