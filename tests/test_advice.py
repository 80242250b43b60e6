"""Advice from held-back training images: what is measured, what is said, and that test images are not looked at."""

import json
import shutil

import numpy as np
import pytest
import torch
import yaml

from benchmarks import advising
from dulbe_peft.commands.main import main
from dulbe_peft.comparison import advice as advice_module
from dulbe_peft.comparison.advice import ClassCounts, Contest, Regret, advice_plans, advise, format_advice
from dulbe_peft.comparison.cells import read_answers, read_cell
from dulbe_peft.comparison.compare import compare
from dulbe_peft.comparison.intervals import Difference
from dulbe_peft.comparison.plan import Row, read_plan
from dulbe_peft.utils.files import write_csv

QUICK = {"increment": 2, "epochs": 1, "batch_size": 4, "support_rank": 8, "residual_rank": 2, "device": "cpu"}
SECONDS = {"frozen": 1.0, "LoRA": 2.0}
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
    right = {}
    for method in ("frozen", "frozen affine", "frozen crop+flip"):
        cell = folder / "runs" / "whole" / method / "seed-0"
        for name in ("bridge", "lda"):
            answers, _ = read_answers(cell, Row(method, name), read_cell(cell))
            right[name + method[6:].replace(" ", ", augment ")] = float(answers[-1].right.float().mean())
    assert advice.classifiers == pytest.approx(right)
    assert list(advice.classifiers.values()) == sorted(right.values(), reverse=True)
    assert advice.training is not None and advice.training.row.method == "LoRA"
    if not advice.training.clear:
        best, _, augment = next(iter(advice.classifiers)).partition(", augment ")
        wanted = {"strategy": "frozen", "classifiers": best} | ({"augment": augment, "copies": 3} if augment else {})
        assert advice.settings == wanted
    assert advice.held_back == len(answers[-1].truth) and 6 <= advice.held_back <= 18  # about a fifth of 60
    images = [n for task in json.loads((cell / "results.json").read_text())["tasks"] for n in task["images"].values()]
    assert advice.counts == ClassCounts(classes=6, fewest=min(images), most=max(images))


def test_test_images_are_not_looked_at(advised, settings, tmp_path):
    """The same advice, although every test image is damaged where only its pixels show it."""
    _, advice = advised
    photos = tmp_path / "photos"
    shutil.copytree(settings["data"], photos)
    for path in (photos / "test").rglob("*.png"):
        whole = path.read_bytes()
        path.write_bytes(whole[:60] + bytes(255 - byte for byte in whole[60:-20]) + whole[-20:])
    again = advise(settings | {"data": str(photos)}, tmp_path / "out", 1, ("bridge", "lda"), {}, log=lambda _: None)
    plain = {name: share for name, share in advice.classifiers.items() if "augment" not in name}
    assert again.classifiers == plain and again.training is None


def test_the_probe_learns_a_few_tasks_of_few_images(advised):
    folder, _ = advised
    probe = read_cell(folder / "runs" / "probe" / "LoRA" / "seed-0")
    assert (probe.settings["max_tasks"], probe.settings["images_per_class"]) == (3, 16)
    whole, few = advice_plans({"model": "demo", "data": "x", "images_per_class": 4})
    assert few.streams["probe"]["images_per_class"] == 4 and whole.streams["whole"]["images_per_class"] == 4
    assert list(whole.methods) == ["frozen", "frozen affine", "frozen crop+flip"] and whole.drifts == ["none"]
    assert list(advice_plans({"model": "demo", "data": "x"}, trials={})[0].methods) == ["frozen"]


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """A function that advises where the given answers, one dict a comparison, have been measured."""

    def advises(*answers, trials=None):
        results = {"tasks": [{"images": {"a": 3, "b": 9}}], "zero_shot": {"last_accuracy": 0.5}}
        run = tmp_path / "runs" / "whole" / "frozen" / "seed-0"
        run.mkdir(parents=True)
        (run / "results.json").write_text(json.dumps(results))
        found = iter([({Row(*row): np.array(right, float) for row, right in one.items()}, SECONDS) for one in answers])
        monkeypatch.setattr(advice_module, "_measured", lambda *_: next(found))
        return advise({"model": "demo", "data": "x"}, tmp_path, 1, ("bayes", "lda"), trials or {})

    return advises


@pytest.mark.parametrize("ahead, clear", [(3, False), (60, True)])
def test_the_best_on_held_back_images_wins_also_where_it_is_not_clear(ahead, clear, measured):
    """200 held-back images; `bayes` names half of them right, and `lda` a few more."""
    bayes, lda = np.arange(200) < 100, np.arange(200) < 100 + ahead
    advice = measured({("frozen", "bayes"): bayes, ("frozen", "lda"): lda})
    assert list(advice.classifiers) == ["lda", "bayes"] and advice.settings["classifiers"] == "lda"
    assert advice.lead.gain.mean == pytest.approx(ahead / 200) and advice.lead.clear == clear
    assert advice.zero_shot == 0.5 and advice.counts == ClassCounts(classes=2, fewest=3, most=9)


