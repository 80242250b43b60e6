"""Test comparisons: which runs are made, which are not repeated, and the table of results."""

import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from compared import with_other_weights, without_times
from failing_files import edited
from filelock import FileLock

from dulbe_peft.classifiers import CLASSIFIERS
from dulbe_peft.metrics.evaluation import read_predictions
from dulbe_peft.metrics.task_features import read_features
from dulbe_peft.strategies import STRATEGIES
from dulbe_peft.utils.tensors import read_tensors, write_tensors
from research.__main__ import run as main
from research.benchmarks.common import RESULTS
from research.comparison.cells import LOCK_FILE, answers_path, is_done, read_answers, read_cell
from research.comparison.compare import ComparisonError, compare
from research.comparison.comparison_file import read_comparison
from research.comparison.intervals import estimated, holm_intervals, mean_interval
from research.comparison.peak import peak_memory
from research.comparison.plan import Row, as_text, read_plan
from research.comparison.predictions import comparison_predictions, write_predictions
from research.comparison.summary import best_rows, format_summary, gains_of_training, make_entries, read_finished

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
ADDED = {"merged LoRA", "merged LoRA, affine"}  # methods that were added to files after their results were stored
OLDER = {"all-at-once", "pretraining"}  # comparisons that were measured before `bayes` was the default classifier
FROZEN = {"methods": {"frozen": {"strategy": "frozen"}}}


def quiet(_):
    """Discard a message."""


def write(path, content):
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def content(digit_folders, tiny_model):
    """Return a plan of four digits in two tasks, with and without training, with two seeds and a tiny model."""
    quick = {"increment": 2, "epochs": 1, "batch_size": 4, "support_rank": 8, "residual_rank": 2, "device": "cpu"}
    root = str(digit_folders(4, 6, 3))
    data = {"data": root, "retention": root, "retention_scales": [0.5]}
    return {
        "streams": {"digits": {"model": str(tiny_model), **data, **quick}},
        "methods": {
            "frozen": {"strategy": "frozen"},
            "LoRA": {"strategy": "lora", "choose": {"learning_rate": ["1e-4", 0.1]}},
        },
        "classifiers": ["bridge", "lda"],
        "drift": ["none", "linear"],
        "seeds": [0, 1],
        "reference": {"method": "frozen", "classifier": "lda"},
    }


@pytest.fixture(scope="module")
def finished(content, tmp_path_factory):
    folder = tmp_path_factory.mktemp("comparison")
    messages: list[str] = []
    entries = compare(read_plan(write(folder / "plan.yaml", content)), folder / "out", jobs=1, log=messages.append)
    return folder, entries, messages


@pytest.fixture
def copied(finished, tmp_path):
    """Return a copy of the finished comparison, for tests that change it."""
    shutil.copytree(finished[0], tmp_path / "copied")
    return tmp_path / "copied", *finished[1:]


def run_of(folder, entry, seed=0):
    return folder / "out" / "runs" / "digits" / entry.row.method / as_text(entry.chosen) / f"seed-{seed}"


def times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name in ("cell.json", "learner.json")}


def test_comparison_has_every_row_of_every_stream(finished):
    folder, entries, messages = finished
    assert [entry.row for entry in entries] == [
        Row("frozen", "bridge"),
        Row("frozen", "lda"),
        *[Row("LoRA", name, drift) for name in ("bridge", "lda") for drift in ("none", "linear")],
    ]
    assert all(entry.seeds == (0, 1) and entry.retention for entry in entries)
    found = read_comparison(folder / "out")
    assert found.missing() == [] and found.entries == entries
    lines = (folder / "out" / "comparison.csv").read_text(encoding="utf-8").splitlines()
    assert len(lines) == 7 and lines[1].startswith("digits,frozen,bridge,none,,2,")
    assert "| frozen | lda |" in format_summary(entries) and "digits, 2 seeds" in format_summary(entries)
    last = {(entry.row.method, entry.row.classifier): entry.means["last"] for entry in entries}
    assert [entry.gain for entry in entries[:2]] == [None, None] and entries[1].differences["last"] is None
    for entry in entries[2:]:  # the gain from training is the difference to the same classifier
        assert entry.gain.mean == pytest.approx(entry.means["last"] - last["frozen", entry.row.classifier])
    assert entries[-1].gain == entries[-1].differences["last"]  # here, the reference is that row
    # The learning rate with the better held-out accuracy is chosen.
    tried, ran = (sorted((folder / "out" / where).rglob("cell.json")) for where in ("choices", "runs/digits/LoRA"))
    assert [json.loads(path.read_text())["settings"]["validation_fraction"] for path in tried] == [0.2, 0.2]
    rates = {entry.chosen["learning_rate"] for entry in entries[2:]}
    assert sum("scored best on held-out training images" in line for line in messages) == len(rates)
    assert {json.loads(path.read_text())["settings"]["learning_rate"] for path in ran} == rates


