"""Test predictions for each image and the measures of a stream, against loops over the images."""

import csv
import json

import numpy as np
import pytest
import reference
import torch
from taught import clusters

from dulbe_peft.classifiers import Classifier, make_classifiers
from dulbe_peft.metrics import evaluation
from dulbe_peft.metrics.accuracy import (
    accuracy_matrix,
    backward_transfer,
    calibration_error,
    forgetting,
    summarize,
    transfer_measures,
)
from dulbe_peft.metrics.evaluation import (
    BASELINES,
    EncodedTest,
    Evaluation,
    answers,
    evaluate_features,
    read_predictions,
    write_predictions,
)
from dulbe_peft.streams.progress import FinishedTask, measured_row, stream_results
from dulbe_peft.training.state import Estimates
from dulbe_peft.utils.files import read_csv, write_csv

NAMES = ("cat", "=1+1", '<b>, "bold"', "'=quoted", "-")


def trained_classifiers(*specs):
    """Return classifiers that learned five classes of random features, and further features with their labels."""
    features, labels, texts = clusters([12] * 5, 8, spread=1.0)
    later, classifiers = torch.arange(60) % 12 >= 8, make_classifiers(specs, 8, 100.0)
    for classifier in classifiers.values():
        classifier.add_classes(NAMES, features[~later], labels[~later], texts)
    return classifiers, features[later], labels[later]


def predict(*specs, rows=slice(None)):
    classifiers, features, labels = trained_classifiers(*specs)
    features, labels = features[rows], labels[rows]
    test = EncodedTest(features, labels, [f"{i}.png" for i in range(len(labels))])
    return evaluate_features(classifiers, [test], NAMES)[0]


def test_predictions_equal_a_loop_over_images():
    classifiers, features, labels = trained_classifiers("lda", "bridge")
    (evaluation,) = evaluate_features(classifiers, [EncodedTest(features, labels, [""] * 20)], NAMES)
    assert list(evaluation.classifiers) == ["lda", "bridge"] and set(evaluation.baselines) == set(BASELINES)
    right = dict.fromkeys(("lda", "bridge", "text", "class_means"), 0)
    for i in range(20):
        z = features[i].double()
        scores = {name: classifier(features[i : i + 1])[0].double() for name, classifier in classifiers.items()}
        scores["text"] = torch.stack([z @ row for row in classifiers["bridge"].text_embeds.double()])
        scores["class_means"] = torch.stack([z @ row for row in classifiers["bridge"].visual_prototypes.double()])
        for name, row in scores.items():
            guess = max(range(5), key=lambda c: float(row[c]))
            assert guess == int((evaluation.classifiers | evaluation.baselines)[name][i]), name
            right[name] += guess == int(labels[i])
        exponents = (scores["lda"] / classifiers["lda"].temperature).exp()
        assert float(evaluation.probability[i]) == pytest.approx(float(exponents.max() / exponents.sum()), abs=1e-5)
    figures, accuracies = evaluation.figures(), {name: count / 20 for name, count in right.items()}
    keys = {"lda": "accuracy", "text": "text_accuracy", "class_means": "class_means_accuracy"}
    assert {name: figures[key] for name, key in keys.items()} | figures["classifiers"] == pytest.approx(accuracies)
    assert right["lda"] not in (0, 20), "with 0 or 20 right, the test could not fail"
    assert "class_means_accuracy" not in predict("bridge", "prototype").figures() and not predict("lda").baselines


def test_number_of_scores_in_memory_is_limited(monkeypatch):
    expected, sizes, forward = predict("lda", "bridge"), [], Classifier.forward
    monkeypatch.setattr(evaluation, "MOST_SCORES", 17)  # enough for three images with five classes
    monkeypatch.setattr(Classifier, "forward", lambda *given: sizes.append(len(given[1])) or forward(*given))
    actual = predict("lda", "bridge")
    assert sizes == ([3] * 6 + [2]) * 2
    for left, right in ((expected.classifiers, actual.classifiers), (expected.baselines, actual.baselines)):
        assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
    torch.testing.assert_close(actual.probability, expected.probability)


