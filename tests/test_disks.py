"""Every file operation of whole lives fails once, in turn: an error that names the path, and nothing lost.

The plain suite takes a few operations of each call. `DULBE_PEFT_DISKS=all` takes every one, with every error; a number
takes so many of each call.
"""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from failing_files import ERRORS, Failing
from lives import content, differences, everything, learned, stream, tiny_base, tiny_learner

from dulbe_peft import CheckpointError, ClassIncrementalLearner, export_lora
from dulbe_peft.commands.main import main
from dulbe_peft.utils.folders import read_manifest

HOW_MANY = os.environ.get("DULBE_PEFT_DISKS", "4")
MACHINE = {"device": "cpu", "progress": False}


@dataclass
class World:
    """What a call may use: a learner, and a folder with what was saved before and a file of somebody else's."""

    learner: ClassIncrementalLearner
    root: Path


def load(world: World) -> None:
    base = copy.deepcopy(tiny_base()[0])
    names = [name for name, _ in base.named_modules()]
    try:
        ClassIncrementalLearner.from_pretrained(world.root / "saved", base, machine=MACHINE)
    except BaseException:
        assert [name for name, _ in base.named_modules()] == names
        raise


def go_on(world: World) -> None:
    tiny_learner().run(stream(2), world.root / "run")


def report(world: World) -> None:
    if main(["report", str(world.root / "run"), "--output", str(world.root / "report.html")]):
        raise ValueError(str(world.root))  # the command has said what is wrong


CALLS: dict[str, Callable[[World], object]] = {
    "save": lambda world: world.learner.save_pretrained(world.root / "saved"),
    "load": load,
    "run": go_on,
    "export": lambda world: export_lora(world.learner.model, world.root / "lora"),
    "report": report,
}


@pytest.fixture(scope="module")
def beginning(tmp_path_factory):
    """A learner of two tasks, and a folder with one of one task, a run of one task and an export."""
    root = tmp_path_factory.mktemp("beginning")
    learner = learned(tiny_learner(), 1)
    learner.save_pretrained(root / "saved")
    (root / "saved" / "mine.txt").write_text("mine")
    (root / "mine.txt").write_text("mine")
    export_lora(learner.model, root / "lora")
    tiny_learner().run(stream(1), root / "run")
    return learned(learner, 1, first=1), root


def cases(operations: int) -> list[tuple[int, int]]:
    """Which operation fails, with which error."""
    every = [(at, number) for at in range(operations) for number in ERRORS]
    if HOW_MANY == "all":
        return every
    return [every[index * len(every) // int(HOW_MANY)] for index in range(int(HOW_MANY))]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_whatever_fails_is_named_and_the_same_call_ends_well_afterwards(beginning, tmp_path, name, capsys):
    learner, start = beginning
    world, act = World(learner, tmp_path / "world"), CALLS[name]

    def begin() -> None:
        shutil.rmtree(world.root, ignore_errors=True)
        shutil.copytree(start, world.root)

    begin()
    with Failing(world.root) as watch:
        act(world)
    expected, state, wrong = content(world.root), everything(learner), []
    for at, number in cases(len(watch.done)):
        begin()
        finished = content(world.root / "run" / "task-001")
        problem, failing = partial(wrong.append), Failing(world.root, at, number)
        where = (at, *watch.done[at], number)
        try:
            with failing:
                act(world)
        except (OSError, ValueError, CheckpointError) as error:
            if str(world.root) not in str(error):
                problem((where, "names no path", repr(error)))
        except Exception as error:
            problem((where, "another error", repr(error)))
        if "Traceback" in capsys.readouterr().err:
            problem((where, "Traceback"))
        if content(world.root / "run" / "task-001") != finished:
            problem((where, "a finished task is lost"))
        mine = [world.root / "mine.txt", world.root / "saved" / "mine.txt"]
        if not all(path.is_file() and path.read_text() == "mine" for path in mine):
            problem((where, "somebody's file is gone"))
        if differences(everything(learner), state):
            problem((where, "the learner changed"))
        read_manifest(world.root / "saved")
        try:
            act(world)
        except Exception as error:
            problem((where, "afterwards", repr(error)))
            continue
        found = content(world.root)
        if found != expected:
            problem(
                (
                    where,
                    "another end",
                    sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))[:4],
                )
            )
        if [path for path in world.root.rglob(".*") if "dulbe" in path.name]:
            problem((where, "left over"))
    assert not wrong
