"""The report of a run names the folder of a task that is damaged."""

import pytest

from dulbe_peft.photos.report.run_folder import read_run
from dulbe_peft.photos.report.run_page import write_report


@pytest.mark.parametrize("task", ["task-001", "task-002"])
def test_report_names_a_damaged_task(run_copy, capsys, task):
    assert "is damaged" not in write_report(run_copy).read_text()
    assert capsys.readouterr().err == ""
    (run_copy / task / "progress.json").write_text("{}")
    read_run(run_copy)
    told = capsys.readouterr().err
    assert told.count("a task is damaged") == 1 and task in told and "progress.json" in told
    page = write_report(run_copy).read_text()
    assert page.count("A task is damaged") == 1 and task in page and "progress.json" in page