def test_gain_compares_the_best_rows_image_by_image_over_their_common_seeds(finished):
    folder, entries, _ = finished
    plan = read_plan(folder / "plan.yaml")
    best, other = (entries[4], entries[0]), entries[1]  # LoRA with lda, and frozen with bridge
    lasts = {best[0].row: 0.9, best[1].row: 0.8, other.row: 0.7}
    made = [entry.model_copy(update={"means": entry.means | {"last": lasts.get(entry.row, 0.1)}}) for entry in entries]
    assert [entry.row for entry in best_rows(plan, made)] == [entry.row for entry in best]
    right = {
        best[0].row: {0: [1, 1, 0, 1], 1: [1, 1, 1, 1]},
        best[1].row: {0: [1, 0, 0, 1], 1: [1, 1, 0, 1], 2: [0] * 4},
    }

    def rows(of_row):
        return {seed: SimpleNamespace(shares={"last": np.array(each, float)}) for seed, each in right[of_row].items()}

    read = {("digits", row): rows(row) for row in right}
    differences = np.array([[0, 1, 0, 0], [0, 0, 1, 0]])
    assert gains_of_training(plan, read, made) == {"digits": mean_interval(differences)}
    del read["digits", best[1].row][0], read["digits", best[1].row][1]
    assert gains_of_training(plan, read, made) == {"digits": None}
    assert gains_of_training(plan, read, made[2:]) == {}, "nothing is compared without a row of the other kind"


def test_methods_of_a_comparison_have_one_precision(content, tmp_path):
    """With "auto", a method that does not train would encode in bfloat16, and one that trains in float32."""

    def precisions(**changes):
        plan = read_plan(write(tmp_path / "plan.yaml", content | changes))
        return {cell.method: cell.settings.get("precision") for cell, _ in plan.cells()}

    assert precisions() == {"frozen": "float32", "LoRA": None}
    same = {name: settings | {"precision": "bfloat16"} for name, settings in content["streams"].items()}
    assert precisions(streams=same) == {"frozen": "bfloat16", "LoRA": "bfloat16"}
    assert precisions(**FROZEN) == {"frozen": "float32"}, "methods can be added later"


def test_each_row_uses_the_learning_rate_chosen_for_its_classifier(copied, content, monkeypatch):
    folder, _, _ = copied
    content = content | {"seeds": [0], "drift": ["none"]}
    shutil.rmtree(folder / "out" / "runs" / "digits" / "LoRA")

    def judged(run, row, cell):
        return SimpleNamespace(shares={"last": np.full(4, float(("0.1" in run.name) == (row.classifier == "lda")))})

    monkeypatch.setattr("research.comparison.compare.read_row", judged)
    plan = read_plan(write(folder / "plan.yaml", content))
    entries = compare(plan, folder / "out", jobs=1, log=quiet)
    assert [entry.chosen.get("learning_rate") for entry in entries] == [None, None, 1e-4, 0.1]
    for entry in entries[2:]:
        run = run_of(folder, entry)
        answers, _ = read_answers(run, entry.row, read_cell(run))
        assert read_cell(run).settings["learning_rate"] == entry.chosen["learning_rate"]
        assert entry.means["last"] == pytest.approx(float(answers[-1].right.float().mean()))
        assert [path.stem for path in (run / "answers").iterdir()] == [entry.row.classifier]


def test_retention_is_recorded_for_each_scale(finished):
    folder, entries, _ = finished
    for entry in (entries[0], entries[-1]):
        runs = [json.loads((run_of(folder, entry, seed) / "cell.json").read_text())["retention"] for seed in (0, 1)]
        assert all([point["scale"] for point in run["scales"]] == [0, 0.5, 1] for run in runs)
        for run in runs:  # here, the classes of `retention` are those of the stream
            assert all(point["learned"] == pytest.approx(point["unlearned"]) for point in run["scales"])
            assert (run["before"], run["after"]) == tuple(run["scales"][end]["unlearned"] for end in (0, -1))
        assert entry.retention.scales[1].learned == pytest.approx(np.mean([r["scales"][1]["learned"] for r in runs]))


