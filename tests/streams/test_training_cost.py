"""Test the warning about what training costs old classes, from their test images or else from the new images."""

import itertools
import json

import pytest
import torch
from scipy.stats import binomtest
from small_runs import learner_of, results_with, tasks_of

from dulbe_peft import run_stream
from dulbe_peft.classifiers.registry import make_classifiers
from dulbe_peft.classifiers.teaching import ClosingPass
from dulbe_peft.metrics.evaluation import EncodedTest, evaluate_features
from dulbe_peft.metrics.results import Cost, Results
from dulbe_peft.photos.report.advice import trained_away
from dulbe_peft.streams.tasks import Task
from dulbe_peft.streams.training_cost import Before, fall_line, significant_costs

DIM = 8


def features(classes, count, seed):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(classes)).repeat_interleave(count)
    rows = torch.eye(DIM)[torch.tensor(classes)[labels]] + 0.2 * torch.randn(len(labels), DIM, generator=generator)
    return torch.nn.functional.normalize(rows, dim=1), labels


def measure(turn):
    """Return the costs and the changed share if the training of a task multiplies all features by `turn`."""
    classifiers = make_classifiers(["lda", "prototype"], DIM, 10.0)
    old, labels = features([0, 1, 2], 10, 0)
    tests, truth = features([0, 1, 2], 20, 1)
    new, more = features([3, 4, 5], 10, 2)
    for classifier in classifiers.values():
        classifier.add_classes(["a", "b", "c"], old, labels)
    evaluations = evaluate_features(classifiers, [EncodedTest(tests, truth, [""] * len(truth))], ["a", "b", "c"])
    before = Before(classifiers, None, None, {1: evaluations[0]})
    closing = ClosingPass(("d", "e", "f"), new @ turn, more, before=new)
    after = {name: classifier.fork() for name, classifier in classifiers.items()}
    for classifier in after.values():
        classifier.add_classes(["d", "e", "f"], closing.features, more)
    now = evaluate_features(after, [EncodedTest(tests @ turn, truth, [""] * len(truth))], list("abcdef"))
    return before.costs(closing, {1: now[0]}, seed=0), before.changed(closing, after["lda"], seed=0)


def test_harmful_training_is_reported_and_harmless_training_is_not():
    shift = torch.eye(DIM).roll(1, dims=1)  # images of class a now look like class b
    costs, changed = measure(shift)
    assert set(significant_costs(costs)) == {"lda", "prototype"} and changed > 0.5
    assert all(cost.images == 60 and cost.right + cost.lost - cost.gained > 50 for cost in costs.values())
    line = fall_line(costs, None)
    assert "the accuracy on 60 test images of old classes: lda" in line and "a lower learning rate" in line
    harmless, unchanged = measure(torch.eye(DIM))
    assert significant_costs(harmless) == {} and unchanged == 0 and fall_line(harmless, unchanged) == ""
    assert all(cost.lost == cost.gained == 0 for cost in harmless.values())


@pytest.mark.parametrize(
    ("lost", "gained", "clear"), [(10, 0, True), (10, 8, False), (0, 10, False), (10, 3, False), (5, 0, False)]
)
def test_only_significant_losses_are_reported(lost, gained, clear):
    costs = {"lda": Cost(images=50, right=40, lost=lost, gained=gained)}
    assert bool(significant_costs(costs)) == clear
    words = trained_away(results_with(costs=[{}, {"lda": costs["lda"]}]))
    assert (f"“lda” {2 * (lost - gained):.1f} points (task 2)" in words) == clear and bool(words) == clear


def test_losses_are_judged_as_by_scipy():
    for lost, gained in itertools.product(range(30), range(12)):
        clear = lost > gained and binomtest(lost, lost + gained, alternative="greater").pvalue < 0.01
        costs = {"lda": Cost(images=50, right=40, lost=lost, gained=gained)}
        assert bool(significant_costs(costs)) == clear, (lost, gained)


def test_few_tests_of_old_classes_do_not_hide_what_training_changed():
    classifiers = make_classifiers(["lda"], DIM, 10.0)
    images, labels = features([0, 1, 2], 40, 0)
    classifiers["lda"].add_classes(["a", "b", "c"], images, labels)

    def before(chosen):
        test = EncodedTest(images[chosen], labels[chosen], [""] * int(chosen.sum()))
        return Before(classifiers, None, None, {1: evaluate_features(classifiers, [test], list("abc"))[0]})

    assert not before(labels >= 0).hardly_tested and not before(labels > 0).hardly_tested
    assert before(labels > 1).hardly_tested, "two of three classes have no test images"
    assert Before(classifiers, None, None, {}).hardly_tested
    for chosen in (torch.arange(len(labels)) % 2 == 0, labels >= 0):
        lost = {"lda": Cost(images=int(chosen.sum()), right=0, lost=int(chosen.sum()) // 10, gained=0)}
        assert before(chosen).hardly_tested == (not significant_costs(lost)), (
            "a loss of one in ten would be seen or not"
        )


def test_without_test_images_changed_predictions_are_reported():
    assert "training changed the most likely old class of 40 % of this task's images" in fall_line({}, 0.4)
    assert fall_line({}, 0.05) == fall_line({}, None) == ""
    words = trained_away(results_with(changed=[None, 0.4]))
    assert "task 2 changed the most likely old class of 40 % of its images" in words
    assert trained_away(results_with(changed=[0.01])) == ""


@pytest.mark.slow
def test_run_and_resumed_run_report_the_same_costs(base, digit_folders, tmp_path, capsys):
    """The learning rate is so large that old classes lose accuracy with both classifiers."""
    tasks = tasks_of(digit_folders(4, 10, 10))
    settings = {"classifiers": ("lda", "prototype"), "drift": "none"}
    settings |= {"learning_rate": 0.1, "epochs": 4, "batch_size": 20}
    results = run_stream(learner_of(base, **settings), tasks, tmp_path / "whole").contents()
    printed = capsys.readouterr().out
    assert "training this task lowered the accuracy on " in printed and trained_away(Results.of(results))
    assert results["changed"][1] is not None, "the old classes have only 20 test images"
    run_stream(learner_of(base, **settings), tasks[:1], tmp_path / "parts")
    assert run_stream(learner_of(base, **settings), tasks, tmp_path / "parts").contents()["costs"] == results["costs"]
    assert results["costs"] == json.loads((tmp_path / "whole" / "results.json").read_text())["costs"]
    untested = [Task(task.train, None, task.class_names) for task in tasks]
    results = run_stream(learner_of(base, **settings), untested, tmp_path / "untested").contents()
    assert "old classes have too few test images" in capsys.readouterr().out and results["changed"][1] > 0.1
    frozen = run_stream(learner_of(base, "frozen", ("lda",)), tasks, tmp_path / "frozen").contents()
    assert "costs" not in frozen and "changed" not in frozen
