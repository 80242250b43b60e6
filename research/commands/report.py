"""example:
  python -m research report comparison
  python -m research report comparison --output all.html --csv all.csv

The page is a single file that any browser opens, even without a network.
"""

from pathlib import Path

from dulbe_peft.photos.commands.options import OVERWRITE, File, Page, command
from dulbe_peft.photos.commands.paths import claim, message_stream
from dulbe_peft.utils.settings import setting


@command()
def report(
    comparison: str = setting(..., "folder that compare wrote", place=True),
    output: Page | None = setting(None, "the page (default: report.html in the folder)"),
    csv: File | None = setting(None, "also write the table of results with all digits"),
    latex: File | None = setting(None, "also write the table of results for LaTeX"),
    overwrite: bool = OVERWRITE,
) -> None:
    outputs = (("--output", output, ".html"), ("--csv", csv, ".csv"), ("--latex", latex, ".tex"))
    claim(*outputs, reads=[comparison], overwrite=overwrite)
    from research.comparison.comparison_file import COMPARISON_FILE
    from research.comparison.comparison_page import write_comparison_page

    if not (Path(comparison) / COMPARISON_FILE).is_file():
        raise FileNotFoundError(f"{comparison} has no {COMPARISON_FILE}, which `python -m research compare` writes")
    page = write_comparison_page(comparison, output, csv, latex)
    for path in (output or page, csv, latex):
        if path is not None:
            print(f"written: {path}", file=message_stream(output, csv, latex))