def test_accuracies_in_the_table_equal_those_of_the_answers(copied):
    """Some answers are changed to wrong ones, because the digits are easy and the two measures must differ."""
    folder, plan = copied[0] / "out", read_plan(copied[0] / "plan.yaml")
    row, accuracies = Row("frozen", "lda"), []
    for seed in (0, 1):
        run = folder / "runs" / "digits" / "frozen" / f"seed-{seed}"
        tensors, metadata = read_tensors(answers_path(run, row))
        tensors["predicted 1"] = 1 - tensors["truth 1"]
        tensors["predicted 2"][seed] = 3 - tensors["truth 2"][seed]
        write_tensors(answers_path(run, row), tensors, metadata)
        answers, _ = read_answers(run, row, read_cell(run))
        accuracies.append([float(step.right.float().mean()) for step in answers])
    entry = next(entry for entry in make_entries(plan, read_finished(folder, plan.cells())) if entry.row == row)
    assert entry.means["last"] == pytest.approx(np.mean([last for _, last in accuracies]))
    assert entry.means["average"] == pytest.approx(np.mean(accuracies))
    assert entry.means["last"] > entry.means["average"] + 0.1


def test_finished_runs_are_not_repeated(copied, content, monkeypatch):
    folder, entries, _ = copied
    before = times(folder)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "ray", None)  # no engine starts if nothing is missing
        assert compare(read_plan(folder / "plan.yaml"), folder / "out", backend="ray", log=quiet) == entries
    more = write(folder / "more.yaml", content | {"classifiers": ["bridge", "lda", "ranpac:features=20"]})
    added = compare(read_plan(more), folder / "out", jobs=1, log=quiet)
    assert [entry.row.classifier for entry in added][-1] == "ranpac:features=20"
    assert times(folder) == before  # adding a classifier does not repeat any training


def test_damaged_answers_are_an_error_and_are_computed_again_after_removal(copied):
    folder, entries, _ = copied
    path = folder / "out" / "runs" / "digits" / "frozen" / "seed-0" / "answers" / "bridge.safetensors"
    path.write_bytes(path.read_bytes()[:500])
    plan = read_plan(folder / "plan.yaml")
    with pytest.raises(ValueError, match="bridge.safetensors is damaged .*; remove the file"):
        compare(plan, folder / "out", jobs=1, log=quiet)
    path.unlink()
    again = compare(plan, folder / "out", jobs=1, log=quiet)
    assert [entry.means for entry in again] == [entry.means for entry in entries]
    edited(path.parents[1] / "cell.json", "cost", {})
    with pytest.raises(ValueError, match="cell.json is damaged or foreign: cost"):
        read_cell(path.parents[1])


def test_answers_of_another_run_classifier_or_default_are_refused(copied, monkeypatch):
    folder, entries, _ = copied
    run, lda = run_of(folder, entries[-2]), Row("LoRA", "lda")
    cell = read_cell(run)
    read_answers(run, lda, cell)
    shutil.copy(answers_path(run.parent / "seed-1", lda), answers_path(run, Row("LoRA", "bridge")))
    shutil.copy(answers_path(run, lda), answers_path(run, replace(lda, drift="linear")))
    shutil.copy(answers_path(run, lda), answers_path(run, Row("LoRA", "ridge")))
    for row in (Row("LoRA", "bridge"), replace(lda, drift="linear"), Row("LoRA", "ridge")):
        with pytest.raises(ValueError, match="belongs to another run, classifier or version; remove the file"):
            read_answers(run, row, cell)
    other = {"shrinkage": "another default"}
    monkeypatch.setattr("dulbe_peft.classifiers.registry.setting_defaults", lambda rule: other)
    with pytest.raises(ValueError, match="belongs to another run, classifier or version"):
        read_answers(run, lda, cell)


@pytest.mark.parametrize("name, text", [("comparison.json", '{"mine": 1}'), ("comparison.csv", "")])
def test_file_of_the_user_is_not_replaced(content, tmp_path, capsys, name, text):
    (tmp_path / name).write_text(text)
    assert main(["compare", str(write(tmp_path / "c.yaml", content)), "--output", str(tmp_path)]) == 2
    assert str(tmp_path / name) in capsys.readouterr().err
    assert (tmp_path / name).read_text() == text and not (tmp_path / "runs").exists()


