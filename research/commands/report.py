"""example:
  python -m research report comparison
  python -m research report comparison --output all.html --csv all.csv

The page is a single file that any browser opens, even without a network.
"""

from pathlib import Path

from dulbe_peft.photos.commands.flags import OVERWRITE, File, Page
from dulbe_peft.photos.commands.options import command
from dulbe_peft.photos.commands.paths import claim, message_stream
from dulbe_peft.utils.settings import setting


@command()
def report(
    comparison: str = setting(..., "folder that compare wrote", place=True),
    output: Page | None = setting(None, "the page (default: report.html in the folder)"),
    csv: File | None = setting(None, "also write the table of results with all digits"),
    latex: File | None = setting(None, "also write a table for a paper, with LaTeX's booktabs"),
    columns: list[str] | None = setting(None, "columns of the LaTeX table, such as method,A_last,seeds"),
    overwrite: bool = OVERWRITE,
) -> None:
    if columns is not None:  # before a page is written or an older one renamed
        from research.comparison.latex import check_columns

        if latex is None:
            raise ValueError(f"--columns is {','.join(columns)}, which has no effect without --latex FILE")
        check_columns(columns)
    outputs = (("--output", output, ".html"), ("--csv", csv, ".csv"), ("--latex", latex, ".tex"))
    claim(*outputs, overwrite=overwrite)
    from research.comparison.comparison_file import COMPARISON_FILE
    from research.comparison.comparison_page import write_comparison_page

    if not (Path(comparison) / COMPARISON_FILE).is_file():
        raise FileNotFoundError(f"{comparison} has no {COMPARISON_FILE}, which `python -m research compare` writes")
    page = write_comparison_page(comparison, output, csv, latex, columns or ())
    for path in (output or page, csv, latex):
        if path is not None:
            print(f"written: {path}", file=message_stream(output, csv, latex))
