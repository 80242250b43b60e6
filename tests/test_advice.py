"""Advice from held-back training images: what is measured, what is said, and that test images are not looked at."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
import yaml

from benchmarks import advising
from dulbe_peft.commands.main import main
from dulbe_peft.comparison import advice as advice_module
from dulbe_peft.comparison.advice import Advice, Contest, advice_plans, advise, format_advice
from dulbe_peft.comparison.cells import read_answers, read_cell
from dulbe_peft.comparison.compare import compare
from dulbe_peft.comparison.plan import Row, read_plan
from dulbe_peft.metrics.bootstrap import Difference

QUICK = {"increment": 2, "epochs": 1, "batch_size": 4, "support_rank": 8, "residual_rank": 2, "device": "cpu"}
TRIALS = {"LoRA": {"strategy": "lora", "learning_rate": 1e-3}}


@pytest.fixture(scope="module")
def settings(digit_folders):
    return {"model": "demo", "data": str(digit_folders(6, 10, 2)), **QUICK}


@pytest.fixture(scope="module")
def advised(settings, tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("advice")
    return folder, advise(settings, folder, 1, ("bridge", "lda"), TRIALS, log=lambda _: None)


def test_the_advice_is_what_was_best_on_held_back_training_images(advised):
    folder, advice = advised
    cell = folder / "runs" / "whole" / "frozen" / "seed-0"
    right = {}
    for name in ("bridge", "lda"):
        answers, _ = read_answers(cell, Row("frozen", name), read_cell(cell))
        right[name] = float(answers[-1].right.float().mean())
    assert advice.classifiers == pytest.approx(right)
    best = max(right, key=right.__getitem__)
    assert next(iter(advice.classifiers)) == best
    assert advice.usual == best and advice.rival is not None and advice.rival.row.classifier != best
    assert advice.training is not None and advice.training.row.method == "LoRA"
    if not advice.training.clear:
        used = advice.rival.row.classifier if advice.rival.clear else best
        assert advice.settings == {"strategy": "frozen", "classifiers": used}
    assert advice.held_back == len(answers[-1].truth)
    assert 6 <= advice.held_back <= 18  # about a fifth of 60


def test_test_images_are_not_looked_at(advised, settings, tmp_path):
    """The same advice, although every test image is damaged where only its pixels show it."""
    _, advice = advised
    photos = tmp_path / "photos"
    shutil.copytree(settings["data"], photos)
    for path in (photos / "test").rglob("*.png"):
        whole = path.read_bytes()
        path.write_bytes(whole[:60] + bytes(255 - byte for byte in whole[60:-20]) + whole[-20:])
    again = advise(settings | {"data": str(photos)}, tmp_path / "out", 1, ("bridge", "lda"), {}, log=lambda _: None)
    assert again.classifiers == advice.classifiers and again.training is None


def test_the_probe_learns_a_few_tasks_of_few_images(advised):
    folder, _ = advised
    probe = read_cell(folder / "runs" / "probe" / "LoRA" / "seed-0")
    assert (probe.settings["max_tasks"], probe.settings["images_per_class"]) == (3, 16)
    whole, few = advice_plans({"model": "demo", "data": "x", "images_per_class": 4})
    assert few.streams["probe"]["images_per_class"] == 4 and whole.streams["whole"]["images_per_class"] == 4
    assert list(whole.methods) == ["frozen"] and whole.drifts == ["none"]


@pytest.mark.parametrize("gain, clear", [(0.3, True), (0.02, False)])
def test_another_classifier_is_advised_only_where_it_is_clearly_better(gain, clear, monkeypatch, tmp_path):
    """200 held-back images; `bayes` is right about half of them, and `lda` about as many and `gain` of all more."""
    bayes = torch.arange(200) // 2 % 2
    lda = bayes.clone()
    lda[(bayes == 0).nonzero()[: round(200 * gain), 0]] = 1
    found = {Row("frozen", "bayes"): bayes.double().numpy(), Row("frozen", "lda"): lda.double().numpy()}
    monkeypatch.setattr(advice_module, "_measured", lambda *_: (found, {"frozen": 1.0}))
    advice = advise({"model": "demo", "data": "x"}, tmp_path, 1, ("bayes", "lda"), {})
    assert list(advice.classifiers) == ["lda", "bayes"] and advice.usual == "bayes" and advice.rival.clear == clear
    assert advice.rival.gain.mean == pytest.approx(gain, abs=0.01)
    assert advice.settings["classifiers"] == ("lda" if clear else "bayes")


@pytest.mark.parametrize("others, clear", [(1, True), (10, False)])
def test_the_same_gain_is_less_clear_among_many(others, clear, monkeypatch, tmp_path):
    """Nine images for and one against: 1 of 47 by luck, which is too much where ten have been tried."""
    usual = np.r_[np.zeros(9), np.ones(191)]
    best, other = np.r_[np.ones(199), 0], np.zeros(200)
    found = {Row("frozen", "bayes"): usual, Row("frozen", "lda"): best}
    found |= {Row("frozen", f"lda:shrinkage=0.{number}"): other for number in range(1, others)}
    monkeypatch.setattr(advice_module, "_measured", lambda *_: (found, {"frozen": 1.0}))
    rival = advise({"model": "demo", "data": "x"}, tmp_path, 1, [row.classifier for row in found], {}).rival
    assert rival.row.classifier == "lda" and rival.clear == clear
    assert rival.gain.mean == pytest.approx(0.04) and (rival.gain.low > 0) == clear


def test_training_must_beat_what_is_used_without_it(monkeypatch, tmp_path):
    """Trained `bayes` beats `lda`, and is worse than `bayes`."""
    half, number = torch.arange(200) % 2, torch.arange(200) % 20
    found = {
        Row("frozen", "bayes"): (number < 16).double().numpy(),
        Row("frozen", "lda"): (half == 0).double().numpy(),
        Row("LoRA", "bayes"): (number < 15).double().numpy(),
    }
    frozen = {row: right for row, right in found.items() if row.method == "frozen"}
    answers = iter([(frozen, {"frozen": 1.0}), (found, {"frozen": 1.0, "LoRA": 2.0})])
    monkeypatch.setattr(advice_module, "_measured", lambda *_: next(answers))
    advice = advise({"model": "demo", "data": "x"}, tmp_path, 1, ("bayes", "lda"), TRIALS)
    assert advice.training.gain.mean < 0 and not advice.training.clear
    assert advice.settings == {"strategy": "frozen", "classifiers": "bayes"}


def test_with_a_single_held_back_image_nothing_is_compared(monkeypatch, tmp_path):
    found = {Row("frozen", name): torch.ones(1).numpy() for name in ("bayes", "lda")}
    monkeypatch.setattr(advice_module, "_measured", lambda *_: (found, {"frozen": 1.0}))
    advice = advise({"model": "demo", "data": "x"}, tmp_path, 1, ("bayes", "lda"), {})
    assert (
        advice.rival is None and advice.settings["classifiers"] == "bayes" and "Only 1 images" in format_advice(advice)
    )


def made(training, rival):
    settings = {"strategy": "dulbe", "learning_rate": 3e-4, "classifiers": "bridge"}
    trained, other = Row("DuLBE", "bridge", "linear"), Row("frozen", "lda")
    return Advice(
        settings=settings,
        classifiers={"lda": 0.9, "bayes": 0.88},
        usual="bayes",
        rival=Contest(row=other, gain=Difference(0.02, -0.01, 0.05), clear=rival),
        training=Contest(row=trained, gain=training[0], clear=training[1]),
        held_back=50,
        seconds={"whole": 10.0, "probe": 30.0},
    )


def test_the_words():
    said = format_advice(made((Difference(0.03, 0.01, 0.05), True), False))
    assert "90.0 %  lda" in said and "No other is clearly ahead of bayes (lda: +2.0 points" in said
    assert "Training pays: the best of the probe, DuLBE with bridge, drift linear, is +3.0 points" in said
    assert "Only 50 images could be held back" in said
    assert said.endswith("Use: --strategy dulbe --learning-rate 0.0003 --classifiers bridge")
    said = format_advice(made((Difference(0.01, -0.01, 0.05), False), True))
    assert "Training does not pay clearly" in said and "lda is clearly ahead of bayes" in said


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


@pytest.mark.slow
def test_the_score_of_advice_is_what_it_lost_on_the_test_images(settings, tmp_path, capsys):
    content = {
        "streams": {"digits": settings},
        "methods": {"frozen": {"strategy": "frozen"}},
        "classifiers": ["text", "lda"],
        "seeds": [0, 1],
    }
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    entries = compare(read_plan(file), tmp_path / "comparison", 1, log=lambda _: None)
    command = [str(file), "--comparison", str(tmp_path / "comparison"), "--output", str(tmp_path / "scored")]
    advising.main([*command, "--no-training"])
    found = json.loads((tmp_path / "scored" / "advising.json").read_text())
    means = {entry.row.title: entry.means["last"] for entry in entries}
    assert found["summary"]["best on average"] == max(means, key=means.__getitem__)
    assert len(found["rows"]) == 2 and all(row["regret"] >= 0 for row in found["rows"])
    for row in found["rows"]:
        assert (row["regret"] == 0) == (row["advised"] == row["best"])
