"""What a stream's tests amount to, against loops over its predictions."""

import pytest
import torch

from dulbe_peft.metrics.evaluation import Evaluation
from dulbe_peft.runs.progress import FinishedTask, measured_row
from dulbe_peft.runs.results import stream_results

CLASSES = [["a", "b"], ["c", "d"], ["e"]]
SETTINGS = {"adapter": {}, "arguments": {"seed": 3}, "strategy": {"name": "frozen"}}


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
    return Evaluation(
        tuple(names[:seen]), images, truth, rows, {"text": guess()}, torch.full((10,), 0.5), torch.zeros(10, 2)
    )


def stream():
    """The predictions after each task of a stream of three."""
    return [[guesses(seen, task, 10 * step + task) for task in range(step + 1)] for step, seen in enumerate((2, 4, 5))]


def finished(steps, zero_shot=(0.5, 0.4, 0.3)):
    tasks = zip(CLASSES, steps, zero_shot, strict=False)
    return [
        FinishedTask(class_names=names, row=measured_row(tests), zero_shot=value, details={"images": {"a": index}})
        for index, (names, tests, value) in enumerate(tasks)
    ]


def results_of(tasks):
    return stream_results(tasks, SETTINGS, ("bridge", "lda"), {})


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
    results = results_of(finished(steps))
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
    for step, tests in enumerate(steps):
        right = [int((test.classifiers[classifier] == test.truth).sum()) for test in tests]
        block = results["classifiers"][classifier]
        assert block["matrix"][step] == pytest.approx([count / 10 for count in right])
        assert block["overall"][step] == pytest.approx(sum(right) / (10 * len(tests)))
    assert results["head"] == results["classifiers"]["bridge"] and results["seed"] == 3
    assert "text" in results and "class_means" not in results and results["tasks"][2]["images"] == {"a": 2}


def test_tasks_that_were_not_tested_are_no_figures():
    """A learner that had learned before: its first task has no tests."""
    steps = stream()
    steps[2][0] = None
    figures = results_of(finished([[None], *steps[1:]], zero_shot=(None, 0.4, 0.3)))
    assert figures["classifiers"]["lda"]["overall"][0] is None and figures["zero_shot"]["average_accuracy"] == 0.35
    lost = figures["classes"]["lda"]["forgetting"]
    now = figures["classes"]["lda"]["accuracy"]
    assert now.keys() == {"c", "d", "e"} and figures["classifiers"]["lda"]["matrix"][2][0] is None
    assert lost["c"] == pytest.approx(literal_accuracy(steps[1], "c", "lda") - now["c"])
