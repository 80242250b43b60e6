"""Advice from held-back training images: what is measured, what is said, and that test images are not looked at."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import yaml

from benchmarks import advising
from dulbe_peft.cli import main
from dulbe_peft.comparison.advice import Advice, advice_plans, advise, format_advice
from dulbe_peft.comparison.cells import read_answers, read_cell
from dulbe_peft.comparison.compare import compare
from dulbe_peft.comparison.plan import Row, read_plan
from dulbe_peft.comparison.statistics import Difference

QUICK = {"increment": 2, "epochs": 1, "batch_size": 4, "support_rank": 8, "residual_rank": 2, "device": "cpu"}
TRIALS = {"LoRA": {"strategy": "lora", "learning_rate": 1e-3}}


@pytest.fixture(scope="module")
def settings(digit_folders):
    return {"model": "demo", "data": str(digit_folders(6, 10, 2)), **QUICK}


@pytest.fixture(scope="module")
def advised(settings, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("advice")
    return folder, advise(settings, folder, 1, ("bridge", "lda"), TRIALS, say=lambda _: None)


def test_the_advice_is_what_was_best_on_held_back_training_images(advised):
    folder, advice = advised
    cell = folder / "runs" / "whole" / "frozen" / "seed-0"
    right = {}
    for name in ("bridge", "lda"):
        answers, _, _ = read_answers(cell, Row("frozen", name))
        right[name] = float(answers[-1].right.float().mean())
    assert advice.classifiers == pytest.approx(right)
    best = max(right, key=right.__getitem__)
    assert next(iter(advice.classifiers)) == best
    assert advice.training is not None and advice.training[0].method == "LoRA"
    if not advice.pays:
        assert advice.settings == {"strategy": "frozen", "classifiers": best}
    assert advice.pays == (advice.training[1].low > 0)
    assert advice.held_back == len(read_answers(cell, Row("frozen", "lda"))[0][-1].truth)
    assert 6 <= advice.held_back <= 18  # about a fifth of 60


def test_test_images_are_not_looked_at(advised, settings, tmp_path):
    """The same advice, although every test image is damaged where only its pixels show it."""
    _, advice = advised
    photos = tmp_path / "photos"
    shutil.copytree(settings["data"], photos)
    for path in (photos / "test").rglob("*.png"):
        whole = path.read_bytes()
        path.write_bytes(whole[:60] + bytes(255 - byte for byte in whole[60:-20]) + whole[-20:])
    again = advise(settings | {"data": str(photos)}, tmp_path / "out", 1, ("bridge", "lda"), {}, say=lambda _: None)
    assert again.classifiers == advice.classifiers and again.training is None and not again.pays


def test_the_probe_learns_a_few_tasks_of_few_images(advised):
    folder, _ = advised
    probe = read_cell(folder / "runs" / "probe" / "LoRA" / "seed-0")
    assert (probe["settings"]["max_tasks"], probe["settings"]["images_per_class"]) == (3, 16)
    whole, few = advice_plans({"model": "demo", "data": "x", "images_per_class": 4})
    assert few.streams["probe"]["images_per_class"] == 4 and whole.streams["whole"]["images_per_class"] == 4
    assert list(whole.methods) == ["frozen"] and whole.drifts == ["none"]


def made(gain, pays):
    settings = {"strategy": "dulbe", "learning_rate": 3e-4, "classifiers": "bridge"}
    ahead = ("lda", Difference(0.02, -0.01, 0.05))
    return Advice(
        settings,
        {"bridge": 0.9, "lda": 0.88},
        ahead,
        (Row("DuLBE", "bridge", "linear"), gain),
        pays,
        50,
        {"whole": 10.0, "probe": 30.0},
    )


def test_the_words():
    said = format_advice(made(Difference(0.03, 0.01, 0.05), True))
    assert "90.0 %  bridge" in said and "not clearly ahead of lda (+2.0 points" in said
    assert "Training pays: the best of the probe, DuLBE with bridge, drift linear, is +3.0 points" in said
    assert "Only 50 images could be held back" in said
    assert said.endswith("Use: --strategy dulbe --learning-rate 0.0003 --classifiers bridge")
    assert "Training does not pay clearly" in format_advice(made(Difference(0.01, -0.01, 0.05), False))


def test_the_command(settings, tmp_path, capsys):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = [
        "advise",
        *flags,
        "--output",
        str(tmp_path / "advice"),
        "--no-training",
        "--jobs=1",
        "--classifiers=lda,text",
    ]
    assert main(command) == 0
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "advice" / "advice.json").read_text())
    assert found["training"] is None and set(found["settings"]) == {"strategy", "classifiers"}
    assert f"Use: --strategy frozen --classifiers {found['settings']['classifiers']}" in said
    assert set(found["classifiers"]) == {"lda", "text"}
    assert list(found["classifiers"].values()) == sorted(found["classifiers"].values(), reverse=True)
    assert main(["advise", "--model", "demo"]) == 2 and "--data is required" in capsys.readouterr().err


def test_the_score_of_advice_is_what_it_lost_on_the_test_images(settings, tmp_path, capsys):
    content = {
        "streams": {"digits": settings},
        "methods": {"frozen": {"strategy": "frozen"}},
        "classifiers": ["text", "lda"],
        "seeds": [0, 1],
    }
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    entries = compare(read_plan(file), tmp_path / "comparison", 1, say=lambda _: None)
    command = [str(file), "--comparison", str(tmp_path / "comparison"), "--output", str(tmp_path / "scored")]
    advising.main([*command, "--no-training"])
    found = json.loads((tmp_path / "scored" / "advising.json").read_text())
    means = {entry.row.title: entry.means["last"] for entry in entries}
    assert found["summary"]["best on average"] == max(means, key=means.__getitem__)
    assert len(found["rows"]) == 2 and all(row["regret"] >= 0 for row in found["rows"])
    for row in found["rows"]:
        assert (row["regret"] == 0) == (row["advised"] == row["best"])