def test_changed_setting_of_a_finished_run_is_refused(finished, content):
    folder, _, _ = finished
    streams = {"digits": content["streams"]["digits"] | {"epochs": 2}}
    other = read_plan(write(folder / "changed.yaml", content | {"streams": streams}))
    assert not make_entries(other, read_finished(folder / "out", other.cells())), (
        "the table must not have results of other settings"
    )
    before = {path: path.read_bytes() for path in (folder / "out").glob("comparison.*")}
    with pytest.raises(ValueError, match="epochs = 1, now it is 2: use another output folder"):
        compare(other, folder / "out", jobs=1, log=quiet)
    methods = content["methods"] | {
        "LoRA": content["methods"]["LoRA"] | {"epochs": 2}
    }  # only some of the runs are refused
    other = read_plan(write(folder / "changed.yaml", content | {"methods": methods, "seeds": [0, 1, 2]}))
    with pytest.raises(ValueError, match="epochs = 1, now it is 2: use another output folder"):
        compare(other, folder / "out", jobs=1, log=quiet)
    assert len(before) == 2 and all(path.read_bytes() == content for path, content in before.items())
    assert not list((folder / "out").rglob("*seed-2*")), "nothing runs if a setting of another run has changed"


def test_changed_default_of_a_finished_run_is_refused(copied):
    """The YAML file does not contain the setting and has not changed."""
    folder, _, _ = copied
    plan, path = (
        read_plan(folder / "plan.yaml"),
        folder / "out" / "runs" / "digits" / "frozen" / "seed-0" / "cell.json",
    )
    entries = make_entries(plan, read_finished(folder / "out", plan.cells({})))
    edited(path, "arguments", "learning_rate", 0.5)
    with pytest.raises(ValueError, match="learning_rate = 0.5, now it is 'auto'"):
        compare(plan, folder / "out", jobs=1, log=quiet)
    remaining = make_entries(plan, read_finished(folder / "out", plan.cells({})))
    assert sum(len(entry.seeds) for entry in remaining) < sum(len(entry.seeds) for entry in entries)


def test_changed_images_of_a_finished_run_are_refused(copied, content, tmp_path):
    out, photos = copied[0] / "out", tmp_path / "photos"
    shutil.copytree(content["streams"]["digits"]["data"], photos)
    for path in out.rglob("cell.json"):
        edited(path, "settings", "data", str(photos))
    first, *_, last = sorted((photos / "train").rglob("*.png"))
    first.write_bytes(last.read_bytes())
    streams = {"digits": content["streams"]["digits"] | {"data": str(photos)}}
    plan = read_plan(write(tmp_path / "plan.yaml", content | {"streams": streams}))
    with pytest.raises(ValueError, match="run on other images than are in"):
        compare(plan, out, jobs=1, log=quiet)


def test_changed_model_of_a_finished_run_is_refused(copied, content, tmp_path):
    """The folder has the same name, and other weights, as after another training."""
    out, model = copied[0] / "out", tmp_path / "model"
    shutil.copytree(content["streams"]["digits"]["model"], model)
    for path in out.rglob("cell.json"):
        edited(path, "settings", "model", str(model))
    streams = {"digits": content["streams"]["digits"] | {"model": str(model)}}
    plan = read_plan(write(tmp_path / "plan.yaml", content | {"streams": streams}))
    (model / "README.md").write_text("a page is no part of the model")
    assert all(is_done(cell, out, rows) for cell, rows in plan.cells({}))
    with_other_weights(model)
    with pytest.raises(ValueError, match="run with another model than is in"):
        compare(plan, out, jobs=1, log=quiet)


def test_failing_classifier_does_not_stop_the_others(copied, content, monkeypatch):
    folder, _, _ = copied
    changes = FROZEN | {"classifiers": ["ridge", "prototype"], "reference": None}
    plan = read_plan(write(folder / "failing.yaml", content | changes))
    monkeypatch.setattr(CLASSIFIERS["ridge"].rule_type, "added", lambda *_: 1 / 0)
    with pytest.raises(ComparisonError, match="frozen with ridge: ZeroDivisionError"):
        compare(plan, folder / "out", jobs=1, log=quiet)
    assert "prototype" in {entry.row.classifier for entry in read_comparison(folder / "out").entries}


def test_failing_run_does_not_stop_the_others(content, tmp_path):
    broken = {"broken": {**content["streams"]["digits"], "data": str(tmp_path / "nowhere")}}
    plan = content | FROZEN | {"streams": content["streams"] | broken, "seeds": [0]}
    with pytest.raises(
        ComparisonError, match=r"1 of 2 runs failed; the first one: runs/broken/frozen/seed-0: .*nowhere"
    ):
        compare(read_plan(write(tmp_path / "plan.yaml", plan)), tmp_path / "out", jobs=1, log=quiet)
    assert {entry.stream for entry in read_comparison(tmp_path / "out").entries} == {"digits"}


def test_interrupted_comparison_writes_its_table(content, tmp_path, monkeypatch):
    interrupted = Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("research.comparison.compare.finish_cell", interrupted)
    plan = read_plan(write(tmp_path / "plan.yaml", content | FROZEN))
    with pytest.raises(KeyboardInterrupt):
        compare(plan, tmp_path / "out", jobs=1, log=quiet)
    table = read_comparison(tmp_path / "out")
    assert table.entries == [] and table.scope.reference == Row("frozen", "lda")
    assert table.missing() == [("digits", row, (0, 1)) for row in plan.rows_of("frozen")]


def test_predictions_of_all_rows_give_the_table_s_measures(finished, tmp_path):
    pandas = pytest.importorskip("pandas")
    folder, entries, _ = finished
    table = comparison_predictions(folder / "out")
    write_predictions(folder / "out", tmp_path / "p.parquet")
    pandas.testing.assert_frame_equal(pandas.read_parquet(tmp_path / "p.parquet"), table)
    assert list(table.columns[:8]) == [
        "stream",
        "method",
        "classifier",
        "drift",
        "seed",
        "task",
        "image",
        "image_task",
    ]
    assert table.groupby(["task", "image_task"]).size().to_dict() == dict.fromkeys([(1, 1), (2, 1), (2, 2)], 6 * 2 * 6)
    row = table.method.astype(str) + table.classifier.astype(str) + table.drift.astype(str)
    right = (
        (table["class"].astype(str) == table.predicted.astype(str))
        .groupby([row, table.seed, table.task, table.image_task])
        .mean()
    )
    for entry in entries:
        name, seeds = entry.row.method + entry.row.classifier + entry.row.drift, range(2)
        matrix = [[np.mean([right[name, seed, t, i] for seed in seeds]) for i in range(1, t + 1)] for t in (1, 2)]
        assert [pytest.approx(line) for line in matrix] == entry.by_task
        assert entry.curve == pytest.approx([matrix[0][0], np.mean(matrix[1])])
    run = run_of(folder, entries[0])
    images = {image.image for image in read_predictions(run / "predictions.csv")}
    assert set(table[(table.seed == 0) & (table.method == "frozen")].image) == images and len(images) == 12


def test_intervals_of_the_table_are_corrected_for_the_number_of_rows(finished):
    """Paired differences to the reference and to the best row, with the levels of Holm's test."""
    folder, entries, _ = finished
    plan = read_plan(folder / "plan.yaml")
    chosen = {(entry.stream, entry.row): entry.chosen for entry in entries}
    read = {row: seeds for (_, row), seeds in read_finished(folder / "out", plan.cells(chosen)).items()}
    best = max(entries, key=lambda entry: entry.means["last"]).row
    for other, field in ((plan.reference, "corrected"), (best, "behind")):
        rows = [entry.row for entry in entries if entry.row != other]
        pairs = [
            np.stack([read[row][s].shares["last"] - read[other][s].shares["last"] for s in (0, 1)]) for row in rows
        ]
        expected = dict(zip(rows, holm_intervals([estimated(each) for each in pairs]), strict=True))
        assert {entry.row: getattr(entry, field)["last"] for entry in entries} == expected | {other: None}


def test_run_of_another_process_is_skipped_and_said(copied):
    folder, entries, _ = copied
    run, messages = folder / "out" / "runs" / "digits" / "frozen" / "seed-1", []
    shutil.rmtree(run)
    run.mkdir()
    with FileLock(run / LOCK_FILE):
        partial = compare(read_plan(folder / "plan.yaml"), folder / "out", jobs=1, log=messages.append)
    assert messages[2:] == [
        "1/1 runs/digits/frozen/seed-1 skipped: another process is running it",
        "another process is doing 1 run: repeat the command for the whole table",
    ]
    assert [entry.seeds for entry in partial[:2]] == [(0,), (0,)]
    again = compare(read_plan(folder / "plan.yaml"), folder / "out", jobs=1, log=quiet)
    assert without_times(again) == without_times(entries)


def test_choice_of_settings_waits_for_another_process(copied):
    """A choice among the settings that this process has tried could be another one."""
    folder, entries, _ = copied
    trial = next((folder / "out" / "choices" / "digits" / "LoRA").iterdir())
    aside, messages = shutil.move(trial, folder / "aside"), []
    trial.mkdir()
    lock = FileLock(trial / LOCK_FILE, thread_local=False)
    lock.acquire()

    def finish(message):
        messages.append(message)
        if "waiting" in message:  # the other process ends
            shutil.copytree(aside, trial, dirs_exist_ok=True)
            lock.release()

    assert compare(read_plan(folder / "plan.yaml"), folder / "out", jobs=1, log=finish) == entries
    assert messages[1].endswith("skipped: another process is running it")
    assert messages[2] == "waiting for another process, which is trying 1 setting"


