"""Write the tables of the docs from the files of `research/benchmarks/results`, between their markers.

<!-- table: NAME key=value ... -->      a function of `research.benchmarks.evidence`, or `figures`, with its arguments
<!-- end of table -->
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

from research.benchmarks import evidence
from research.benchmarks.common import RESULTS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "research" / "benchmarks" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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
        return figures(results, **settings)
    found = evidence.TABLES[name](results, **settings)
    if isinstance(found, str):
        return found
    head, *lines = found
    first, *rows = ("| " + " | ".join(line) + " |" for line in [head, *lines])
    return "\n".join([first, "|" + "---|" * len(head), *rows])


def figures(results: Path, benchmarks: str, without: str) -> str:
    """A row for each figure of these benchmarks that has a goal, but those of a name; then the machines."""
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
    """One figure, with its spread: processor time where it was taken."""
    goal = row["goal"] or ""
    if isinstance(goal, float):
        goal = f"≤ {goal:.2f}"
    if "value" in row:
        return f"| {row['what']} | {goal} | {number(row['value'])} {row['unit']} |"
    spread = next(row["ratio"][clock] for clock in ("bytes", "cpu", "wall") if clock in row["ratio"])
    return f"| {row['what']} | {goal} | {cell(spread)} |"


def number(value: float) -> str:
    """Two decimals where they show something."""
    return f"{value:.2f}" if abs(value) >= 0.01 or value == 0 else f"{value:.1e}"


def cell(spread: dict[str, float]) -> str:
    """Median and quartiles."""
    return f"**{spread['median']:.2f}** ({spread['q1']:.2f} to {spread['q3']:.2f})"


if __name__ == "__main__":
    main()
