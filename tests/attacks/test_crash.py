"""Runs of the command line that are killed, stopped or started twice reach the same result when resumed."""

import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from lives import content
from processes import Process, run

from dulbe_peft.data.store import FeatureStore
from dulbe_peft.utils.folders import LOCK_SUFFIX, clear_leftovers, read_manifest

pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("DULBE_PEFT_KILLS", "2"))


@pytest.fixture(scope="module")
def arguments(digit_folders, tiny_model):
    """Return the arguments of `run`, without `--output`, for four classes of digits, two per task."""
    flags = "--strategy dulbe --increment 2 --epochs 1 --batch-size 4 --support-rank 4 --residual-rank 2 --device cpu"
    flags += " --classifiers bridge,lda --eval-batch-size 4 --no-progress"
    return ["run", "--model", str(tiny_model), "--data", str(digit_folders(4, 3, 2)), *flags.split()]


def command(log, argv, **environment):
    """Start a command in a process of its own, which adds what it prints to a file."""
    with open(log, "ab") as file:
        return Process("-m", "dulbe_peft", *argv, stdout=file, stderr=file, env=os.environ | environment)


@pytest.fixture(scope="module")
def start(arguments):
    """Return a function that starts a run in another process, which prints to the file `log` beside the folder."""
    children = []

    def start(output, *more, **environment):
        argv = [*(more or arguments), "--output", str(output)]
        children.append(command(output.with_name("log"), argv, **environment))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.wait()


@pytest.fixture(scope="module")
def reference(start, tmp_path_factory):
    """Return the files of an uninterrupted run, the seconds it took, and its folder."""
    folder = tmp_path_factory.mktemp("reference")
    run("-c", "")  # starts the server of processes, which is not part of the time of a run
    started = time.monotonic()
    assert start(folder / "run").wait(120) == 0, (folder / "log").read_text()
    return content(folder / "run"), time.monotonic() - started, folder / "run"


def killed_within(child, seconds):
    """Kill a process after some seconds, and return whether it had not ended before."""
    with suppress(subprocess.TimeoutExpired):
        child.wait(seconds)
    child.kill()
    return child.wait(120) == -signal.SIGKILL


def test_killed_and_resumed_run_is_byte_equal_to_an_uninterrupted_one(start, reference, tmp_path):
    expected, seconds, _ = reference
    generator = random.Random(0)
    output, kills = tmp_path / "run", 0
    while kills < KILLS:
        child = start(output)
        if killed_within(child, generator.uniform(0, seconds)):
            kills += 1
            if kills % 2:
                continue  # kill the resumed run, too
            child = start(output)
        assert child.wait(120) == 0, (tmp_path / "log").read_text()
        assert content(output) == expected
        output = tmp_path / f"run-{kills}"


def test_killed_run_loses_at_most_one_batch_and_the_next_run_is_byte_equal(start, arguments, tmp_path):
    words = [*arguments[:5], "--classifiers", "lda", "--eval-batch-size", "2", "--device", "cpu", "--no-progress"]
    assert start(tmp_path / "plain", *words, "--no-store").wait(120) == 0
    environment, stored, codes = {"DULBE_PEFT_STORE": str(tmp_path / "f.sqlite")}, 0, []
    for number in range(KILLS):
        child = start(tmp_path / f"killed-{number}", *words, **environment)
        store = FeatureStore(tmp_path / "f.sqlite")
        while child.poll() is None:
            time.sleep(0.005)
            if store.facts()[0] > stored:
                child.kill()
                child.wait()
        assert store.facts()[0] >= stored, "features that were written are still there"
        stored = store.facts()[0]
        codes.append(child.returncode)
    assert stored and -signal.SIGKILL in codes
    assert start(tmp_path / "out", *words, **environment).wait(120) == 0, (tmp_path / "log").read_text()
    assert content(tmp_path / "out") == content(tmp_path / "plain")


def test_killed_predict_completes_its_table_when_repeated(reference, arguments, tmp_path):
    """Before it is repeated, there is no table, and every copied image is complete."""
    photos, generator = Path(arguments[arguments.index("--data") + 1]), random.Random(0)

    def predict(folder):
        folder.mkdir(exist_ok=True)
        argv = ["predict", str(reference[2]), str(photos), "--csv", str(folder / "t.csv"), "--top-k", "2"]
        argv += ["--sort-into", str(folder / "sorted"), "--eval-batch-size", "2", "--num-workers", "0"]
        return command(folder.with_name("log"), [*argv, "--device", "cpu"])

    started = time.monotonic()
    assert predict(tmp_path / "whole").wait(120) == 0, (tmp_path / "log").read_text()
    seconds, expected = time.monotonic() - started, content(tmp_path / "whole")
    folder, kills = tmp_path / "killed", 0
    while kills < KILLS:
        if not killed_within(predict(folder), generator.uniform(0, seconds)) or (folder / "t.csv").exists():
            assert (folder / "t.csv").read_bytes() == expected["t.csv"]
            shutil.rmtree(folder)
            continue
        kills += 1
        images = {path.read_bytes() for path in photos.rglob("*.png")}
        assert {path.read_bytes() for path in (folder / "sorted").glob("*/[!.]*")} <= images
    assert predict(folder).wait(120) == 0 and content(folder) == expected


def test_commit_killed_at_any_step_leaves_the_old_or_the_new_folder(tmp_path):
    subprocess.run([sys.executable, Path(__file__).with_name("dying_commits.py"), tmp_path], check=True)
    *dead, alive = sorted((int(path.name), path / "saved") for path in tmp_path.iterdir())
    assert len(dead) > 10 and (alive[1] / "a").read_text() == "new"
    contents = []
    for _, folder in dead:
        clear_leftovers(folder.parent, "saved")
        folder.with_name(f".saved{LOCK_SUFFIX}").unlink(missing_ok=True)
        assert [path.name for path in folder.parent.iterdir()] == ["saved"]
        assert read_manifest(folder)
        contents.append((folder / "a").read_text())
    assert contents == sorted(contents, reverse=True) and {"old", "new"} == set(contents)


@pytest.mark.rare
def test_sigterm_stops_a_run_and_prints_the_command_that_resumes_it(arguments, reference, tmp_path):
    output = tmp_path / "it's out"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dulbe_peft", *arguments, "--output", str(output)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        while not (output / "task-001").exists():
            assert process.poll() is None
            time.sleep(0.005)
        process.terminate()
        _, printed = process.communicate()
    assert process.returncode == 143
    folders = sorted(path.name for path in output.iterdir() if path.name.startswith("task-"))
    assert folders in (["task-001"], ["task-001", "task-002"])
    *_, first, second, resume = printed.splitlines()
    assert first == "dulbe-peft: stopped by SIGTERM" and "to continue" in second
    assert resume == shlex.join(command) and "Traceback" not in printed
    again = subprocess.run(resume, shell=True, env=environment, check=True, capture_output=True, text=True)
    assert "resuming after task-00" in again.stdout
    assert content(output) == reference[0]


def test_second_process_on_the_same_folder_is_refused_by_name(start, reference, tmp_path):
    children = [start(tmp_path / "run") for _ in range(2)]
    assert sorted(child.wait(120) for child in children) == [0, 2], (tmp_path / "log").read_text()
    assert f"output_dir {str(tmp_path / 'run')!r} is in use" in (tmp_path / "log").read_text()
    assert content(tmp_path / "run") == reference[0]
