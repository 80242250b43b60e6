"""example:
  dulbe-peft report out
  dulbe-peft report out out-frozen --output all.html --csv all.csv
  dulbe-peft report holidays.csv

The page is a single file that any browser opens, even without a network. For a table that predict
--csv wrote, it shows the photographs grouped by their predicted class.
"""

from pathlib import Path

from dulbe_peft.photos.commands.advice import print_next_command
from dulbe_peft.photos.commands.flags import OVERWRITE, File, Page
from dulbe_peft.photos.commands.options import command
from dulbe_peft.photos.commands.paths import claim, message_stream
from dulbe_peft.utils.settings import setting


@command()
def report(
    runs: tuple[str, ...] = setting(..., "folders that run wrote, or a table of predict --csv", place=True),
    output: Page | None = setting(None, "the page (default: report.html in the run's folder; here for several runs)"),
    csv: File | None = setting(None, "also write the table of results with all digits"),
    latex: File | None = setting(None, "also write the table of results for LaTeX"),
    overwrite: bool = OVERWRITE,
) -> None:
    from dulbe_peft.utils.folders import put_back

    outputs = (("--output", output, ".html"), ("--csv", csv, ".csv"), ("--latex", latex, ".tex"))
    claim(*outputs, overwrite=overwrite)
    if any(Path(run).suffix.lower() == ".csv" and Path(run).is_file() for run in runs):
        _contact_sheet(runs, output, csv, latex)
        return
    for folder in runs:
        if (Path(folder) / "comparison.json").is_file():
            raise ValueError(f"{folder} is a comparison: use `python -m research report` in a clone of the project")
        put_back(Path(folder))
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"{folder} is not a folder: give a folder that run has written")
    from dulbe_peft.photos.report import read_run, write_report
    from dulbe_peft.photos.report.advice import chosen

    folders = list({Path(folder).resolve(): folder for folder in runs}.values())
    files = (output, csv, latex)
    page = write_report(folders, *files)
    to = message_stream(*files)
    for path in (output or page, csv, latex):
        if path is not None:
            print(f"written: {path}", file=to)
    if len(folders) == 1:
        run = read_run(folders[0])
        best, _ = chosen(run)
        print_next_command("predict", folders[0], "PHOTOS", classifier=best if best != run.first else None, to=to)


def _contact_sheet(tables: tuple[str, ...], output: str | None, *others: str | None) -> None:
    """Write the page of a table of predictions."""
    from dulbe_peft.photos.report.contact_sheet import write_contact_sheet

    if len(tables) > 1 or any(others):
        raise ValueError(f"{tables[0]} is a table of predictions: give it alone, with no flag except --output")
    table = Path(tables[0])
    page = write_contact_sheet(table, Path(output) if output else table.with_name(f"{table.name}.html"))
    print(f"written: {output or page}", file=message_stream(output))