@pytest.mark.rare
@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C reaches a group of processes otherwise")
def test_ctrl_c_stops_all_workers_and_prints_only_how_to_continue(content, tmp_path):
    write(tmp_path / "plan.yaml", content | {"seeds": [0, 1, 2, 3]})
    command = [sys.executable, "-m", "research", "compare", "plan.yaml", "--output", "out", "--jobs", "2"]
    pipe, environment = subprocess.PIPE, os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    while not list((tmp_path / "out").rglob("answers")) and process.poll() is None:  # both workers have read images
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    lines = errors.splitlines()
    assert process.returncode == 130 and lines[0] == "python -m research: stopped by SIGINT"
    assert len(lines) == 3 and lines[2].endswith("research compare plan.yaml --output out --jobs 2")


@pytest.mark.rare
def test_two_processes_give_the_results_of_one(finished, content, tmp_path, capsys):
    """Use the command on a comparison whose training runs are missing."""
    folder, entries, _ = finished
    shutil.copytree(folder / "out", tmp_path / "out")
    for run in (tmp_path / "out" / "runs" / "digits" / "LoRA").iterdir():
        shutil.rmtree(run)
    path = str(folder / "plan.yaml")
    assert main(["compare", path, "--output", str(tmp_path / "out"), "--jobs", "2"]) == 0
    printed = capsys.readouterr().out
    assert "2 of 4 runs are not finished" in printed and "| LoRA | lda | linear |" in printed
    assert without_times(read_comparison(tmp_path / "out").entries) == without_times(entries)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"streems": {}}, "streems: Extra inputs are not permitted"),
        ({"streams": {"../a": {"model": "demo", "data": "x"}}}, "streams.../a"),
        ({"methods": {"a": {"learning_rat": 1}}}, "method 'a' has an unknown setting 'learning_rat'"),
        ({"methods": {1: {"strategy": "frozen"}, "1": {"strategy": "lora"}}}, "'1' occurs twice"),
        ({"streams": {"a": {"model": "demo"}}}, "stream 'a' has no setting 'data'"),
        ({"streams": {"a": {"shots": 4}}}, "stream 'a' has an unknown setting 'shots' (known: attn_implementation, "),
        ({"streams": {"a": {"model": "demo", "data": "$NOWHERE/x"}}}, "environment variable that is not set"),
        ({"streams": {"a": {"model": "m", "data": "x", "retention_scales": [0.5]}}}, "no effect without retention"),
        ({"methods": {"a": {"seed": 1}}}, "method 'a' must not set 'seed': `seeds` lists the seeds"),
        ({"methods": {"a": {"label_column": "kind"}}}, "it belongs to the stream and is the same for all methods"),
        ({"methods": {"a": {"choose": {"learning_rate": ["1e-4", 0.0001]}}}}, "the entries must be different"),
        ({"classifiers": ["lda", "lda"]}, "classifiers: Value error, the entries must be different"),
        ({"reference": {"method": "LoRA", "classifier": "text"}}, "'LoRA with text', which is not a row"),
    ],
)
def test_error_in_the_plan_names_the_wrong_entry(content, tmp_path, change, words):
    path = write(tmp_path / "plan.yaml", {key: v for key, v in content.items() if key != "reference"} | change)
    with pytest.raises(ValueError, match=f"plan.yaml.*{re.escape(words)}"):
        read_plan(path)


def test_method_adds_rows_for_its_classifier(content, tmp_path):
    methods = {"RAPF": {"strategy": "rapf"}, "DuLBE": {"strategy": "dulbe"}, "bare": {}}
    content = content | {"methods": methods, "classifiers": ["text"], "reference": None}
    plan = read_plan(write(tmp_path / "plan.yaml", content))
    assert [row.classifier for row in plan.rows_of("DuLBE")] == ["text"]  # it uses only texts, so that it has no drift
    assert [row.classifier for row in plan.rows_of("RAPF")] == ["text", "rapf"]
    bare = next(cell for cell, _ in plan.cells() if cell.method == "bare")
    assert "drift" not in bare.settings, "a method without a strategy uses the default of `run`, which trains nothing"
    asked = {"classifiers": ["ranpac:features=9", "lda"], "drift": ["none", "linear", "auto"]}
    plan = read_plan(write(tmp_path / "plan.yaml", content | asked))
    # A linear map of features does not apply to the outputs of a ReLU, so ranpac has no "linear" row.
    assert [row.drift for row in plan.rows_of("DuLBE")] == ["none", "auto", "none", "linear", "auto"]
    plan = read_plan(write(tmp_path / "plan.yaml", content | asked | {"drift": ["linear"]}))
    assert [row.drift for row in plan.rows_of("DuLBE")] == ["none", "linear"]