@pytest.mark.parametrize("others, clear", [(1, True), (10, False)])
def test_the_same_lead_is_less_clear_among_many(others, clear, measured):
    """Nine images for and one against: 1 of 47 by luck, which is too much where ten have been tried."""
    found = {("frozen", "bayes"): np.r_[np.zeros(9), np.ones(191)], ("frozen", "lda"): np.r_[np.ones(199), 0]}
    found |= {("frozen", f"lda:shrinkage=0.{number}"): np.zeros(200) for number in range(1, others)}
    lead = measured(found).lead
    assert lead.row.classifier == "lda" and lead.clear == clear and lead.gain.mean == pytest.approx(0.04)


def test_training_must_clearly_beat_what_is_used_without_it(measured):
    number = np.arange(200) % 20
    frozen = {("frozen", "bayes"): number < 16, ("frozen", "lda"): number < 10}
    advice = measured(frozen, frozen | {("LoRA", "bayes"): number < 15}, trials=TRIALS)
    assert advice.training.gain.mean < 0 and not advice.training.clear
    assert advice.settings == {"strategy": "frozen", "classifiers": "bayes"}


def test_classes_of_unequal_numbers_count_the_same(tmp_path):
    for most, wanted in ((9, [1, 1, 1, 1]), (10, [2, 2 / 3, 2 / 3, 2 / 3])):
        (tmp_path / "results.json").write_text(json.dumps({"tasks": [{"images": {"b": 3, "a": most}}]}))
        write_csv(
            tmp_path / "predictions.csv",
            ["image", "class", "predicted", "probability", "task"],
            [[str(i), name, "a", "0.5", "1"] for i, name in enumerate("babb")],
        )
        assert advice_module._weights(tmp_path).tolist() == pytest.approx(wanted)


def test_the_words(monkeypatch, measured):
    alone = measured({("frozen", "bayes"): [1], ("frozen", "lda"): [1]})
    assert alone.lead is None and alone.settings["classifiers"] == "bayes", "a single image compares nothing"
    assert "Only 1 images" in format_advice(alone)
    advice = alone.model_copy(
        update={
            "settings": {"strategy": "dulbe", "learning_rate": 3e-4, "classifiers": "bridge"},
            "classifiers": {"lda": 0.9, "bayes": 0.88},
            "lead": Contest(row=Row("frozen", "lda"), gain=Difference(0.02, -0.01, 0.05), clear=False),
            "training": Contest(row=Row("DuLBE", "bridge", "linear"), gain=Difference(0.03, 0.01, 0.05), clear=True),
            "counts": ClassCounts(classes=10, fewest=2, most=32),
            "seconds": {"whole": 10.0, "probe": 30.0},
        }
    )
    regret = Regret(streams=4, cases=12, mean=0.001, low=0.0, high=0.004, largest=0.012)
    monkeypatch.setattr(advice_module, "known_regret", lambda: regret)
    said = format_advice(advice)
    for words in (
        "10 classes with 2 to 32 images each; 1 further",
        "each class counts the same",
        "lda is not clearly ahead of the second (+2.0 points",
        "50.0 % are right: 5.0 times chance",
        "Training pays: the best of the probe, DuLBE with bridge, drift linear, is +3.0 points",
        "On 4 streams such advice was 0.1 points below the best row on the test images",
        "Use: --strategy dulbe --learning-rate 0.0003 --classifiers bridge",
    ):
        assert words in said


def test_the_command(settings, tmp_path, capsys):
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    command = ["advise", *flags, "--output", str(tmp_path / "advice"), "--no-training", "--jobs=1"]
    assert main([*command, "--classifiers=lda,text"]) == 0
    found = json.loads((tmp_path / "advice" / "advice.json").read_text())
    assert found["training"] is None and set(found["settings"]) == {"strategy", "classifiers"}
    assert f"Use: --strategy frozen --classifiers {found['settings']['classifiers']}" in capsys.readouterr().out
    assert set(found["classifiers"]) == {"lda", "text"}
    assert main(["advise", "--model", "demo"]) == 2 and "--data is required" in capsys.readouterr().err


def test_regret_of_advice_and_of_what_is_best_elsewhere():
    one, two = Row("frozen", "lda"), Row("frozen", "bayes")
    found = {("a", 0): {one: 0.9, two: 0.8}, ("b", 0): {one: 0.5, two: 0.7}, ("c", 0): {one: 0.4, two: 0.45}}
    # Without a, bayes is better on average; without b, lda is.
    assert [advising.regret_of_best_elsewhere(found, name, 0) for name in "ab"] == pytest.approx([0.1, 0.2])
    assert advising.regret_of_best_elsewhere({("a", 0): found["a", 0]}, "a", 0) is None
    regret = advising.summarised([("a", 0.02), ("a", 0.0), ("b", 0.03), ("c", 0.02)])
    assert (regret.streams, regret.cases, regret.largest) == (3, 4, 0.03) and regret.mean == pytest.approx(0.02)
    assert regret.high - regret.mean == pytest.approx(4.302653 * 0.01 / 3**0.5) and regret.low == 0


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
    compare(read_plan(file), tmp_path / "comparison", 1, log=lambda _: None)
    command = [f"{file}={tmp_path / 'comparison'}", "--output", str(tmp_path / "scored")]
    advising.main([*command, "--no-training"])
    found = json.loads((tmp_path / "scored" / "advising.json").read_text())
    assert len(found["rows"]) == 2 and all(row["regret"] >= 0 for row in found["rows"])
    for row in found["rows"]:
        assert (row["regret"] == 0) == (row["advised"] == row["best"])