def test_predictions_file_can_be_read_back_and_has_no_formulas(tmp_path):
    tasks = {1: predict("lda", "bridge", rows=slice(0, 9)), 3: predict("lda", "bridge", rows=slice(9, 20))}
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


def test_any_text_survives_writing_and_reading_a_table(tmp_path):
    texts = ["=1", "'=1", "''=1", "'plain", "+", "-3", "@x", "", "a\r=1", 'say "x"\n', "é"]
    write_csv(tmp_path / "t.csv", ["name"], [[text, -0.5] for text in texts])
    assert read_csv(tmp_path / "t.csv") == [["name"], *([text, "-0.5"] for text in texts)]


@pytest.mark.parametrize("tasks", [2, 3, 10])
def test_measures_equal_the_definitions(tasks):
    full = np.random.RandomState(tasks).rand(tasks, tasks).tolist()
    rows, last, earlier = [row[: t + 1] for t, row in enumerate(full)], tasks - 1, range(tasks - 1)
    drops = [max(rows[t][i] for t in range(i, last)) - rows[last][i] for i in earlier]
    assert forgetting(accuracy_matrix(rows)) == pytest.approx(sum(drops) / last)
    gains = [rows[last][i] - rows[i][i] for i in earlier]
    assert backward_transfer(accuracy_matrix(rows)) == pytest.approx(sum(gains) / last)
    before = [sum(full[t][i] for t in range(i)) / i for i in range(1, tasks)]
    average = sum(map(sum, full)) / tasks**2
    expected = {"transfer": sum(before) / last, "average": average, "last": sum(full[-1]) / tasks}
    assert transfer_measures(full) == pytest.approx(expected)


def test_measures_ignore_values_that_were_not_measured():
    """Two tasks were learned before the run, and tests of the first one were missing until the last step."""
    rows = [[None], [None, None], [None, 0.9, 0.8], [0.5, 0.7, 0.6, 1.0]]
    summary = summarize(rows, [None, None, 0.85, 0.7])
    assert summary["matrix"] == rows and summary["overall"] == [None, None, 0.85, 0.7]
    assert summary["average_accuracy"] == pytest.approx((0.85 + 0.7) / 2) and summary["last_accuracy"] == 0.7
    assert summary["forgetting"] == pytest.approx(((0.9 - 0.7) + (0.8 - 0.6)) / 2)
    assert summary["backward_transfer"] == pytest.approx(0.6 - 0.8), "only task 3 was tested right after its training"
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    single, measures = summarize([[0.4]], [0.4]), ("last_accuracy", "forgetting", "backward_transfer")
    assert [single[name] for name in measures] == [0.4, 0.0, 0.0] and single["matrix"] == [[0.4]]
    unknown = summarize([[0.5], [None, None]], [0.5, None])
    assert unknown["last_accuracy"] is None and unknown["forgetting"] is None


def test_calibration_error_equals_the_literal_version():
    generator = torch.Generator().manual_seed(0)
    probabilities = (4 * torch.randn(200, 5, generator=generator)).softmax(dim=1)
    truth = torch.randint(5, (200,), generator=generator)
    for bins in (1, 7, 15):
        expected = reference.calibration_error(probabilities, truth, bins)
        confidence, label = probabilities.max(dim=1)
        error = calibration_error(confidence, label == truth, bins)
        assert error == pytest.approx(expected, abs=1e-6) and expected > 0.1
    assert calibration_error([1.0, 1.0], [True, True]) == 0


CLASSES = [["a", "b"], ["c", "d"], ["e"]]


def guesses(seen, task, seed, sure=0.6):
    """Return random predictions of two classifiers for ten images of a task, with `seen` classes to choose from."""
    generator = torch.Generator().manual_seed(seed)
    names = [name for group in CLASSES for name in group]
    truth = torch.tensor([names.index(name) for name in CLASSES[task]] * 10)[:10]

    def guess():
        wrong = torch.randint(seen, (10,), generator=generator)
        return torch.where(torch.rand(10, generator=generator) < sure, truth, wrong)

    rows = {"bridge": guess(), "lda": guess()}
    images = tuple(f"{task}/{i}" for i in range(10))
    return Evaluation(
        tuple(names[:seen]), images, truth, rows, {"text": guess()}, torch.full((10,), 0.5), torch.zeros(10, 2)
    )


