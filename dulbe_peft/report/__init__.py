"""What a stream came to, for people: plots, tables, and a page about one run or several."""

from dulbe_peft.report.plots import plot_matrix, plot_results
from dulbe_peft.report.run_folder import RunFolder, read_run
from dulbe_peft.report.run_groups import format_summary
from dulbe_peft.report.run_page import write_report
from dulbe_peft.report.training_effects import read_effects, write_figures

__all__ = [
    "RunFolder",
    "format_summary",
    "plot_matrix",
    "plot_results",
    "read_effects",
    "read_run",
    "write_figures",
    "write_report",
]
