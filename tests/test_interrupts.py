"""Ctrl-C at every moment: what a call changes is then as before it or as after it, and the call can be made again.

The plain suite takes a few moments of each call. `DULBE_PEFT_INTERRUPTS=all` takes every place of the code, at the
first and at the last time that a call comes to it; a number takes so many moments of each call.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from interrupts import Interrupting, Moment, count, place
from lives import (
    content,
    differences,
    everything,
    images_of,
    learn,
    learned,
    randomness,
    stream,
    tiny_base,
    tiny_learner,
)

from dulbe_peft import ClassIncrementalLearner, export_lora
from dulbe_peft.strategies import STRATEGIES
from dulbe_peft.utils.folders import read_manifest

HOW_MANY = os.environ.get("DULBE_PEFT_INTERRUPTS", "3")
MORE = images_of(1, 2, seed=7)
KNOWN = ["b0", "a0", "b1"]


def chosen(moments: list[Moment]) -> list[int]:
    """Numbers of the moments at which a call is interrupted."""
    last = {moment: number for number, moment in enumerate(moments)}
    first = {moment: number for number, moment in reversed(list(enumerate(moments)))}
    every = sorted({*first.values(), *last.values()})
    if HOW_MANY == "all":
        return every
    return [every[index * len(every) // int(HOW_MANY)] for index in range(int(HOW_MANY))]


def interrupted(act: Callable[[], object], at: int) -> None:
    """Make the call, and interrupt it unless it ends before; what the exception holds is let go of."""
    watch = Interrupting(at)
    try:
        with watch:
            act()
    except KeyboardInterrupt:
        return
    assert len(watch.moments) <= at, f"the interrupt at {place(watch.moments[at])} was swallowed"


@pytest.fixture(scope="module")
def taught():
    """Learners of one task, by strategy."""
    made: dict[str, ClassIncrementalLearner] = {}

    def learner(strategy: str = "dulbe") -> ClassIncrementalLearner:
        if strategy not in made:
            made[strategy] = learned(tiny_learner(strategy, ("bridge", "prototype", "lda", "ridge")), 1)
        return copy.deepcopy(made[strategy])

    return learner


ACTS: dict[str, Callable[[ClassIncrementalLearner], object]] = {
    "update": lambda learner: learner.update_classes(images_of(0, 1, seed=7), ["b0", "a0"]),
    "forget": lambda learner: learner.forget_class("a0"),
    "predict": lambda learner: learner.predict([image for image, _ in MORE], top_k=2, return_scores=True),
    "evaluate": lambda learner: learner.evaluate(images_of(0, 1, seed=7), ["b0", "a0"]),
    "zero-shot": lambda learner: learner.zero_shot([(images_of(0, 1, seed=7), ["b0", "a0"])]),
    **{f"learn {name}": learn(1) for name in STRATEGIES},
}


@pytest.mark.parametrize("name", ACTS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_learner_is_as_before_or_as_after_and_the_call_can_be_made_again(taught, name):
    act, strategy = ACTS[name], name.partition("learn ")[2] or "dulbe"
    learner = taught(strategy)
    before = everything(learner)
    moments = count(lambda: act(learner))
    after = everything(learner)
    changes, wrong = differences(after, before), []
    learner = taught(strategy)
    for at in chosen(moments):
        numbers = randomness()
        interrupted(partial(act, learner), at)
        # Whoever reads images outside of learning draws a number for torch's `DataLoader`.
        assert "learn " not in name or numbers == randomness()
        found = everything(learner)
        changed, lacking = differences(found, before), differences(found, after)
        if lacking and changed:
            wrong.append((place(moments[at]), "half done", min(changed, lacking, key=len)[:3]))
        elif lacking:
            act(learner)
            again = differences(everything(learner), after)
            if again:
                wrong.append((place(moments[at]), "another end", again[:3]))
        if changed or changes:
            learner = taught(strategy)
    assert not wrong


# ---------------------------------------------------------------------- folders


def save(learner: ClassIncrementalLearner, folder: Path) -> None:
    learner.save_pretrained(folder)


def export(learner: ClassIncrementalLearner, folder: Path) -> None:
    export_lora(learner.model, folder)


@pytest.mark.parametrize("write", [save, export])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_folder_is_the_old_one_or_the_new_one(taught, tmp_path, write):
    old, folder = taught(), tmp_path / "0" / "saved"
    write(old, folder)
    before = content(folder)
    new = learned(copy.deepcopy(old), 1, first=1)
    state = everything(new)
    moments = count(lambda: write(new, folder))
    after = content(folder)
    for at in chosen(moments):
        shutil.rmtree(folder.parent)
        write(old, folder)
        interrupted(lambda: write(new, folder), at)
        assert content(folder) in (before, after), f"interrupted at {place(moments[at])}"
        assert not differences(everything(new), state), f"interrupted at {place(moments[at])}"
        if write is save:
            read_manifest(folder)
        write(new, folder)
        assert content(folder) == after, f"after an interrupt at {place(moments[at])}"
        left = [path.name for path in folder.parent.iterdir() if path.name != "saved"]
        assert not left, f"interrupted at {place(moments[at])}"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_loading_leaves_the_base_model_as_it_was(taught, tmp_path):
    expected = taught()
    expected.save_pretrained(tmp_path / "saved")
    clip = copy.deepcopy(tiny_base()[0])
    names, weights = [name for name, _ in clip.named_modules()], copy.deepcopy(clip.state_dict())
    moments = count(lambda: ClassIncrementalLearner.from_pretrained(tmp_path / "saved", copy.deepcopy(clip)))
    for at in chosen(moments):
        interrupted(lambda: ClassIncrementalLearner.from_pretrained(tmp_path / "saved", clip), at)
        assert [name for name, _ in clip.named_modules()] == names, f"interrupted at {place(moments[at])}"
        assert all(torch.equal(value, weights[name]) for name, value in clip.state_dict().items())
        assert all(parameter.requires_grad for parameter in clip.parameters()), f"interrupted at {place(moments[at])}"
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "saved", clip)
    pixels = [image for image, _ in MORE]
    assert torch.equal(loaded.image_embeds(pixels), expected.image_embeds(pixels))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_run_goes_on_with_the_same_learner_or_a_new_one(tmp_path):
    tiny_learner().run(stream(2), tmp_path / "whole")
    expected = content(tmp_path / "whole")
    tiny_learner().run(stream(1), tmp_path / "begun")
    begun, output = content(tmp_path / "begun"), tmp_path / "run"

    def start() -> ClassIncrementalLearner:
        shutil.rmtree(output, ignore_errors=True)
        shutil.copytree(tmp_path / "begun", output)
        return tiny_learner()

    learner = start()
    moments = count(lambda: learner.run(stream(2), output))
    assert content(output) == expected
    for number, at in enumerate(chosen(moments)):
        learner = start()
        interrupted(lambda learner=learner: learner.run(stream(2), output), at)
        finished = {name: text for name, text in content(output).items() if name.startswith("task-001/")}
        assert finished.items() <= begun.items(), f"interrupted at {place(moments[at])}"
        again = learner if number % 2 else tiny_learner()
        again.run(stream(2), output)
        assert content(output) == expected, f"interrupted at {place(moments[at])}"
        assert not [path for path in output.iterdir() if path.name.startswith(".")]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_half_merged_adapter_can_be_unmerged(taught):
    learner = taught()
    before = everything(learner)
    base = {name: value.data.clone() for name, value in learner.clip.named_parameters()}

    def act() -> None:
        learner.model.merge_adapter()
        learner.model.unmerge_adapter()

    for at in chosen(moments := count(act)):
        interrupted(act, at)
        for layer in learner.model.modules():
            if getattr(layer, "merged", False):
                layer.unmerge()
        assert not differences(everything(learner), before), f"interrupted at {place(moments[at])}"
        assert all(torch.equal(p, base[name]) for name, p in learner.clip.named_parameters())
