"""Test learners with threads, asyncio tasks and processes: each sees a consistent learner and torch's defaults."""

import asyncio
import copy
import os
import pickle
import signal
import threading
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from lives import content, differences, everything, images_of, learned, tiny_learner

from dulbe_peft.photos.deployment.formats import export_learner
from dulbe_peft.utils.torch_settings import default_torch_settings


class Calling(list):
    """A data set that calls a function before it returns an item."""

    def __init__(self, rows, call):
        super().__init__(rows)
        self.labels, self.call = [label for _, label in rows], call

    def __getitem__(self, index):
        self.call()
        return super().__getitem__(index)


TAKEN = {
    "save": lambda learner, folder: learner.save_pretrained(folder),
    "export": lambda learner, folder: export_learner(learner, folder),
    "copy": lambda learner, folder: copy.deepcopy(learner).save_pretrained(folder),
    "pickle": lambda learner, folder: pickle.loads(pickle.dumps(learner)).save_pretrained(folder),
}


@pytest.mark.plain("save", "pickle")
@pytest.mark.parametrize("name", TAKEN)
def test_saving_or_copying_waits_until_a_task_is_learned(tmp_path, name):
    """Otherwise the copy would have a half-trained adapter and the old classifiers."""
    learner = learned(tiny_learner(), 1)
    thread = threading.Thread(target=TAKEN[name], args=(learner, tmp_path / "taken"))

    def call():
        if thread.ident is None:
            thread.start()
            thread.join(0.3)
            assert thread.is_alive() and not (tmp_path / "taken").exists()

    learner.learn_task(Calling(images_of(0, 1, 0, 1, seed=1), call), ["a1", "b1"])
    thread.join()
    TAKEN[name](learner, tmp_path / "later")
    assert content(tmp_path / "taken") == content(tmp_path / "later")


def test_training_waits_for_that_of_another_learner_but_predicting_does_not():
    """Trainings share the generators of the process. The data set of one may ask a learner that is to be trained."""
    teacher, pupil, order = learned(tiny_learner(), 1), tiny_learner(), []

    def train():
        learned(teacher, 1, first=1)
        order.append("teacher")

    def call():
        if torch.initial_seed() and other.ident is None:  # not while the images are checked, before the training
            other.start()
            other.join(0.3)
            order.append(teacher.predict(images_of(0, seed=0)))

    def teach():
        pupil.learn_task(Calling(images_of(0, 1, 0, 1), call), ["a", "b"])
        order.append("pupil")

    other, first = threading.Thread(target=train, daemon=True), threading.Thread(target=teach, daemon=True)
    first.start()
    for thread in (first, other):
        thread.join(60)
    assert order == [["a0"], "pupil", "teacher"]


def test_scaled_affects_only_its_thread_and_asyncio_task():
    learner, image = learned(tiny_learner(), 1), images_of(0, seed=7)[0][0]
    unscaled, features = learner.image_embeds(image), {}

    def look(name):
        features[name] = learner.image_embeds(image)

    async def scaled(inside, done):
        with learner.scaled(np.float32(0)):
            inside.set()
            await done.wait()
            look("scaled")

    async def other(inside, done):
        await inside.wait()
        look("task")
        thread = threading.Thread(target=look, args=("thread",))
        thread.start()
        thread.join()
        done.set()

    async def both():
        inside, done = asyncio.Event(), asyncio.Event()
        await asyncio.gather(scaled(inside, done), other(inside, done))

    asyncio.run(both())
    assert torch.equal(features["task"], unscaled) and torch.equal(features["thread"], unscaled)
    with learner.model.disable_adapter():
        assert torch.equal(features["scaled"], learner.image_embeds(image))
    assert not torch.equal(features["scaled"], unscaled)


def test_default_dtype_is_restored_after_overlapping_contexts():
    """Contexts of two threads overlap if the first ends while the second still computes."""
    first, second = ExitStack(), ExitStack()
    torch.set_default_dtype(torch.float64)
    try:
        for stack in (first, second):
            stack.enter_context(default_torch_settings())
        first.close()
        assert torch.get_default_dtype() == torch.float32
        second.close()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


class Killing:
    """A data set that kills the process that reads it, as the system does if memory runs out."""

    labels = (0, 1)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_killed_worker_process_raises_an_error_and_changes_nothing():
    learner = learned(tiny_learner(num_workers=1), 1)
    before, rows = everything(learner), Killing()
    calls = (
        lambda: learner.learn_task(rows, ["x", "y"]),
        lambda: learner.evaluate(rows, ["a0", "b0"]),
        lambda: learner.predict(rows),
    )
    for call in calls:
        with pytest.raises(
            ChildProcessError, match="a process that reads images died, .* choose a smaller num_workers"
        ):
            call()
        assert not differences(everything(learner), before)
