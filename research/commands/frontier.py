"""example:
  python -m research frontier examples/frontiers/handwriting.yaml --output frontier

The file is one for compare. Every combination of the settings in `choose` is measured with every seed, and with the
shares of the update in `retention_scales`. Each measured cell is a small file in the folder `cells` of the output;
repeating the command continues with the others.
"""

from pathlib import Path

from dulbe_peft.photos.commands.flags import Folder
from dulbe_peft.photos.commands.options import command
from dulbe_peft.photos.commands.paths import FOLDER, claim
from dulbe_peft.utils.settings import AtLeastOne, setting


@command(kept="measured cells are kept")
def frontier(
    file: str = setting(..., "YAML file that says what to measure", place=True),
    output: Folder = setting(..., "folder for all runs, the tables and the figures"),
    cells: Folder | None = setting(None, "folder with cells measured before (default: the project's of this file)"),
    draw: bool = setting(False, "draw what is measured, and run nothing"),
    jobs: AtLeastOne | None = setting(None, "number of parallel runs, at most one per core (default: all cores)"),
    overwrite: bool = setting(
        False, "rename an existing output to NAME.old; measure again all that is not in --cells"
    ),
) -> None:
    from research.benchmarks.curves import CELLS, FILES
    from research.comparison.frontier import frontier
    from research.comparison.frontier_page import frontier_text, write_figures
    from research.comparison.plan import LAST_TASK, read_plan

    if draw and overwrite:
        raise ValueError("--overwrite would move away the measured cells that --draw draws: omit one of them")
    plan, folder = read_plan(file), Path(output)
    unlearned = (row[0] for row in plan.retentions.values() if row[0] != LAST_TASK)
    data = (*(stream["data"] for stream in plan.streams.values()), *unlearned)
    claim(("--output", output, FOLDER), reads=[file, cells], apart=data, overwrite=overwrite)
    if cells is None and Path(file).resolve().parent == FILES:
        cells = str(CELLS / Path(file).stem)
    records = frontier(plan, folder, cells, jobs, draw=draw)
    print(frontier_text(plan, records))
    for path in write_figures(plan, records, folder):
        print(f"written: {path}")
