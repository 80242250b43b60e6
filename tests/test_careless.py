"""Whatever a program has set around a learner, and whatever is handed in by mistake: the same answer, or an error."""

from __future__ import annotations

import copy
import os
import pickle
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from lives import differences, everything, images_of, learned, tiny_base, tiny_learner

from dulbe_peft import CheckpointError, ClassIncrementalLearner

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
TASK = images_of(0, 1, 0, 1, seed=1), ["a1", "b1"]
MORE = images_of(0, seed=3), ["a0"]
PROBES = [image for image, _ in images_of(0, 1, seed=99)]


@pytest.fixture(scope="module")
def beginning():
    return learned(tiny_learner(), 1)


@pytest.fixture
def learner(beginning):
    return copy.deepcopy(beginning)


def live(learner):
    """All that a learner does; its answers."""
    learner.learn_task(*TASK)
    learner.update_classes(*MORE)
    figures = learner.evaluate(TASK[0], TASK[1])
    return figures, learner.predict(PROBES, top_k=4, return_scores=True)


@contextmanager
def switched(switch, on, off):
    switch(on)
    try:
        yield
    finally:
        switch(off)


SETTINGS = {
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "float64": partial(switched, torch.set_default_dtype, torch.float64, torch.float32),
    "another default device": partial(torch.device, "meta"),
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "deterministic": partial(switched, torch.use_deterministic_algorithms, True, False),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_a_program_has_set_changes_nothing(beginning, learner, name, tmp_path):
    calm = copy.deepcopy(beginning)
    expected = live(calm)
    with SETTINGS[name]():
        assert live(learner) == expected
        learner.save_pretrained(tmp_path / "saved")
        base, machine = copy.deepcopy(tiny_base()[0]), {"device": "cpu", "progress": False}
        again = ClassIncrementalLearner.from_pretrained(tmp_path / "saved", base, machine=machine)
        assert again.predict(PROBES, top_k=4, return_scores=True) == expected[1]
    assert not differences(everything(learner), everything(calm))
    for one in (learner, calm):
        one.learn_task(images_of(0, seed=5), ["c1"])
    assert not differences(everything(learner), everything(calm))


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda learner: pickle.loads(pickle.dumps(learner))])
def test_a_copy_lives_on_its_own(beginning, learner, twin):
    other, before = twin(learner), everything(learner)
    assert not differences(everything(other), before)
    live(other)
    assert not differences(everything(learner), before)
    live(learner)
    assert not differences(everything(other), everything(learner))


def test_modes_that_somebody_has_switched_on_are_left_on_and_not_used(beginning, learner):
    calm = copy.deepcopy(beginning)
    learner.model.train()
    assert live(learner) == live(calm)
    assert all(module.training for module in learner.model.modules())


@contextmanager
def refused(learner, error, words=None):
    """The block raises, and leaves the learner as it was."""
    before = everything(learner)
    with pytest.raises(error, match=words):
        yield
    assert not differences(everything(learner), before)


@pytest.mark.parametrize(("flag", "words"), [(True, "requires a gradient"), (False, "requires no gradient")])
def test_other_parameters_chosen_for_training_are_an_error(learner, flag, words):
    """A base weight that is trained could not be taken back, and the saved learner would not fit its base model."""
    learner.model.requires_grad_(flag)
    with refused(learner, ValueError, words):
        learner.learn_task(*TASK)
    learner.model.requires_grad_(False)
    learner.model.set_adapter("default")
    live(learner)


def test_a_refused_task_leaves_a_merged_adapter_merged(learner):
    learner.model.merge_adapter()
    with refused(learner, ValueError, "call unmerge_adapter"):
        learner.learn_task(*TASK)


@pytest.mark.parametrize("label", [2**64, np.uint64(2**63), -1, 0.5, "0", None])
@pytest.mark.parametrize("alone", [True, False])
def test_labels_of_no_use_are_refused(learner, label, alone):
    class Listed(list):
        labels = [0, label]

    images = [(PROBES[0], 0), (PROBES[1], label)]
    with refused(learner, (ValueError, TypeError), "label"):
        learner.learn_task(Listed(images) if alone else images, ["x"])


@pytest.mark.parametrize("place", ["", ".", ".."])
def test_the_current_folder_is_not_taken_away_from_under_a_program(learner, tmp_path, monkeypatch, place):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(FileExistsError, match="current folder"):
        learner.save_pretrained(place)
    assert os.getcwd() == str(tmp_path / "here") and not list((tmp_path / "here").iterdir())


def test_a_pipe_in_a_file_s_place_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(CheckpointError, match=r"manifest\.json is no file"):
        ClassIncrementalLearner.from_pretrained(tmp_path)


@pytest.mark.parametrize("at", [0, 3])
def test_an_interrupt_while_learning_leaves_the_learner_as_it_was(learner, monkeypatch, at):
    """Ctrl-C at an image, and while the classifiers learn what the trained model saw."""

    class Interrupted(list):
        def __getitem__(self, index):
            if index == at:
                raise KeyboardInterrupt
            return super().__getitem__(index)

    def interrupt(*_):
        raise KeyboardInterrupt

    with refused(learner, KeyboardInterrupt):
        learner.learn_task(Interrupted(TASK[0]), TASK[1])
    with monkeypatch.context() as context, refused(learner, KeyboardInterrupt):
        context.setattr("dulbe_peft.training.trainer.learn_task", interrupt)
        learner.learn_task(*TASK)
    live(learner)


def test_features_and_texts_carry_no_gradient(learner):
    learner.learn_task(*TASK)
    texts = learner.text_embeds(learner.class_names)
    assert not texts.requires_grad and not learner.image_embeds(PROBES).requires_grad
    assert not any(tensor.requires_grad for tensor in learner.classifier.tensors().values())
