"""`dulbe-peft compare`: methods and classifiers side by side on the same streams."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

EXAMPLE = """example:
  dulbe-peft compare examples/comparisons/digits.yaml --output comparison
  dulbe-peft report comparison

The file names streams, methods, classifiers and seeds. What is finished stays; the same command
goes on.
"""


def add(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser("compare", help="run methods and classifiers side by side", epilog=EXAMPLE)
    parser.add_argument("file", metavar="FILE.yaml", help="what to compare")
    parser.add_argument("--output", required=True, help="folder for all runs and the table")
    parser.add_argument("--jobs", type=int, help="runs at once (one a core, or one on an accelerator)")
    parser.add_argument("--backend", choices=("local", "dask", "ray"), default="local", help="who runs (%(default)s)")
    parser.add_argument("--address", help="of the scheduler of dask or ray; else one starts on this machine")
    parser.add_argument("--dry-run", action="store_true", help="print the runs that are missing, and exit")
    parser.set_defaults(call=compare, resumes=True)


def compare(arguments: argparse.Namespace) -> int:
    """Compare, and print the table."""
    from dulbe_peft.comparison.cells import is_done
    from dulbe_peft.comparison.compare import compare
    from dulbe_peft.comparison.plan import read_plan
    from dulbe_peft.comparison.summary import format_summary

    plan, output = read_plan(arguments.file), Path(arguments.output)
    if arguments.dry_run:
        trials = [trial for stream in plan.streams for method in plan.choices for trial in plan.trials(stream, method)]
        certain = [cell for cell in plan.cells() if cell.method not in plan.choices]
        missing = [cell for _, cell in trials if not is_done(cell, output, [])]
        missing += [cell for cell in certain if not is_done(cell, output, plan.rows(cell.method))]
        print("\n".join(cell.folder for cell in missing))
        chosen = len(plan.cells()) - len(certain)
        print(f"{len(missing)} runs are missing" + (f", and {chosen} whose settings are chosen" if chosen else ""))
        return 0
    entries = compare(plan, output, arguments.jobs, arguments.backend, arguments.address)
    print(format_summary(entries))
    print(
        f"written: {output / 'comparison.json'} and {output / 'comparison.csv'}; dulbe-peft report {output} draws it"
    )
    return 0
