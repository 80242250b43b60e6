"""What a stream came to, for people: plots, tables, and a page about one run or several."""

from dulbe_peft.report.plots import plot_matrix as plot_matrix
from dulbe_peft.report.plots import plot_results as plot_results
from dulbe_peft.report.run_folder import RunFolder as RunFolder
from dulbe_peft.report.run_folder import read_run as read_run
from dulbe_peft.report.run_page import write_report as write_report
from dulbe_peft.report.side_by_side import format_summary as format_summary
from dulbe_peft.report.training_effects import read_effects as read_effects
from dulbe_peft.report.training_effects import write_figures as write_figures
