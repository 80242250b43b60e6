"""The report of a run names the folder of a task that is damaged."""

from dulbe_peft.photos.report.run_folder import read_run


def test_report_names_a_damaged_task(run_copy, capsys):
    read_run(run_copy)
    assert capsys.readouterr().err == ""
    (run_copy / "task-001" / "progress.json").write_text("{}")
    read_run(run_copy)
    told = capsys.readouterr().err
    assert told.count("a task is damaged") == 1 and "task-001" in told and "progress.json" in told
