"""Evaluation for each image against a loop over the images, and the file that keeps them."""

import csv

import pytest
import torch
from torch.nn import functional as F

from dulbe_peft.classifiers import Classifier, make_classifiers
from dulbe_peft.metrics import evaluation
from dulbe_peft.metrics.evaluation import BASELINES, evaluate_features, read_predictions, write_predictions
from dulbe_peft.runs.progress import measured_row
from dulbe_peft.utils.files import read_csv, write_csv

NAMES = ("cat", "=1+1", '<b>, "bold"', "'=quoted", "-")


def learned(*specs):
    """Classifiers that learned five classes of random features, and further features with their labels."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(5, 8, generator=generator)
    labels = torch.arange(60) % 5
    features = F.normalize(centres[labels] + torch.randn(60, 8, generator=generator), dim=1)
    classifiers = make_classifiers(specs, 8, 100.0, {})
    for classifier in classifiers.values():
        classifier.add_classes(NAMES, features[:40], labels[:40], centres)
    return classifiers, features[40:], labels[40:]


def predicted(*specs, rows=slice(None)):
    classifiers, features, labels = learned(*specs)
    features, labels = features[rows], labels[rows]
    return evaluate_features(classifiers, features, labels, NAMES, [f"{i}.png" for i in range(len(labels))])


def test_predictions_equal_a_loop_over_images():
    classifiers, features, labels = learned("lda", "bridge")
    found = evaluate_features(classifiers, features, labels, NAMES, [""] * 20)
    assert list(found.classifiers) == ["lda", "bridge"] and set(found.baselines) == set(BASELINES)
    right = dict.fromkeys(("lda", "bridge", "text", "class_means"), 0)
    for i in range(20):
        z = features[i].double()
        scores = {name: classifier(features[i : i + 1])[0].double() for name, classifier in classifiers.items()}
        scores["text"] = torch.stack([z @ row for row in classifiers["bridge"].text_embeds.double()])
        scores["class_means"] = torch.stack([z @ row for row in classifiers["bridge"].visual_prototypes.double()])
        for name, row in scores.items():
            guess = max(range(5), key=lambda c: float(row[c]))
            assert guess == int((found.classifiers | found.baselines)[name][i]), name
            right[name] += guess == int(labels[i])
        exponents = (scores["lda"] / classifiers["lda"].temperature).exp()
        assert float(found.probability[i]) == pytest.approx(float(exponents.max() / exponents.sum()), abs=1e-5)
    figures = found.figures()
    assert figures["accuracy"] == figures["classifiers"]["lda"] == pytest.approx(right["lda"] / 20)
    assert figures["classifiers"]["bridge"] == pytest.approx(right["bridge"] / 20)
    assert figures["text_accuracy"] == pytest.approx(right["text"] / 20)
    assert figures["class_means_accuracy"] == pytest.approx(right["class_means"] / 20)
    assert right["lda"] not in (0, 20), "the test would not see a mistake"
    assert "class_means_accuracy" not in predicted("bridge", "prototype").figures() and not predicted("lda").baselines


def test_so_many_scores_are_in_memory_at_a_time_and_no_more(monkeypatch):
    expected, sizes, forward = predicted("lda", "bridge"), [], Classifier.forward
    monkeypatch.setattr(evaluation, "MOST_SCORES", 17)  # three images of five classes
    monkeypatch.setattr(Classifier, "forward", lambda *given: sizes.append(len(given[1])) or forward(*given))
    found = predicted("lda", "bridge")
    assert sizes == [3, 3] * 6 + [2, 2]
    for one, other in ((expected.classifiers, found.classifiers), (expected.baselines, found.baselines)):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    torch.testing.assert_close(found.probability, expected.probability)


def test_counts_by_class_add_up():
    found = predicted("lda", rows=slice(3, 7))  # of classes 3, 4, 0, 1
    row = measured_row([None, found])
    assert row.images_by_class == {"cat": 1, "=1+1": 1, "'=quoted": 1, "-": 1}
    right = row.classifiers["lda"]
    assert right.right_by_class.keys() == row.images_by_class.keys()
    assert sum(right.right_by_class.values()) == int((found.classifiers["lda"] == found.truth).sum())
    assert right.by_task == [None, found.accuracy(found.classifiers["lda"])] and right.accuracy == right.by_task[1]


def test_the_file_reads_back_and_no_cell_is_a_formula(tmp_path):
    tasks = {1: predicted("lda", "bridge", rows=slice(0, 9)), 3: predicted("lda", "bridge", rows=slice(9, 20))}
    write_predictions(tmp_path / "p.csv", tasks)
    rows = read_predictions(tmp_path / "p.csv")
    assert [(row.task, row.position) for row in rows] == [(1, i) for i in range(9)] + [(3, i) for i in range(11)]
    places = [(part, i) for part in tasks.values() for i in range(len(part.truth))]
    for row, (part, i) in zip(rows, places, strict=True):
        assert (row.image, row.true) == (part.images[i], NAMES[int(part.truth[i])])
        assert row.predicted == NAMES[int(part.classifiers["lda"][i])]
        assert row.right == bool(part.classifiers["lda"][i] == part.truth[i])
        assert row.probability == pytest.approx(float(part.probability[i]), abs=1e-6)
        others = {"bridge": part.classifiers["bridge"], **part.baselines}
        assert row.others == {name: NAMES[int(values[i])] for name, values in others.items()}
    with (tmp_path / "p.csv").open(newline="") as file:
        cells = [cell for row in csv.reader(file) for cell in row]
    assert "'=1+1" in cells and not [cell for cell in cells if cell[:1] in ("=", "+", "-", "@")]


@pytest.mark.parametrize("text", ["=1", "'=1", "''=1", "'plain", "+", "-3", "@x", "", "a\r=1", 'say "x"\n', "é"])
def test_any_text_comes_back_from_a_table(tmp_path, text):
    write_csv(tmp_path / "t.csv", ["name"], [[text, 1], ["x", -0.5]])
    assert read_csv(tmp_path / "t.csv") == [["name"], [text, "1"], ["x", "-0.5"]]
