"""The page about training loops: what it writes by hand ends with the learner's numbers, and goes on elsewhere."""

import os
import subprocess
import sys
from itertools import count
from pathlib import Path

import peft
import pytest
import torch
import write_saved
from documents import blocks, text_of
from safetensors.torch import load_file
from small_runs import learner_of
from test_dual_mode_trainer import assert_equal
from torch.utils.data import RandomSampler

from dulbe_peft import class_incremental_tasks
from dulbe_peft.training.trainer import epoch_order

TRAINER, FRESH_TRAINER = [code for _, _, code in blocks("docs/by-hand.md", "python")][:2]
BY_HAND = text_of("examples/training_loop.py")


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The page's stream with 20 images of each class to learn from, the same start, and the learner's order."""
    stream = class_incremental_tasks(write_saved.digits(0, 20), write_saved.digits(20, 23), increment=2)
    get_peft_model, tasks = peft.get_peft_model, count()

    def seeded(*args, **kwargs):
        torch.manual_seed(0)
        return get_peft_model(*args, **kwargs)

    def in_order(sampler):
        if not hasattr(sampler, "task"):
            sampler.task, sampler.epochs = next(tasks), count()
        return iter(epoch_order(len(sampler.data_source), 0, sampler.task, next(sampler.epochs)))

    monkeypatch.setattr("dulbe_peft.streams.digits.digit_tasks", lambda: stream)
    monkeypatch.setattr(peft, "get_peft_model", seeded)
    monkeypatch.setattr(RandomSampler, "__iter__", in_order)
    monkeypatch.chdir(tmp_path)
    return stream


class ByHand:
    """What the page's loop ends with, as `tensors` reads a learner."""

    def __init__(self, namespace):
        self.model, self.head, self.memory = (namespace[name] for name in ("model", "head", "statistics"))


@pytest.mark.slow
def test_by_hand_and_the_learner_are_equal(small, base):
    """Bit for bit, over two tasks of two steps in two epochs; each teacher sees the batches that are trained on."""
    namespace: dict = {"__name__": "__main__"}
    exec(compile(BY_HAND, "by hand", "exec"), namespace)
    settings = {"batch_size": 32, "eval_batch_size": 32, "epochs": 2, "prompt_template": "a photo of a {}."}
    learner = learner_of(
        base,
        classifiers=("pooled_bridge",),
        adapter={"residual_rank": 4, "support_rank": 16},
        teacher="online",
        **settings,
    )
    for task in small[:2]:
        learner.learn_task(task.train)
    assert_equal(ByHand(namespace), learner)
    found = namespace["accuracy"](small[0].test, small[0].class_names)
    assert found == learner.evaluate(small[0].test)["accuracy"]


FRESH = """
import sys

import torch
import write_saved
from safetensors.torch import save_file
from dulbe_peft import class_incremental_tasks
from dulbe_peft.streams import digits

torch.set_num_threads({threads})
stream = class_incremental_tasks(write_saved.digits(0, 20), write_saved.digits(20, 23), increment=2)
digits.digit_tasks = lambda: stream
{before}
{code}
save_file({{n: t.contiguous() for n, t in model.state_dict().items() if "dulbe_" in n}}, sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", ["by hand", "trainer"])
def test_the_next_task_in_a_fresh_process(small, way, tmp_path, monkeypatch):
    """It ends as in the process that learned the tasks before, where nothing was saved and loaded."""
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dulbe_peft.streams.digits.digit_tasks", lambda: small)
    namespace: dict = {"__name__": "__main__"}
    if way == "by hand":
        exec(compile(BY_HAND, way, "exec"), namespace)
        before = "sys.argv.append('--resume')"
        go_on = "torch.manual_seed(1)\nlearn(august.train, august.class_names)"  # the order of the images
        code = BY_HAND.replace("    for task in tasks:", "    torch.manual_seed(1)\n    for task in tasks:")
    else:
        exec(compile(TRAINER, way, "exec"), namespace)
        before, code = "", FRESH_TRAINER + "model = learner.model\n"
        go_on = "trainer.train_dataset = august.train\ntrainer.train()"
    exec(go_on, namespace)
    script = tmp_path / "fresh.py"
    script.write_text(FRESH.format(threads=torch.get_num_threads(), before=before, code=code), encoding="utf-8")
    path = {"PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, str(script), "state"], capture_output=True, text=True, env={**os.environ, **path}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected, found = namespace["model"].state_dict(), load_file("state")
    assert found.keys() == {name for name in expected if "dulbe_" in name}
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
