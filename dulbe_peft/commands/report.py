"""`dulbe-peft report`: one page about a run, about several side by side, or about a comparison."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from dulbe_peft.commands.outputs import check_outputs

EXAMPLE = """example:
  dulbe-peft report out
  dulbe-peft report out-seed-0 out-seed-1 out-frozen --output all.html --csv all.csv
  dulbe-peft report comparison
  dulbe-peft report out --figures pictures

The page is one file that any browser opens, also without a network.
"""


def add(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser("report", help="write a page about runs or a comparison", epilog=EXAMPLE)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a folder that run or compare has written")
    parser.add_argument(
        "--output", metavar="FILE.html", help="the page (report.html in the folder, or here for several runs)"
    )
    parser.add_argument("--csv", metavar="FILE", help="write the table of results, too, with full figures")
    parser.add_argument("--latex", metavar="FILE", help="write the table of results, too, for LaTeX")
    parser.add_argument(
        "--figures", metavar="FOLDER", help="write what training changed, too, as pictures and numbers; of one run"
    )
    parser.set_defaults(call=report)


def report(arguments: argparse.Namespace) -> int:
    """Write the page, and tables where they are asked for."""
    from dulbe_peft.comparison.comparison_page import is_comparison, write_comparison_page
    from dulbe_peft.report import write_figures, write_report

    named = (arguments.output, arguments.csv, arguments.latex)
    check_outputs(*zip(("--output", "--csv", "--latex"), named, (".html", ".csv", ".tex"), strict=True))
    # Where a link is named, what it leads to is written.
    files = tuple(None if path is None else Path(path).resolve() for path in named)
    folders = list({Path(folder).resolve(): folder for folder in arguments.runs}.values())
    comparisons = [folder for folder in folders if is_comparison(folder)]
    if comparisons and len(folders) > 1:
        runs = [folder for folder in folders if folder not in comparisons]
        found = (
            f"{comparisons[0]} is a comparison and {runs[0]} is none" if runs else f"got {len(folders)} comparisons"
        )
        raise ValueError(f"a page is about runs or about one comparison, {found}: report on each alone")
    if arguments.figures is not None and (comparisons or len(folders) > 1):
        raise ValueError(
            f"--figures is about one run, got {'a comparison' if comparisons else f'{len(folders)} runs'}"
        )
    page = write_comparison_page(folders[0], *files) if comparisons else write_report(folders, *files)
    figures = [] if arguments.figures is None else write_figures(folders[0], arguments.figures)
    for path in (arguments.output or page, arguments.csv, arguments.latex, *figures):
        if path is not None:
            print(f"written: {path}")
    return 0
