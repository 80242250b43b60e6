"""Test the page about training loops: its loops give the learner's numbers and can be continued in a new process."""

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
from dulbe_peft.training.task_trainer import epoch_order

TRAINER, FRESH_TRAINER = [code for _, _, code in blocks("docs/by-hand.md", "python")][:2]
BY_HAND = text_of("examples/training_loop.py")


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Make the page use 20 training images per class, a fixed seed, and the learner's order of images."""
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
    """The final state of the page's loop, with the attributes that `tensors` reads."""

    def __init__(self, namespace):
        self.model, self.head, self.memory = (namespace[name] for name in ("model", "head", "statistics"))


@pytest.mark.slow
def test_loop_by_hand_equals_the_learner_bit_for_bit(small, base):
    """There are two tasks with two epochs of two steps. The teacher sees the batches that are trained on."""
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
    accuracy = namespace["accuracy"](small[0].test, small[0].class_names)
    assert accuracy == learner.evaluate(small[0].test)["accuracy"]


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


@pytest.mark.rare
@pytest.mark.parametrize("way", ["by hand", "trainer"])
def test_next_task_in_a_fresh_process_equals_the_same_process(small, way, tmp_path, monkeypatch):
    """The fresh process loads what was saved; the other one continues without saving and loading."""
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dulbe_peft.streams.digits.digit_tasks", lambda: small)
    namespace: dict = {"__name__": "__main__"}
    if way == "by hand":
        exec(compile(BY_HAND, way, "exec"), namespace)
        before = "sys.argv.append('--resume')"
        last_task = "torch.manual_seed(1)\nlearn(august.train, august.class_names)"  # seeds the order of the images
        code = BY_HAND.replace("    for task in tasks:", "    torch.manual_seed(1)\n    for task in tasks:")
    else:
        exec(compile(TRAINER, way, "exec"), namespace)
        before, code = "", FRESH_TRAINER + "model = learner.model\n"
        last_task = "trainer.train_dataset = august.train\ntrainer.train()"
    exec(last_task, namespace)
    script = tmp_path / "fresh.py"
    script.write_text(FRESH.format(threads=torch.get_num_threads(), before=before, code=code), encoding="utf-8")
    path = {"PYTHONPATH": f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, str(script), "state"], capture_output=True, text=True, env={**os.environ, **path}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected, actual = namespace["model"].state_dict(), load_file("state")
    assert actual.keys() == {name for name in expected if "dulbe_" in name}
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []
