"""Threads, asyncio tasks and processes around a learner: each sees a whole one, with torch as a program finds it."""

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

from dulbe_peft.photos.deployment.export import export_learner
from dulbe_peft.utils.devices import usual_torch


class Calling(list):
    """A data set that calls something before it gives an item."""

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


@pytest.mark.parametrize("name", TAKEN)
def test_what_takes_a_learner_waits_until_its_task_is_learned(tmp_path, name):
    """Else it would get an adapter that is half trained, beside the classifiers of before."""
    learner = learned(tiny_learner(), 1)
    thread = threading.Thread(target=TAKEN[name], args=(learner, tmp_path / "taken"))

    def call():
        if thread.ident is None:
            thread.start()
            thread.join(0.3)
            assert thread.is_alive() and not (tmp_path / "taken").exists()

    learner.learn_task(Calling(images_of(0, 1, 0, 1, seed=1), call), ["a1", "b1"])
    thread.join()
    TAKEN[name](learner, tmp_path / "calm")
    assert content(tmp_path / "taken") == content(tmp_path / "calm")


def test_a_scale_holds_in_its_own_thread_and_asyncio_task_alone():
    learner, image = learned(tiny_learner(), 1), images_of(0, seed=7)[0][0]
    whole, found = learner.image_embeds(image), {}

    def look(name):
        found[name] = learner.image_embeds(image)

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
    assert torch.equal(found["task"], whole) and torch.equal(found["thread"], whole)
    with learner.model.disable_adapter():
        assert torch.equal(found["scaled"], learner.image_embeds(image))
    assert not torch.equal(found["scaled"], whole)


def test_the_default_type_of_a_program_comes_back_after_two_that_overlap():
    """As of threads, of which the first ends while the second still computes."""
    first, second = ExitStack(), ExitStack()
    torch.set_default_dtype(torch.float64)
    try:
        for one in (first, second):
            one.enter_context(usual_torch())
        first.close()
        assert torch.get_default_dtype() == torch.float32
        second.close()
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


class Killing:
    """A data set that kills the process that reads it, as the system does where memory runs out."""

    labels = (0, 1)

    def __len__(self):
        return 2

    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_reading_process_is_an_error_in_plain_words():
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