def test_named_class_order_is_the_same_for_all_training_seeds(content, tmp_path):
    def orders(**more):
        streams = {name: settings | more for name, settings in content["streams"].items()}
        cells = [cell for cell, _ in read_plan(write(tmp_path / "plan.yaml", content | {"streams": streams})).cells()]
        names = ("seed", "order_seed", "draw_seed", "class_order")
        return {cell.seed: tuple(cell.settings.get(name) for name in names) for cell in cells}

    assert orders() == {0: (0, 0, None, None), 1: (1, 1, None, None)}, "nothing is drawn, which refuses a seed"
    assert orders(images_per_class=2) == {0: (0, 0, 0, None), 1: (1, 1, 1, None)}
    assert orders(class_order="pilot") == {0: (0, None, None, "pilot"), 1: (1, None, None, "pilot")}
    assert orders(order_seed=7, draw_seed=8) == {0: (0, 7, 8, None), 1: (1, 7, 8, None)}


def test_costs_of_use_and_other_budgets_are_shown(content, tmp_path):
    """Prompts need a second pass of the tower. Rows have a budget only if the trained methods differ in it."""
    methods = {
        "frozen": {"strategy": "frozen"},
        "LoRA": {"strategy": "lora", "learning_rate": 1e-3},
        "longer": {"strategy": "lora", "learning_rate": 1e-3, "epochs": 2},
        "prompts": {"strategy": "l2p:pool=6,length=4,chosen=2", "batch_size": 6},
    }
    streams = {
        name: {key: value for key, value in settings.items() if not key.startswith("retention")}
        for name, settings in content["streams"].items()
    }
    mine = content | {"streams": streams, "methods": methods, "classifiers": ["lda"], "drift": ["none"], "seeds": [0]}
    entries = compare(read_plan(write(tmp_path / "plan.yaml", mine)), tmp_path / "out", jobs=1, log=quiet)
    by_method = {entry.row.method: entry for entry in entries}
    assert {name: entry.passes for name, entry in by_method.items()} == {
        "frozen": 1,
        "LoRA": 1,
        "longer": 1,
        "prompts": 2,
    }
    assert {name: entry.budget for name, entry in by_method.items()} == {
        "frozen": "",
        "LoRA": "epochs 1, batch 4, rate 0.001",
        "longer": "epochs 2, batch 4, rate 0.001",
        "prompts": "epochs 1, batch 6, rate 0.001",
    }
    if sys.platform == "linux":  # a process with torch takes over 100 MiB
        assert all(entry.peak_bytes > 100 * 2**20 for entry in entries)
    with (tmp_path / "out" / "comparison.csv").open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert {row["method"]: (row["passes"], row["budget"]) for row in rows}["prompts"] == (
        "2",
        "epochs 1, batch 6, rate 0.001",
    )
    del mine["methods"]["longer"], mine["methods"]["prompts"]
    entries = compare(read_plan(write(tmp_path / "plan.yaml", mine)), tmp_path / "out", jobs=1, log=quiet)
    assert [entry.budget for entry in entries] == ["", ""]


def test_peak_memory_is_that_of_the_block(tmp_path):
    if sys.platform != "linux":
        pytest.skip("other systems do not tell the peak of a block")

    def use() -> None:  # 64 MiB that no allocator has kept
        with mmap(-1, 2**26) as memory:
            for _ in range(2**6):
                memory.write(bytes(2**20))

    use()  # freed before the block
    with peak_memory(torch.device("cpu")) as peak:
        before = peak()
        use()
        during = peak()
    assert before is not None and 50 * 2**20 < during - before < 200 * 2**20
    with peak_memory(torch.device("cpu")) as peak:
        assert peak() < during - 30 * 2**20


def test_address_needs_an_engine(content, tmp_path):
    plan = read_plan(write(tmp_path / "plan.yaml", content))
    with pytest.raises(ValueError, match="address 'tcp://a:1' has no effect with the backend 'local'"):
        compare(plan, tmp_path / "out", address="tcp://a:1")
    assert not (tmp_path / "out").exists()


