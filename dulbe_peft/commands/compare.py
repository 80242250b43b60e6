"""example:
  dulbe-peft compare examples/comparisons/digits.yaml --output comparison
  dulbe-peft report comparison

The file names streams, methods, classifiers and seeds. What is finished stays; the same command
goes on.
"""

from pathlib import Path
from typing import Literal

from dulbe_peft.commands.named import FOLDER, claim, say_next
from dulbe_peft.commands.options import OVERWRITE, Folder, command
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
    from dulbe_peft.comparison.compare import compare
    from dulbe_peft.comparison.plan import read_plan
    from dulbe_peft.comparison.summary import format_summary

    plan, folder = read_plan(file), Path(output)
    data = (*(stream["data"] for stream in plan.streams.values()), *(own[0] for own in plan.retentions.values()))
    claim(("--output", output, FOLDER), reads=[file], apart=data, overwrite=overwrite)
    entries = compare(plan, folder, jobs, backend, address)
    print(format_summary(entries))
    print(f"written: {folder / 'comparison.json'} and {folder / 'comparison.csv'}")
    say_next("report", folder)
