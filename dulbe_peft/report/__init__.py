"""What a stream came to, for people: plots, tables, and a page about one run or several."""

from dulbe_peft.report.changes import read_changes, write_figures
from dulbe_peft.report.collect import Run, read_run
from dulbe_peft.report.figures import plot_matrix, plot_results
from dulbe_peft.report.page import write_report
from dulbe_peft.report.tables import format_summary

__all__ = [
    "Run",
    "format_summary",
    "plot_matrix",
    "plot_results",
    "read_changes",
    "read_run",
    "write_figures",
    "write_report",
]
