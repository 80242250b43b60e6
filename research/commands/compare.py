"""example:
  python -m research compare examples/comparisons/digits.yaml --output comparison
  python -m research report comparison

The file names streams, methods, classifiers and seeds. What is finished stays; the same command
goes on.
"""

import shlex
from pathlib import Path
from typing import Literal

from dulbe_peft.photos.commands.named import FOLDER, claim
from dulbe_peft.photos.commands.options import OVERWRITE, Folder, command
from dulbe_peft.utils.settings import AtLeastOne, setting


@command(kept="finished runs are kept")
def compare(
    file: str = setting(..., "YAML file that says what to compare", place=True),
    output: Folder = setting(..., "folder for all runs and the table"),
    jobs: AtLeastOne | None = setting(None, "runs at once, at most one a core of this machine (so many)"),
    backend: Literal["local", "dask", "ray"] = setting("local", "who runs"),
    address: str | None = setting(None, "of the scheduler of dask or ray; else one starts on this machine"),
    overwrite: bool = OVERWRITE,
) -> None:
    from research.comparison.compare import compare
    from research.comparison.plan import read_plan
    from research.comparison.summary import format_summary

    plan, folder = read_plan(file), Path(output)
    data = (*(stream["data"] for stream in plan.streams.values()), *(own[0] for own in plan.retentions.values()))
    claim(("--output", output, FOLDER), reads=[file], apart=data, overwrite=overwrite)
    entries = compare(plan, folder, jobs, backend, address)
    print(format_summary(entries))
    print(f"written: {folder / 'comparison.json'} and {folder / 'comparison.csv'}")
    print(f"next: python -m research report {shlex.quote(str(folder))}")
