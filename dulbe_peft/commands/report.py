"""example:
  dulbe-peft report out
  dulbe-peft report out out-frozen --output all.html --csv all.csv
  dulbe-peft report comparison
  dulbe-peft report out --figures pictures
  dulbe-peft report holidays.csv

The page is one file that any browser opens, also without a network. Of a table that predict --csv
has written, it shows the photographs by the class that each was given.
"""

from pathlib import Path

from dulbe_peft.commands.named import FOLDER, claim, say_next, words_of
from dulbe_peft.commands.options import OVERWRITE, File, Folder, Page, command
from dulbe_peft.utils.settings import setting


@command()
def report(
    runs: tuple[str, ...] = setting(..., "folders that run or compare wrote, or a table of predict --csv", place=True),
    output: Page | None = setting(None, "the page (report.html in the folder, or here for several runs)"),
    csv: File | None = setting(None, "write the table of results, too, with full figures"),
    latex: File | None = setting(None, "write the table of results, too, for LaTeX"),
    figures: Folder | None = setting(None, "write what training changed, too, as pictures and numbers; of one run"),
    overwrite: bool = OVERWRITE,
) -> None:
    named = (("--output", output, ".html"), ("--csv", csv, ".csv"), ("--latex", latex, ".tex"))
    claim(*named, ("--figures", figures, FOLDER), reads=runs, overwrite=overwrite)
    if any(Path(run).suffix.lower() == ".csv" and Path(run).is_file() for run in runs):
        _contact_sheet(runs, output, csv, latex, figures)
        return
    for folder in runs:
        if not Path(folder).is_dir():
            raise FileNotFoundError(f"{folder} is no folder; a report is made of a folder that run has written")
    from dulbe_peft.comparison.comparison_file import COMPARISON_FILE
    from dulbe_peft.comparison.comparison_page import write_comparison_page
    from dulbe_peft.report import read_run, write_figures, write_report
    from dulbe_peft.report.verdict import estimated, recommended

    folders = list({Path(folder).resolve(): folder for folder in runs}.values())
    comparisons = [folder for folder in folders if (Path(folder) / COMPARISON_FILE).is_file()]
    if comparisons and len(folders) > 1:
        what = f"{comparisons[0]} is a comparison"
        raise ValueError(f"a page is about runs or about one comparison, and {what}: report on it alone")
    if figures is not None and (comparisons or len(folders) > 1):
        got = "a comparison" if comparisons else f"{len(folders)} runs"
        raise ValueError(f"--figures is about one run, got {got}")
    files = (output, csv, latex)
    page = write_comparison_page(folders[0], *files) if comparisons else write_report(folders, *files)
    pictures = [] if figures is None else write_figures(folders[0], figures)
    to = words_of(*files)
    for path in (output or page, csv, latex, *pictures):
        if path is not None:
            print(f"written: {path}", file=to)
    if not comparisons and len(folders) == 1:
        run = read_run(folders[0])
        best, _ = recommended(estimated(run.results), run.first)
        how = {"format": "transformers", "classifier": best if best != run.first else None}
        say_next("export", folders[0], f"{folders[0]}-export", **how, to=to)


def _contact_sheet(tables: tuple[str, ...], output: str | None, *others: str | None) -> None:
    """The page of a table of predictions."""
    from dulbe_peft.report.contact_sheet import write_contact_sheet

    if len(tables) > 1 or any(others):
        raise ValueError(f"{tables[0]} is one table of predictions: report on it alone, with no flag but --output")
    table = Path(tables[0])
    page = write_contact_sheet(table, Path(output) if output else table.with_name(f"{table.name}.html"))
    print(f"written: {output or page}", file=words_of(output))