def stream():
    """Return the predictions after each task of a stream of three."""
    return [[guesses(seen, task, 10 * step + task) for task in range(step + 1)] for step, seen in enumerate((2, 4, 5))]


def results_of(steps, zero_shot=(0.5, 0.4, 0.3)):
    tasks = [
        FinishedTask(class_names=names, row=measured_row(tests), zero_shot=value, details={"images": {"a": index}})
        for index, (names, tests, value) in enumerate(zip(CLASSES, steps, zero_shot, strict=True))
    ]
    settings = {"adapter": {}, "arguments": {"seed": 3}, "strategy": {"name": "frozen"}}
    return stream_results(tasks, settings, ("bridge", "lda"), {}, Estimates()).contents()


def literal_accuracy(tests, name, classifier):
    right = []
    for test in tests:
        for true, predicted in zip(test.truth.tolist(), test.classifiers[classifier].tolist(), strict=True):
            right += [predicted == true] if test.class_names[true] == name else []
    return sum(right) / len(right)


@pytest.mark.parametrize("classifier", ["bridge", "lda"])
def test_figures_by_class_equal_loops_over_the_images(classifier):
    steps = stream()
    results = results_of(steps)
    figures = results["classes"][classifier]
    accuracy = {name: literal_accuracy(steps[-1], name, classifier) for name in "abcde"}
    firsts = {"a": 0, "b": 0, "c": 1, "d": 1}  # classes of the last task cannot have lost accuracy yet
    best = {name: max(literal_accuracy(step, name, classifier) for step in steps[t:-1]) for name, t in firsts.items()}
    assert figures["accuracy"] == pytest.approx(accuracy)
    assert figures["forgetting"] == pytest.approx({name: best[name] - accuracy[name] for name in firsts})
    assert any(value != 0 for value in figures["forgetting"].values())
    for step, tests in enumerate(steps):
        right = [int((test.classifiers[classifier] == test.truth).sum()) for test in tests]
        block = results["classifiers"][classifier]
        assert block["matrix"][step] == pytest.approx([count / 10 for count in right])
        assert block["overall"][step] == pytest.approx(sum(right) / (10 * len(tests)))
    assert results["head"] == results["classifiers"]["bridge"] and results["seed"] == 3
    assert "text" in results and "class_means" not in results and results["tasks"][2]["images"] == {"a": 2}


def test_results_have_no_figures_for_untested_tasks():
    """The first task was learned before the run and has no test images."""
    steps = stream()
    steps[2][0] = None
    figures = results_of([[None], *steps[1:]], zero_shot=(None, 0.4, 0.3))
    assert figures["classifiers"]["lda"]["overall"][0] is None and figures["zero_shot"]["average_accuracy"] == 0.35
    lost = figures["classes"]["lda"]["forgetting"]
    now = figures["classes"]["lda"]["accuracy"]
    assert now.keys() == {"c", "d", "e"} and figures["classifiers"]["lda"]["matrix"][2][0] is None
    assert lost["c"] == pytest.approx(literal_accuracy(steps[1], "c", "lda") - now["c"])


@pytest.mark.parametrize("most", [2**22, 5 * 6, 5])
def test_predictions_of_a_test_do_not_depend_on_other_tests(monkeypatch, most):
    """The scores of all tests, of one or two tests, or of a single image are in memory at a time."""
    classifiers, features, _ = trained_classifiers("lda", "bridge")
    tests = features.split([3, 7, 2, 8])
    monkeypatch.setattr(evaluation, "MOST_SCORES", most)
    for classifier in classifiers.values():
        alone = [answers(classifier, [test])[0] for test in tests]
        for actual, expected in zip(answers(classifier, tests), alone, strict=True):
            assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])
        assert answers(classifier, []) == []
