"""Images in the folder of another class: they are found, by features alone and by the command."""

import re
import shutil
import warnings

import numpy as np
import pytest
from sklearn.model_selection import StratifiedKFold, cross_val_predict

from dulbe_peft.commands.main import main
from dulbe_peft.data.inventory import Inventory
from dulbe_peft.demo import demo_model_folder
from dulbe_peft.metrics.labels import doubtful_labels
from dulbe_peft.report.html import write_page
from dulbe_peft.sklearn import FeatureClassifier


def clouds(counts, seed=0):
    generator = np.random.default_rng(seed)
    centres, labels = generator.normal(size=(len(counts), 16)), np.repeat(np.arange(len(counts)), counts)
    return (centres[labels] + 0.3 * generator.normal(size=(len(labels), 16))).astype(np.float32), labels, centres


@pytest.mark.parametrize("with_texts", [True, False])
def test_wrong_labels_come_first(with_texts):
    features, truth, centres = clouds([30, 12, 4, 2, 1, 9])
    labels = truth.copy()
    labels[[3, 35, 50]] = [5, 0, 1]
    texts = centres.astype(np.float32) if with_texts else None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = doubtful_labels(features, labels, texts, 10.0)
    assert {number for number, _, _ in found[:3]} == {3, 35, 50}
    assert all(other == truth[number] for number, other, _ in found[:3])
    shares = [share for _, _, share in found]
    assert shares == sorted(shares) and 48 not in [number for number, _, _ in found], "one that is alone in its class"


def test_a_class_alone_and_images_alone_have_no_doubts():
    features, labels, _ = clouds([5, 1, 1])
    assert doubtful_labels(features, labels, None, 10.0) == []
    features, labels, _ = clouds([30, 30])
    assert doubtful_labels(features, labels, None, 10.0) == []


def test_the_order_is_that_of_cleanlab():
    features, labels, _ = clouds([20] * 4)
    labels[::9] = (labels[::9] + 1) % 4
    found = doubtful_labels(features, labels, None, 10.0)
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    made = FeatureClassifier("lda", logit_scale=10.0)
    probabilities = cross_val_predict(made, features, labels, cv=folds, method="predict_proba")
    scores = probabilities[np.arange(len(labels)), labels]  # cleanlab's "self_confidence"
    wrong = [
        number for number in np.argsort(scores, kind="stable") if probabilities[number].argmax() != labels[number]
    ]
    assert [number for number, _, _ in found] == wrong and len(wrong) >= 9


@pytest.fixture
def photos(digit_folders, tmp_path):
    return shutil.copytree(digit_folders(4, 12, 4), tmp_path / "photos")


def check(photos, *more):
    return main(
        ["check", str(photos), "--check-labels", "--model", str(demo_model_folder()), "--device", "cpu", *more]
    )


def test_the_command_names_them_and_shows_them(photos, tmp_path, capsys):
    moved = {"one": ("train/two/1.png", "train/one/x.png"), "zero": ("test/three/14.png", "test/zero/y\x1b.png")}
    for source, target in moved.values():
        (photos / source).rename(photos / target)
    page = tmp_path / "page.html"
    assert check(photos, "--page", str(page)) == 0
    said = capsys.readouterr().out
    lines = said[said.index("look like another class") :].split("\n\n")[0].splitlines()[1:]
    assert 2 <= len(lines) <= 10
    assert re.search(
        r"train/one/x\.png: looks like 'two', not like 'one' \(probability [0-9.]+%\)", lines[0] + lines[1]
    )
    assert re.search(r"test/zero/y\\x1b\.png: looks like 'three', not like 'zero'", lines[0] + lines[1])
    text = page.read_text(encoding="utf-8")
    part = text[text.index("Labels to look at") : text.index("The classes")]
    assert part.count("data:image/jpeg") == len(lines) and "one/x.png" in part


def test_a_page_shows_names_that_are_not_utf8(tmp_path):
    empty = dict.fromkeys(("problems", "strips", "pairs", "doubtful"), ())
    write_page(tmp_path / "page.html", "check.html", {"name": "\udcff.png", "found": Inventory({}), **empty})
    assert "\\udcff.png" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_model_and_the_flag_go_together(photos, capsys):
    for words in (["--check-labels"], ["--model", "demo"]):
        assert main(["check", str(photos), *words]) == 2
        assert "go together" in capsys.readouterr().err
