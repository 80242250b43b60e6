"""`dulbe-peft report`: one page about a run, or about several side by side."""

from __future__ import annotations

import argparse
from typing import Any

from dulbe_peft.commands.outputs import check_output

EXAMPLE = """example:
  dulbe-peft report out
  dulbe-peft report out-seed-0 out-seed-1 out-frozen --output all.html --csv all.csv

The page is one file that any browser opens, also without a network.
"""


def add(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser("report", help="write a page about one run or several", epilog=EXAMPLE)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a folder that run has written, finished or not")
    parser.add_argument(
        "--output", metavar="FILE.html", help="the page (report.html in the run's folder, or here for several runs)"
    )
    parser.add_argument("--csv", metavar="FILE", help="write the table of results, too, with full figures")
    parser.add_argument("--latex", metavar="FILE", help="write the table of results, too, for LaTeX")
    parser.set_defaults(call=report)


def report(arguments: argparse.Namespace) -> int:
    """Write the page, and tables where they are asked for."""
    from dulbe_peft.report import write_report

    check_output("--output", arguments.output, ".html")
    check_output("--csv", arguments.csv, ".csv")
    check_output("--latex", arguments.latex, ".tex")
    page = write_report(arguments.runs, arguments.output, arguments.csv, arguments.latex)
    for path in (page, arguments.csv, arguments.latex):
        if path is not None:
            print(f"written: {path}")
    return 0
