"""Test that a task can be planned, and its share chosen, from some of its images, drawn evenly over its classes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from lives import tiny_base
from small_runs import learner_of, tasks_of

from dulbe_peft import LearnerArguments
from dulbe_peft.encoders.loading import unit_image_embeds
from dulbe_peft.training.task_trainer import TaskTrainer, drawn_evenly


@pytest.fixture(scope="module")
def base():
    return tiny_base()


@pytest.fixture(scope="module")
def tasks(digit_folders):
    return tasks_of(digit_folders(4, 6, 3))


def second_task(base, tasks, limit, **fields):
    """Return the trainer of the second task, in which nothing has been measured yet."""
    learner = learner_of(base, learning_rate=1e-2, planning_images=limit, **fields)
    learner.learn_task(tasks[0].train)
    return TaskTrainer(learner.state, learner.encoder, learner.encoder.images(tasks[1].train))


@pytest.mark.parametrize("limit", [1, 5, 40, 256])
def test_draw_is_even_over_the_classes(limit):
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 2, 3], [3, 50, 100, 200]))
    rows = drawn_evenly(labels, limit, seed=3, task=1)
    assert rows == sorted(set(rows)) and len(rows) == limit
    counts, sizes = np.bincount(labels[rows], minlength=4), np.bincount(labels)
    # A class has fewer images in the draw than another one only if all of its images are drawn, or by one.
    assert all(count == size or count >= counts.max() - 1 for count, size in zip(counts, sizes, strict=True))
    assert rows == drawn_evenly(labels, limit, seed=3, task=1) != drawn_evenly(labels, limit, seed=3, task=2)


@pytest.mark.parametrize("limit", ["all", 353, 1000])
def test_few_images_are_all_drawn(limit):
    assert drawn_evenly(np.zeros(353, dtype=int), limit, seed=0, task=0) == list(range(353))


def test_gradient_is_that_of_the_drawn_images(base, tasks):
    """The gradient equals that of a task with these images alone, and differs from that of all images."""
    some = second_task(base, tasks, 4)
    state = replace(some.state, args=replace(some.state.args, planning_images="all"))
    whole = TaskTrainer(state, some.encoder, some.images)
    assert np.bincount(some.images.labels[some.sample]).tolist() == [2, 2] and len(whole.sample) == 12
    drawn = tasks[1].train.at(np.array(some.sample))
    alone = TaskTrainer(state, some.encoder, some.encoder.images(drawn))
    found, expected, every = (trainer.probe()[0] for trainer in (some, alone, whole))
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-7)
        assert (found[name] - every[name]).norm() > 0.01 * gradient.norm()


def test_features_before_the_task_are_those_of_all_images(base, tasks):
    trainer = second_task(base, tasks, 4, update_share="auto")
    expected = trainer.encoder.dataset_embeds(trainer.images)
    trainer.begin()
    torch.testing.assert_close(trainer.teacher, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(trainer.sampled, expected[trainer.sample], rtol=0, atol=1e-5)


@pytest.mark.parametrize("strategy", ["dulbe", "lora"])
def test_first_task_encodes_other_images_in_training_only(base, tasks, monkeypatch, strategy):
    """Only the 4 drawn ones of 12 images are encoded before and after the training."""
    encoded = []
    learner = learner_of(base, strategy, learning_rate=1e-2, planning_images=4, update_share="auto")
    images = learner.encoder.image_embeds
    monkeypatch.setattr(learner.encoder, "image_embeds", lambda x, q=None: encoded.append(len(x)) or images(x, q))
    trainer = TaskTrainer(learner.state, learner.encoder, learner.encoder.images(tasks[0].train))
    trainer.begin()
    assert trainer.teacher is None and sum(encoded) == 4
    trainer.kept_share()
    assert sum(encoded) == 8


@pytest.mark.slow
def test_all_images_give_the_same_learner_as_more_than_there_are(base, tasks):
    first, second = (learner_of(base, update_share="auto", planning_images=limit) for limit in ("all", 12))
    for learner in (first, second):
        for task in tasks[:2]:
            learner.learn_task(task.train)
    tensors = second.state.adapter_tensors()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in first.state.adapter_tensors().items())
    assert first.record.update_share == second.record.update_share


def test_share_is_chosen_from_the_drawn_images(base, tasks):
    """The features that the rule sees are those of the drawn images, by the models before and after the task."""
    trainer = second_task(base, tasks, 4, update_share="auto")
    pixels = torch.stack([trainer.images[row][0] for row in trainer.sample])
    with torch.no_grad():
        before = unit_image_embeds(trainer.encoder.clip, pixels)
    trainer.take_steps()
    with torch.no_grad():
        after = unit_image_embeds(trainer.encoder.clip, pixels)
    torch.testing.assert_close(trainer.sampled, before, rtol=0, atol=1e-5)
    torch.testing.assert_close(trainer.encode_rows("share", trainer.sample), after, rtol=0, atol=1e-5)


@pytest.mark.parametrize("limit", [0, 1.5, "some"])
def test_impossible_number_is_refused(limit):
    with pytest.raises((ValueError, TypeError), match="planning_images"):
        LearnerArguments(planning_images=limit)
