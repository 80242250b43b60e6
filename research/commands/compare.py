"""example:
  python -m research compare examples/comparisons/digits.yaml --output comparison
  python -m research report comparison

The file lists streams, methods, classifiers and seeds. Finished runs are kept; repeating the command
continues with the others.
"""

import shlex
from pathlib import Path
from typing import Literal

from dulbe_peft.photos.commands.options import OVERWRITE, Folder, command
from dulbe_peft.photos.commands.paths import FOLDER, claim
from dulbe_peft.utils.settings import AtLeastOne, setting


@command(kept="finished runs are kept")
def compare(
    file: str = setting(..., "YAML file that says what to compare", place=True),
    output: Folder = setting(..., "folder for all runs and the table"),
    jobs: AtLeastOne | None = setting(None, "number of parallel runs, at most one per core (default: all cores)"),
    backend: Literal["local", "dask", "ray"] = setting("local", "how the runs are distributed"),
    address: str | None = setting(None, "address of the Dask or Ray scheduler (default: start one here)"),
    overwrite: bool = OVERWRITE,
) -> None:
    from research.comparison.compare import compare
    from research.comparison.plan import read_plan
    from research.comparison.summary import format_summary

    plan, folder = read_plan(file), Path(output)
    data = (*(stream["data"] for stream in plan.streams.values()), *(row[0] for row in plan.retentions.values()))
    claim(("--output", output, FOLDER), reads=[file], apart=data, overwrite=overwrite)
    entries = compare(plan, folder, jobs, backend, address)
    print(format_summary(entries))
    print(f"written: {folder / 'comparison.json'} and {folder / 'comparison.csv'}")
    print(f"next: python -m research report {shlex.quote(str(folder))}")
