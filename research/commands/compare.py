"""example:
  python -m research compare examples/comparisons/digits.yaml --output comparison
  python -m research report comparison

The file lists streams, methods, classifiers and seeds. Finished runs are kept; repeating the command
continues with the others.
"""

import shlex
from pathlib import Path
from typing import Literal

from dulbe_peft.photos.commands.flags import OVERWRITE, File, Folder
from dulbe_peft.photos.commands.options import command
from dulbe_peft.photos.commands.paths import FOLDER, claim
from dulbe_peft.utils.extras import installed
from dulbe_peft.utils.settings import AtLeastOne, setting


@command(kept="finished runs are kept")
def compare(
    file: str = setting(..., "YAML file that says what to compare", place=True),
    output: Folder = setting(..., "folder for all runs and the table"),
    jobs: AtLeastOne | None = setting(None, "number of parallel runs, at most one per core (default: all cores)"),
    backend: Literal["local", "dask", "ray"] = setting("local", "how the runs are distributed"),
    address: str | None = setting(None, "address of the Dask or Ray scheduler (default: start one here)"),
    predictions: File | None = setting(None, "also write every prediction of every row, as a .parquet file"),
    overwrite: bool = OVERWRITE,
) -> None:
    from research.comparison.compare import compare
    from research.comparison.plan import read_plan
    from research.comparison.predictions import write_predictions
    from research.comparison.summary import format_summary

    plan, folder = read_plan(file), Path(output)
    data = (*(stream["data"] for stream in plan.streams.values()), *(row[0] for row in plan.retentions.values()))
    outputs = (("--output", output, FOLDER), ("--predictions", predictions, ".parquet"))
    claim(*outputs, reads=[file], apart=data, overwrite=overwrite)
    if predictions is not None:
        with installed("--predictions", "datasets"):  # hours before the table is written
            import pandas  # noqa: F401
            import pyarrow  # noqa: F401
    entries = compare(plan, folder, jobs, backend, address)
    print(format_summary(entries))
    print(f"written: {folder / 'comparison.json'} and {folder / 'comparison.csv'}")
    if predictions is not None:
        write_predictions(folder, predictions)
        print(f"written: {predictions}")
    print(f"next: python -m research report {shlex.quote(str(folder))}")
