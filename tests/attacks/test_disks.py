"""File operations fail one at a time: the error names the path, and nothing is lost.

By default, a few operations of each call fail. With `DULBE_PEFT_DISKS=all`, every operation fails with every error; a
number sets how many cases are tried for each call.
"""

import copy
import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from failing_files import Failing
from lives import content, differences, everything, learned, stream, tiny_base, tiny_learner

from dulbe_peft import CheckpointError, ClassIncrementalLearner, export_lora, run_stream
from dulbe_peft.photos.commands.main import main
from dulbe_peft.utils.folders import read_manifest

HOW_MANY = os.environ.get("DULBE_PEFT_DISKS", "4")
MACHINE = {"device": "cpu", "progress": False}


@dataclass
class World:
    """What a call may use: a learner, and a folder with earlier saved files and a file of another program."""

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
    run_stream(tiny_learner(), stream(2), world.root / "run")


def report(world: World) -> None:
    if main(["report", str(world.root / "run"), "--output", str(world.root / "report.html")]):
        raise ValueError(str(world.root))  # the command has printed the error


CALLS: dict[str, Callable[[World], object]] = {
    "save": lambda world: world.learner.save_pretrained(world.root / "saved"),
    "load": load,
    "run": go_on,
    "export": lambda world: export_lora(world.learner.model, world.root / "lora"),
    "report": report,
}


@pytest.fixture(scope="module")
def beginning(tmp_path_factory):
    """Return a learner of two tasks, and a folder with a learner of one task, a run of one task and an export."""
    root = tmp_path_factory.mktemp("beginning")
    learner = learned(tiny_learner(), 1)
    learner.save_pretrained(root / "saved")
    (root / "saved" / "mine.txt").write_text("mine")
    (root / "mine.txt").write_text("mine")
    export_lora(learner.model, root / "lora")
    run_stream(tiny_learner(), stream(1), root / "run")
    return learned(learner, 1, first=1), root


def cases(operations: int) -> list[tuple[int, OSError]]:
    """Return which operation fails with which error in each case."""
    every = [(at, number) for at in range(operations) for number in (errno.ENOSPC, errno.EACCES, errno.EINTR)]
    count = len(every) if HOW_MANY == "all" else int(HOW_MANY)
    chosen = [every[index * len(every) // count] for index in range(count)]
    return [(at, OSError(number, os.strerror(number))) for at, number in chosen]


@pytest.mark.plain("save", "load")
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_failed_file_operation_is_named_and_the_repeated_call_succeeds(beginning, tmp_path, name, capsys):
    learner, start = beginning
    world, act = World(learner, tmp_path / "world"), CALLS[name]
    shutil.copytree(start, world.root)
    with Failing(world.root) as watch:
        act(world)
    expected, state = content(world.root), everything(learner)
    for at, error in cases(len(watch.done)):
        where = f"{at} {watch.done[at]} {error}"
        shutil.rmtree(world.root)
        shutil.copytree(start, world.root)
        finished = content(world.root / "run" / "task-001")
        try:
            with Failing(world.root, at, error):
                act(world)
        except (OSError, ValueError, CheckpointError) as raised:
            # `error` names no path, so it may be raised unchanged only where nothing is written.
            assert str(world.root) in str(raised) or raised is error, where
        assert "Traceback" not in capsys.readouterr().err, where
        assert content(world.root / "run" / "task-001") == finished, where
        for path in (world.root / "mine.txt", world.root / "saved" / "mine.txt"):
            assert path.read_text() == "mine", where
        assert not differences(everything(learner), state), where
        read_manifest(world.root / "saved")
        act(world)
        assert content(world.root) == expected, where
        assert not [path for path in world.root.rglob(".*") if "dulbe" in path.name], where
