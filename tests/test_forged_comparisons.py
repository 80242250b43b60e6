"""Files of a comparison that are forged, damaged or somebody else's: no wrong table, and nothing is replaced."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import yaml
from lives import stream, tiny_learner

from dulbe_peft.classifiers.lda import LdaClassifier
from dulbe_peft.comparison.cells import _digests, _drop_earlier_tasks, answers_path, ask, read_answers, read_cell
from dulbe_peft.comparison.plan import Row, _plan
from dulbe_peft.comparison.table import MEASURES, Entry, Scope, Table, read_table, refuse_others, write_table
from dulbe_peft.metrics.bootstrap import Difference
from dulbe_peft.utils.files import read_json, write_json
from dulbe_peft.utils.tensors import read_tensors, write_tensors

STREAM = "streams: {s: {model: demo, data: demo-digits, increment: 5}}\n"
METHOD = "methods: {frozen: {strategy: frozen}}\n"


@pytest.mark.parametrize(
    "change",
    [
        {"settings": 5},
        {"cost": {}},
        {"cost": {"seconds": float("nan")}},
        {"cost": {"seconds": 1.0, "trainable_parameters": 1.5, "kept_bytes": 0}},
        {"text": None},
        {"retention": 5},
        {"retention": {"before": 9, "after": 0.5}},
        {"retention": {"before": 0.5, "after": 0.5, "scales": [{}]}},
    ],
)
def test_a_forged_cell_of_a_comparison_is_named(tmp_path, change):
    cost = {"seconds": 1.0, "trainable_parameters": 0, "kept_bytes": 0}
    whole = {"settings": {}, "cost": cost, "data": [], "retention_of": [], "text": True}
    write_json(tmp_path / "cell.json", whole)
    assert read_cell(tmp_path) == whole
    write_json(tmp_path / "cell.json", whole | change)
    with pytest.raises(ValueError, match=r"cell.json is damaged"):
        read_cell(tmp_path)


@pytest.fixture(scope="module")
def cell(tmp_path_factory):
    """A finished run of a comparison, with the answers of one classifier."""
    folder = tmp_path_factory.mktemp("cell")
    learner = tiny_learner(strategy="lora", classifiers=("prototype",))
    learner.run(stream(2), folder, keep_features=True)
    cost = {"seconds": 1.0, "trainable_parameters": 0, "kept_bytes": 0}
    facts = {"settings": {"seed": 0}, "cost": cost, "data": [], "retention_of": [], "text": True}
    facts |= {"logit_scale": 100.0, "text_embeds": "current", "bridge": {}, "features": _digests(folder)}
    write_json(folder / "cell.json", facts)
    ask(folder, LDA)
    return folder


LDA = Row("LoRA", "lda")


def shortened(tensors):
    return {name: tensor for name, tensor in tensors.items() if name.endswith(" 1")}


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, facts: ({}, facts),
        lambda tensors, facts: (shortened(tensors), facts),
        lambda tensors, facts: (tensors | {"task 2": tensors["task 2"][:1]}, facts),
        lambda tensors, facts: (tensors | {"task 2": 0 * tensors["task 2"]}, facts),
        lambda tensors, facts: (tensors | {"truth 2": tensors["truth 2"] - 9}, facts),
        lambda tensors, facts: (tensors | {"truth 1": tensors["truth 1"].flip(0)}, facts),
        lambda tensors, facts: (tensors | {"predicted 2": tensors["predicted 2"] + 9}, facts),
        lambda tensors, facts: (tensors | {"predicted 2": tensors["predicted 2"] + 0.5}, facts),
        lambda tensors, facts: (tensors | {"probability 2": 0 * tensors["probability 2"] + 5}, facts),
        lambda tensors, facts: (tensors, facts | {"nbytes": "x"}),
        lambda tensors, facts: (tensors, facts | {"nbytes": "-1"}),
        lambda tensors, facts: (tensors, facts | {"seconds": "nan"}),
        lambda tensors, facts: (tensors, facts | {"class_names": "["}),
        lambda tensors, facts: (tensors, facts | {"class_names": "[" * 100_000}),
        lambda tensors, facts: (tensors, facts | {"class_names": '["a0"]'}),
        lambda tensors, facts: (tensors, facts | {"classifier": "ridge"}),
        lambda tensors, facts: (tensors, facts | {"of": "another run"}),
    ],
)
def test_forged_answers_of_a_comparison_are_named(cell, tmp_path, change):
    folder = shutil.copytree(cell, tmp_path / "cell")
    path = answers_path(folder, LDA)
    write_tensors(path, *change(*read_tensors(path)))
    with pytest.raises(ValueError, match=r"lda.safetensors is damaged.*remove the file"):
        read_answers(folder, LDA)


def test_answers_of_another_seed_drift_or_version_are_refused(cell, tmp_path, monkeypatch):
    folder = shutil.copytree(cell, tmp_path / "cell")
    read_answers(folder, LDA)
    shutil.copy(answers_path(folder, LDA), answers_path(folder, replace(LDA, drift="linear")))
    with pytest.raises(ValueError, match="of another run, classifier or version"):
        read_answers(folder, replace(LDA, drift="linear"))
    facts = read_json(folder / "cell.json")
    write_json(folder / "cell.json", facts | {"settings": {"seed": 1}})
    with pytest.raises(ValueError, match="of another run, classifier or version"):
        read_answers(folder, LDA)
    write_json(folder / "cell.json", facts)
    monkeypatch.setattr(LdaClassifier, "settings", lambda self: {"shrinkage": "another default"})
    with pytest.raises(ValueError, match="of another run, classifier or version"):
        read_answers(folder, LDA)


def test_answers_of_an_earlier_version_are_read(cell, tmp_path):
    folder = shutil.copytree(cell, tmp_path / "cell")
    path = answers_path(folder, LDA)
    tensors, facts = read_tensors(path)
    write_tensors(path, tensors, {name: facts[name] for name in ("class_names", "nbytes", "seconds", "classifier")})
    assert read_answers(folder, LDA)[1:] == read_answers(cell, LDA)[1:]


@pytest.mark.parametrize("noted", [True, False])
def test_features_that_are_not_the_run_s_are_not_learned_from(cell, tmp_path, noted):
    folder = shutil.copytree(cell, tmp_path / "cell")
    if not noted:  # as in earlier versions
        facts = read_json(folder / "cell.json")
        write_json(folder / "cell.json", {name: value for name, value in facts.items() if name != "features"})
    (folder / "features" / "task-002.safetensors").unlink()
    answers_path(folder, LDA).unlink()
    with pytest.raises(ValueError, match=f"features .*remove {folder}, and the comparison trains the run again"):
        ask(folder, LDA)
    assert not answers_path(folder, LDA).exists()


def test_a_finished_run_whose_learner_is_gone_is_still_in_the_table(cell, tmp_path):
    folder = shutil.copytree(cell, tmp_path / "cell")
    for task in folder.glob("task-*"):
        shutil.rmtree(task)
    _drop_earlier_tasks(folder)
    assert read_answers(folder, LDA)


@pytest.mark.parametrize(
    "path, value",
    [
        ("entries.0.means.last", 99),
        ("entries.0.means.last", float("nan")),
        ("entries.0.means", {}),
        ("entries.0.calibration_error", "x"),
        ("entries.0.differences.last.low", None),
        ("entries.0.kept_bytes", 10**400),
        ("entries.0.retention", {"before": 9, "after": 0}),
        ("entries.0.row.classifier", ["lda"]),
        ("entries.0.row.more", 1),
        ("entries.0.seeds", "01"),
        ("scope.methods", []),
        ("scope.choices", "x"),
        ("chosen", [1]),
    ],
)
def test_a_forged_table_of_a_comparison_is_named(tmp_path, capsys, path, value):
    from dulbe_peft.commands.main import main

    gap = Difference(0.0, -0.1, 0.1)
    figures = [dict.fromkeys(MEASURES, value) for value in (0.5, 0.1, gap)]
    entry = Entry("s", Row("frozen", "bridge"), (0,), *figures, None, 0.1, 1.0, 0, 0, {"before": 0.5, "after": 0.4})
    write_table(Table([entry], {}, Scope.of(_plan(yaml.safe_load(STREAM + METHOD)))), tmp_path)
    assert read_table(tmp_path).entries == [entry]
    content = read_json(tmp_path / "comparison.json")
    *folders, last = path.split(".")
    part = content
    for name in folders:
        part = part[int(name) if isinstance(part, list) else name]
    part[last] = value
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    assert main(["report", str(tmp_path)]) == 2
    assert "comparison.json is not as" in capsys.readouterr().err and not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("name", ["comparison.json", "comparison.csv", "advice.json"])
@pytest.mark.parametrize(
    "text", ["mine", '{"mine": 1}', "stream,mine\n1,2\n", '"entries scope settings classifiers"', ""]
)
def test_a_comparison_replaces_no_table_of_others(tmp_path, capsys, name, text):
    from dulbe_peft.commands.main import main

    (tmp_path / name).write_text(text)
    (tmp_path / "c.yaml").write_text(STREAM + METHOD)
    command = ["compare", str(tmp_path / "c.yaml")]
    if name == "advice.json":
        command = ["advise", "--model", "demo", "--data", "demo-digits"]
    assert main([*command, "--output", str(tmp_path)]) == 2
    assert f"{tmp_path / name} was not written by a comparison" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == text and not (tmp_path / "runs").exists()


def test_a_comparison_replaces_what_it_wrote_and_no_link_to_nothing(tmp_path):
    plan = _plan(yaml.safe_load(STREAM + METHOD))
    write_table(Table([], {}, Scope.of(plan)), tmp_path)
    refuse_others(tmp_path)
    (tmp_path / "comparison.csv").unlink()
    (tmp_path / "comparison.csv").symlink_to("elsewhere")
    with pytest.raises(FileExistsError, match=r"comparison\.csv"):
        refuse_others(tmp_path)
