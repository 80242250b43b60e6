"""Use of the machine: threads, jobs, progress, and Python's garbage collector."""

import gc
import itertools
import os
import random
import sys
from threading import Barrier, Event, Thread

import numpy as np
import pytest
import torch
from lives import images_of, tiny_learner
from torch import nn

from dulbe_peft.classifiers import make_classifier
from dulbe_peft.encoders import pixels
from dulbe_peft.utils.extras import garbage_collection_off
from dulbe_peft.utils.torch_settings import evaluating, one_thread, seeded_randomness
from dulbe_peft.utils.workers import number_of_jobs


def test_classifiers_use_one_thread_and_restore_the_thread_count(monkeypatch):
    torch.set_num_threads(2)
    threads, eigh = [], torch.linalg.eigh
    classifier = make_classifier("bayes", 8, 10.0)
    monkeypatch.setattr(torch.linalg, "eigh", lambda *a, **k: threads.append(torch.get_num_threads()) or eigh(*a, **k))
    kind, added = classifier.rule_type, classifier.rule_type.added
    monkeypatch.setattr(kind, "added", lambda *a: threads.append(torch.get_num_threads()) or added(*a))
    features = torch.nn.functional.normalize(torch.randn(40, 8), dim=1)
    classifier.add_classes(["a", "b"], features, torch.arange(40) % 2, features[:2])
    classifier.probabilities(features)
    classifier.update_classes(features, torch.arange(40) % 2)
    with pytest.raises(KeyError), one_thread():
        raise KeyError
    assert set(threads) == {1} and torch.get_num_threads() == 2


@pytest.mark.parametrize("changed", [False, True])
def test_modules_are_evaluated_in_a_block_and_then_as_they_were(changed):
    model = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()))
    for modes in itertools.product([False, True], repeat=4):
        for module, training in zip(model.modules(), modes, strict=True):
            module.training = training
        with evaluating(model):
            assert not any(module.training for module in model.modules())
            model.train(changed)
        assert tuple(module.training for module in model.modules()) == modes


def test_blocks_of_python_threads_run_at_once_and_change_no_other_thread():
    torch.set_num_threads(2)
    both, left, inside, outside = Barrier(2, timeout=20), Event(), [], []

    def first():
        with one_thread():
            both.wait()
            both.wait()
            inside.append(torch.get_num_threads())
        outside.append(torch.get_num_threads())
        left.set()

    def second():  # its first call of torch is made while the block of the first thread runs, and its block ends later
        both.wait()
        outside.append(torch.get_num_threads())
        with one_thread():
            both.wait()
            assert left.wait(20)
            with one_thread():
                inside.append(torch.get_num_threads())
            inside.append(torch.get_num_threads())
        outside.append(torch.get_num_threads())

    for part in (running := [Thread(target=first), Thread(target=second)]):
        part.start()
    for part in running:
        part.join()
    later = Thread(target=lambda: outside.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert inside == [1, 1, 1] and outside == [2, 2, 2, 2] and torch.get_num_threads() == 2


def test_seeded_blocks_of_two_python_threads_draw_the_same_numbers_as_alone():
    def draw(seed, before=lambda: None):
        with seeded_randomness(seed):
            before()
            drawn[seed] = random.random(), float(np.random.rand()), float(torch.rand(()))

    drawn, done, start = {}, Event(), (random.getstate(), torch.get_rng_state())
    draw(1), draw(2)
    alone, drawn, second = drawn, {}, Thread(target=draw, args=(2, lambda: done.wait(20)))
    draw(1, lambda: second.start() or second.join(0.2))
    done.set()
    second.join()
    assert drawn == alone and random.getstate() == start[0] and torch.equal(torch.get_rng_state(), start[1])


def test_jobs_are_limited_to_the_number_of_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert [number_of_jobs(asked, None) for asked in (None, 1, 3, 64)] == [3, 1, 3, 3]
    assert number_of_jobs(64, "tcp://cluster:8786") == 64
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert number_of_jobs(None, None) == 1


@pytest.mark.parametrize("delay", [0.0, 5.0])
def test_progress_is_shown_only_on_terminals_and_for_long_passes(delay, monkeypatch, capsys):
    monkeypatch.setattr(pixels, "UNSHOWN", delay)
    rows = torch.stack([image for image, _ in images_of(*range(4))])
    learner = tiny_learner("frozen", progress=True)
    learner.image_embeds(rows)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    learner.image_embeds(rows)
    progress = capsys.readouterr().err
    assert ("encode, float32" in progress and "images/s" in progress) == (delay == 0)


@pytest.fixture
def thawed(monkeypatch):
    monkeypatch.setattr("dulbe_peft.utils.extras._frozen", False)
    gc.unfreeze()
    yield
    gc.enable()
    gc.unfreeze()


def test_garbage_collector_is_frozen_once_and_then_restored(thawed):
    with pytest.raises(OSError, match="no model"), garbage_collection_off():
        raise OSError("no model")  # nothing is frozen, so that the partly loaded model can be collected
    assert gc.isenabled() and not gc.get_freeze_count()
    with garbage_collection_off():
        assert not gc.isenabled() and not gc.get_freeze_count()
    frozen = gc.get_freeze_count()
    assert gc.isenabled() and frozen > 1000
    later = [[] for _ in range(100)]
    with garbage_collection_off():
        pass
    assert gc.get_freeze_count() <= frozen and len(later) == 100  # objects of a second model are not frozen
    gc.disable()
    with garbage_collection_off():
        pass
    assert not gc.isenabled()