@pytest.mark.rare
def test_method_with_augmented_views_learns_other_features(content, tmp_path):
    methods = {"plain": {"strategy": "lora"}, "views": {"strategy": "lora", "augment": "affine", "copies": 1}}
    mine = content | {"methods": methods, "classifiers": ["lda"], "drift": ["none"], "seeds": [0], "reference": None}
    plan = read_plan(write(tmp_path / "plan.yaml", mine))
    assert [cell.settings.get("drift") for cell, _ in plan.cells()] == ["linear"] * 2 * len(plan.streams)
    plain, views = compare(plan, tmp_path / "out", jobs=1)
    assert [entry.row.method for entry in (plain, views)] == ["plain", "views"]
    features = [read_features(tmp_path / "out" / cell.folder) for cell, _ in plan.cells()]
    assert not torch.equal(features[0][0].closing.features, features[1][0].closing.features)


def test_stream_takes_the_settings_of_a_protocol_but_not_those_of_its_method(content, tmp_path):
    protocol = {"model": "m", "epochs": 7, "batch_size": 3, "strategy": "dulbe", "classifiers": "lda", "drift": "none"}
    (tmp_path / "protocols").mkdir()
    write(tmp_path / "protocols" / "p.yaml", protocol)
    streams = {"a": {"protocol": "protocols/p.yaml", "data": "x", "batch_size": 4}}
    (stream,) = read_plan(write(tmp_path / "plan.yaml", content | {"streams": streams})).streams.values()
    assert stream == {"model": "m", "data": "x", "epochs": 7, "batch_size": 4}
    streams["a"]["protocol"] = "gone.yaml"
    with pytest.raises(FileNotFoundError, match=r"protocol file '.*gone.yaml' does not exist"):
        read_plan(write(tmp_path / "plan.yaml", content | {"streams": streams}))


@pytest.mark.rare
def test_example_file_for_photographs_runs(digit_folders, tmp_path, monkeypatch, capsys):
    """Run the example as a user does, on the folder that it names, but with the demo model and small settings."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(digit_folders(4, 8, 3), "photos")
    content = yaml.safe_load((ROOT / "examples" / "comparisons" / "my_photographs.yaml").read_text(encoding="utf-8"))
    small = {"model": "demo", "increment": 2, "epochs": 1, "support_rank": 8, "residual_rank": 2, "device": "cpu"}
    content["streams"]["my photographs"] |= small
    write(tmp_path / "mine.yaml", content)
    assert main(["compare", "mine.yaml", "--output", "out"]) == 0
    table = read_comparison(tmp_path / "out")
    assert table.scope.reference == Row("frozen", "bayes") and table.missing() == []
    assert {entry.row.method for entry in table.entries} == {"frozen", "LoRA", "merged LoRA", "DuLBE"}
    assert all(entry.seeds == (0, 1, 2) and entry.differences["last"] for entry in table.entries[1:])
    assert main(["report", "out"]) == 0 and "my photographs" in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples" / "comparisons").glob("*.yaml")), ids=lambda path: path.stem
)
def test_example_files_are_valid_and_match_their_results(path, monkeypatch):
    """If results of a file are stored, they have the seeds, streams and rows that the file lists."""
    for name in ("MODEL", "OTHER_MODEL", "DATA", "MODELS", "TWIN"):
        monkeypatch.setenv(name, "demo")
    plan, measured = read_plan(path), RESULTS / "comparisons" / f"{path.stem}.csv"
    assert plan.cells()
    if measured.is_file():
        with measured.open(newline="", encoding="utf-8") as lines:
            rows = list(csv.DictReader(lines))
        assert {int(row["seeds"]) for row in rows} == {len(plan.seeds)}
        assert {row["stream"] for row in rows} == set(plan.streams)
        planned = {(row.method, row.classifier, row.drift) for row in plan.rows}
        found = {(row["method"], row["classifier"], row["drift"]) for row in rows}
        assert found <= planned
        lacking = planned - found
        later = {method for method, *_ in lacking} - {method for method, *_ in found}
        assert later <= ADDED, "tables say of these methods that they are not measured"
        classifiers = {name for method, name, _ in lacking if method not in later}
        assert classifiers <= ({"bayes"} if path.stem in OLDER else set())
    assert f"compare examples/comparisons/{path.name} --output" in path.read_text(encoding="utf-8")


def test_every_strategy_is_a_row_of_some_comparison(monkeypatch):
    for name in ("MODEL", "OTHER_MODEL", "DATA", "MODELS", "TWIN"):
        monkeypatch.setenv(name, "demo")
    plans = [read_plan(path) for path in (ROOT / "examples" / "comparisons").glob("*.yaml")]
    compared = {
        method.get("strategy", "frozen").partition(":")[0] for plan in plans for method in plan.methods.values()
    }
    assert compared == {name for name, cls in STRATEGIES.items() if cls.__module__.startswith("dulbe_peft.")}
