"""Show the results of runs: plots, tables, and a page about one run or several."""

from dulbe_peft.photos.report.plots import plot_matrix as plot_matrix
from dulbe_peft.photos.report.plots import plot_results as plot_results
from dulbe_peft.photos.report.run_folder import RunFolder as RunFolder
from dulbe_peft.photos.report.run_folder import read_run as read_run
from dulbe_peft.photos.report.run_page import write_report as write_report
from dulbe_peft.photos.report.side_by_side import format_summary as format_summary
