"""What a stream's tests amount to, against loops over its predictions."""

from __future__ import annotations

import json

import pytest
import torch

from dulbe_peft.evaluation import Evaluation
from dulbe_peft.results import add_task, class_figures, new_progress, progress_row, read_progress, stream_results
from dulbe_peft.training import TaskRecord

CLASSES = [["a", "b"], ["c", "d"], ["e"]]
IDENTITY = {
    "adapter": {},
    "arguments": {"seed": 3},
    "classes": CLASSES,
    "strategy": {"name": "frozen"},
}


def guesses(seen, task, seed, sure=0.6):
    """Random predictions of two classifiers for ten images of one task, with `seen` classes to choose among."""
    generator = torch.Generator().manual_seed(seed)
    names = [name for group in CLASSES for name in group]
    truth = torch.tensor([names.index(name) for name in CLASSES[task]] * 10)[:10]

    def guess():
        wrong = torch.randint(seen, (10,), generator=generator)
        return torch.where(torch.rand(10, generator=generator) < sure, truth, wrong)

    rows = {"bridge": guess(), "lda": guess()}
    images = tuple(f"{task}/{i}" for i in range(10))
    return Evaluation(tuple(names[:seen]), images, truth, rows, {"text": guess()}, torch.full((10,), 0.5))


def stream():
    """The predictions after each task of a stream of three."""
    return [[guesses(seen, task, 10 * step + task) for task in range(step + 1)] for step, seen in enumerate((2, 4, 5))]


def finished(steps):
    progress = new_progress([0.5, 0.4, 0.3])
    for number, tests in enumerate(steps):
        add_task(progress, progress_row(tests), TaskRecord({"a": number}, [0.25]))
    return json.loads(json.dumps(progress))


def literal_accuracy(tests, name, classifier):
    right = images = 0
    for test in tests:
        for i in range(len(test.truth)):
            if test.class_names[int(test.truth[i])] == name:
                images += 1
                right += int(test.classifiers[classifier][i]) == int(test.truth[i])
    return right / images


@pytest.mark.parametrize("classifier", ["bridge", "lda"])
def test_figures_by_class_equal_loops_over_the_images(classifier):
    steps = stream()
    results = stream_results(finished(steps), IDENTITY, ["bridge", "lda"], {})
    figures = results["classes"][classifier]
    assert set(figures["accuracy"]) == {"a", "b", "c", "d", "e"}
    assert set(figures["forgetting"]) == {"a", "b", "c", "d"}, "the last task has lost nothing yet"
    for name, value in figures["accuracy"].items():
        assert value == pytest.approx(literal_accuracy(steps[-1], name, classifier))
    for name, value in figures["forgetting"].items():
        first = 0 if name in "ab" else 1
        best = max(literal_accuracy(step, name, classifier) for step in steps[first:-1])
        assert value == pytest.approx(best - figures["accuracy"][name])
    assert any(value != 0 for value in figures["forgetting"].values())


def test_accuracies_over_tasks_equal_loops_over_the_images():
    steps = stream()
    results = stream_results(finished(steps), IDENTITY, ["bridge", "lda"], {})
    for step, tests in enumerate(steps):
        right = [int((test.classifiers["lda"] == test.truth).sum()) for test in tests]
        assert results["classifiers"]["lda"]["matrix"][step] == pytest.approx([count / 10 for count in right])
        assert results["classifiers"]["lda"]["overall"][step] == pytest.approx(sum(right) / (10 * len(tests)))
    assert results["head"] == results["classifiers"]["bridge"]
    assert "text" in results and "class_means" not in results
    assert results["seed"] == 3 and results["tasks"][2]["images"] == {"a": 2}


def test_an_unfinished_stream_s_zero_shot_is_of_its_finished_tasks():
    results = stream_results(finished(stream()[:2]), IDENTITY, ["bridge", "lda"], {})
    assert results["zero_shot"] == {"overall": [0.5, 0.4], "average_accuracy": 0.45, "last_accuracy": 0.4}


def test_a_stream_without_tests_has_no_accuracies():
    progress = new_progress([])
    add_task(progress, progress_row([]), None)
    results = stream_results(progress, IDENTITY, ["bridge"], {})
    assert not {"classifiers", "classes", "zero_shot", "text"} & results.keys() and results["tasks"] == [None]


def test_rows_of_an_earlier_version_are_left_out_and_not_invented(tmp_path):
    """Its rows hold no counts by class: what needs all of them is absent, what needs the last one alone is there."""
    progress = finished(stream())
    for row in progress["rows"][:2]:
        del row["images_by_class"]
        for part in row["classifiers"].values():
            del part["right_by_class"]
    del progress["tasks"]
    (tmp_path / "progress.json").write_text(json.dumps(progress))
    old = read_progress(tmp_path)
    assert old["tasks"] == [None] * 3
    figures = class_figures(old["rows"], "lda")
    assert set(figures) == {"accuracy"} and len(figures["accuracy"]) == 5
    assert class_figures(old["rows"][:2], "lda") == {}
    assert "classes" not in stream_results(old | {"rows": old["rows"][:2]}, IDENTITY, ["lda"], {})
