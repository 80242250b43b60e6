"""Test the learning rate "auto", which a trial on the first task chooses and which is then saved and printed."""

import math

import pytest
import torch
from small_runs import learner_of, tasks_of

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, run_stream
from dulbe_peft.training import learning_rate
from dulbe_peft.training.learning_rate import MOST_MOVED, TRIAL, rate_of, width_of


@pytest.fixture(scope="module")
def tasks(digit_folders):
    return tasks_of(digit_folders(4, 6, 3))


def make(base, rate="auto", **fields):
    return learner_of(base, learning_rate=rate, **fields)


def weights(learner):
    return {name: tensor.clone() for name, tensor in learner.state.adapter_tensors().items()}


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in actual)


@pytest.mark.parametrize("moved", [0.0, 1e-9, MOST_MOVED, 0.07, 0.7, 40.0])
def test_rate_moves_features_by_at_most_the_allowed_share(moved):
    """The squared movement grows with the squared rate. The rate is at most the trial's."""
    rate = rate_of(moved)
    assert moved * (rate / TRIAL) ** 2 <= MOST_MOVED * 1.11  # the rate has two digits
    assert rate == TRIAL or math.isclose(moved * (rate / TRIAL) ** 2, MOST_MOVED, rel_tol=0.11)


def test_movement_equals_that_of_training_at_the_trial_rate(base, tasks, monkeypatch):
    """The movement is relative to the spread of the features, and the trial does not change the model."""
    movements = []
    monkeypatch.setattr(learning_rate, "rate_of", lambda moved: movements.append(moved) or 1e-3)
    tried, trained = make(base), make(base, TRIAL)
    before = trained.image_embeds(tasks[0].train).double()
    tried.learn_task(tasks[0].train)
    trained.learn_task(tasks[0].train)
    after = trained.image_embeds(tasks[0].train).double()
    spread = sum((row - before.mean(dim=0)).norm() ** 2 for row in before)
    moved = sum((new - old).norm() ** 2 for new, old in zip(after, before, strict=True))
    assert movements == [pytest.approx(float(moved / spread), rel=1e-3)] and movements[0] > 0


def test_auto_learns_the_same_as_its_chosen_rate(base, tasks, monkeypatch):
    """The trial has no effect on the learner, and the second task keeps the rate."""
    monkeypatch.setattr(learning_rate, "MOST_MOVED", 1e-6)  # gives a rate that is not a default anywhere
    chosen = make(base)
    for task in tasks[:2]:
        chosen.learn_task(task.train)
    rate = chosen.args.learning_rate
    assert 1e-7 < rate < TRIAL and chosen.record.learning_rate == rate
    given = make(base, rate)
    for task in tasks[:2]:
        given.learn_task(task.train)
    assert_equal(weights(chosen), weights(given))
    assert_equal(chosen.head.tensors(), given.head.tensors())


def test_model_of_the_paper_s_width_uses_the_paper_s_rate(base, tasks, monkeypatch):
    learner = make(base)
    monkeypatch.setattr(learning_rate, "movement", None)
    monkeypatch.setattr(learning_rate, "PAPER_WIDTH", width_of(learner.state.adapter))
    learner.learn_task(tasks[0].train)
    assert learner.args.learning_rate == learner.record.learning_rate == 1e-3


def test_single_image_gives_the_trial_rate(base, tasks):
    learner = make(base)
    learner.learn_task([tasks[0].train[0]], ["a"])
    assert learner.args.learning_rate == TRIAL


def test_rate_is_printed_saved_and_kept_by_a_resumed_run(base, tasks, tmp_path, capsys, monkeypatch):
    whole, tasks = make(base), tasks[:2]
    results = run_stream(whole, tasks, tmp_path / "whole").contents()
    rate = whole.args.learning_rate
    assert f"learning rate {rate:g}, chosen for the model and this task" in capsys.readouterr().out
    assert [task["learning_rate"] for task in results["tasks"]] == [rate] * len(tasks)
    run_stream(make(base), tasks[:1], tmp_path / "parts")
    monkeypatch.setattr(learning_rate, "movement", None)  # a new trial would fail
    resumed = make(base)
    assert run_stream(resumed, tasks, tmp_path / "parts").contents()["tasks"] == results["tasks"]
    assert (
        resumed.args.learning_rate == rate and "learning rate" not in capsys.readouterr().out.rpartition("task 1")[2]
    )
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "whole")
    assert loaded.args.learning_rate == rate
    other = ClassIncrementalLearner.from_pretrained(tmp_path / "whole", args=LearnerArguments(device="cpu"))
    assert other.args.learning_rate == rate


def test_frozen_strategy_chooses_no_rate(base, tasks):
    learner = make(base, strategy="frozen")
    learner.learn_task(tasks[0].train)
    assert learner.args.learning_rate == "auto" and learner.record.learning_rate is None


def test_invalid_learning_rate_text_is_refused():
    with pytest.raises(ValueError, match="learning_rate must be a valid number or 'auto', got 'slow'"):
        LearnerArguments(learning_rate="slow")
