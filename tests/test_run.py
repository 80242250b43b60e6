"""A stream's folder: what a run refuses to go on with, and what is left of it when something breaks."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import signal
import sys

import numpy as np
import pytest
import torch
from lives import content
from peft import get_peft_model
from PIL import Image
from small_runs import QUICK, tasks_of

from dulbe_peft import (
    BridgeEnsembleHead,
    CheckpointError,
    ClassIncrementalLearner,
    DualModeLoraConfig,
    LearnerArguments,
)
from dulbe_peft.streams.tasks import Task
from dulbe_peft.utils.folders import library_versions, read_manifest


@pytest.fixture(scope="module")
def photos(digit_folders):
    """Handwritten digits zero to three, four images of each to learn from and two to test on."""
    return digit_folders(4, 4, 2)


def make_learner(base, rank=2, **fields):
    clip, processor = base
    torch.manual_seed(0)
    model = get_peft_model(copy.deepcopy(clip), DualModeLoraConfig(residual_rank=rank, support_rank=8))
    return ClassIncrementalLearner(model, processor, args=LearnerArguments(**{**QUICK, **fields}))


@pytest.fixture(scope="module")
def finished(base, photos, tmp_path_factory):
    torch.set_num_threads(1)  # as every test has it, but this comes before them
    output = tmp_path_factory.mktemp("finished") / "run"
    make_learner(base).run(tasks_of(photos), output)
    return output


class Noisy:
    """A dataset whose images are other ones each time."""

    def __init__(self, dataset):
        self.dataset, self.labels = dataset, dataset.labels

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        pixels = np.random.default_rng().integers(0, 256, (8, 8, 3), dtype=np.uint8)
        return {"image": Image.fromarray(pixels), "label": int(self.labels[index])}


class Breaking:
    """A dataset that does something when an image is read for the n-th time, its fingerprint's four not counted."""

    def __init__(self, dataset, call, action):
        self.dataset, self.labels, self.class_names = dataset, dataset.labels, dataset.class_names
        self.content_id = dataset.content_id
        self.calls, self.call, self.action = -4, call, action

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        self.calls += 1
        if self.calls == self.call:
            self.action()
        return self.dataset[index]


def breaking(tasks, call, action):
    return [*tasks[:-1], Task(Breaking(tasks[-1].train, call, action), tasks[-1].test, tasks[-1].class_names)]


def assert_first_task_is_intact(output, finished):
    assert sorted(path.name for path in output.iterdir()) == ["task-001", "timings.json"]
    files = read_manifest(output / "task-001").files
    assert files == read_manifest(finished / "task-001").files


# ---------------------------------------------------------------------- what a folder says


def test_a_task_folder_names_its_run(finished):
    manifest = read_manifest(finished / "task-002")
    identity = manifest.notes["identity"]
    assert manifest.versions == library_versions() and len(manifest.notes["tasks"]) == 2
    assert identity["classes"] == [["one", "three"], ["two", "zero"]] and identity["arguments"]["seed"] == 0
    assert not {"num_workers", "device", "progress"} & identity["arguments"].keys()
    kept = ["predictions.csv", "results.json", "task-001", "task-002", "timings.json"]
    assert sorted(path.name for path in finished.iterdir()) == kept
    assert "finished" not in json.loads((finished / "results.json").read_text())


def other_head(learner):
    learner.head = BridgeEnsembleHead(learner.head.embed_dim, depths=[0.5], logit_scale=learner.logit_scale)


def other_weight(learner):
    learner.clip.vision_model.encoder.layers[1].mlp.fc1.base_layer.weight.data[0, 0] += 1


@pytest.mark.parametrize(
    ("fields", "change", "order", "words"),
    [
        ({"seed": 1}, None, (0, 1, 2, 3), "seed was 0 and is now 1;"),
        (
            {"learning_rate": 0.5, "epochs": 2},
            None,
            (0, 1, 2, 3),
            "epochs was 1 and is now 2, learning_rate was .* 0.5;",
        ),
        ({"rank": 3}, None, (0, 1, 2, 3), "residual_rank was 2 and is now 3;"),
        ({}, other_head, (0, 1, 2, 3), r"classifiers\.bridge\.depths"),
        ({}, other_weight, (0, 1, 2, 3), "base_model was "),
        ({}, None, (1, 0, 2, 3), r"task 1 has the classes \['one', 'three'\] there, and \['three', 'one'\] in the"),
        ({}, None, (0, 1, 3, 2), r"task 2 has the classes \['two', 'zero'\] there, and \['zero', 'two'\] in the"),
    ],
)
def test_another_run_is_refused_by_the_names_of_what_differs(
    base, photos, finished, tmp_path, fields, change, order, words
):
    output, learner = shutil.copytree(finished, tmp_path / "run"), make_learner(base, **fields)
    if change:
        change(learner)
    with pytest.raises(ValueError, match=f"task-002 belongs to another run: {words}"):
        learner.run(tasks_of(photos, order), output)
    assert content(output) == content(finished)


def test_the_times_of_finished_tasks_stay_when_a_run_is_resumed(base, photos, finished, tmp_path):
    output = shutil.copytree(finished, tmp_path / "run")
    before = json.loads((output / "timings.json").read_text())["tasks"]
    make_learner(base).run(tasks_of(photos), output)
    assert json.loads((output / "timings.json").read_text())["tasks"] == before
    shutil.rmtree(output / "task-002")
    (output / "timings.json").write_text('{"tasks": [')
    make_learner(base).run(tasks_of(photos), output)
    first, second = json.loads((output / "timings.json").read_text())["tasks"]
    assert first is None and second["seconds"] >= sum(second["phases"].values()) > 0


def test_augmented_data_is_known_by_what_does_not_change(base, photos, tmp_path):
    def tasks():
        return [Task(Noisy(task.train), task.test, task.class_names) for task in tasks_of(photos)]

    make_learner(base, teacher="online").run(tasks(), tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "task-002")
    make_learner(base, teacher="online").run(tasks(), tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("bytes", r"training images of task 2, which is finished, differ: 1 changed \(two/0\.png\); put"),
        ("name", r"training images of task 2, .* differ: 1 added \(two/9\.png\), 1 removed \(two/0\.png\); put"),
        ("one more", r"training images of task 2, .* differ: 1 added \(two/9\.png\); put"),
        ("test", r"test images of task 2, which is finished, differ: 1 changed \(two/4\.png\); put"),
    ],
)
def test_other_data_of_a_finished_task_are_refused_by_the_files(base, photos, finished, tmp_path, change, words):
    root = shutil.copytree(photos, tmp_path / "photos")
    file = root / ("test" if change == "test" else "train") / "two" / ("4.png" if change == "test" else "0.png")
    if change == "name":
        file.rename(file.with_name("9.png"))
    elif change == "one more":
        shutil.copy(file, file.with_name("9.png"))
    else:
        Image.new("RGB", (9, 9), "red").save(file)
    output = shutil.copytree(finished, tmp_path / "run")
    with pytest.raises(ValueError, match=f"task-002 belongs to another run: the {words}"):
        make_learner(base).run(tasks_of(root), output)
    assert content(output) == content(finished)


def test_data_elsewhere_and_another_machine_s_settings_are_the_same_run(base, photos, finished, tmp_path, capsys):
    root, output = shutil.copytree(photos, tmp_path / "moved"), shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(output / "task-002")
    (output / "results.json").unlink()
    make_learner(base, pixel_cache_mb=1).run(tasks_of(root), output)
    assert "resuming after task-001: 2 classes learned" in capsys.readouterr().out
    assert content(output / "task-002").keys() == content(finished / "task-002").keys()
    assert (output / "results.json").read_bytes() == (finished / "results.json").read_bytes()


def test_damaged_folders_are_named_and_stepped_over(base, photos, finished, tmp_path, capsys):
    output = shutil.copytree(finished, tmp_path / "run")
    (output / "task-002" / "statistics.safetensors").write_bytes(b"")
    (output / "task-1000").mkdir()
    make_learner(base).run(tasks_of(photos), output)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"stepping over {output / 'task-1000'}: ")
    assert (
        said[1].startswith(f"stepping over {output / 'task-002'}: ") and "statistics.safetensors is damaged" in said[1]
    )
    assert said[2] == "resuming after task-001: 2 classes learned"
    (output / "task-1000").rmdir()
    assert content(output) == content(finished)


def test_where_no_folder_is_valid_nothing_is_replaced(base, photos, finished, tmp_path):
    output = shutil.copytree(finished, tmp_path / "run")
    for name in ("task-001", "task-002"):
        (output / name / "manifest.json").unlink()
    before = content(output)
    with pytest.raises(ValueError, match="already holds task-001 and none of them is valid"):
        make_learner(base).run(tasks_of(photos), output)
    assert content(output) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tasks.png").write_text("somebody's")
    with pytest.raises(FileExistsError, match="tasks.png is there, and no task of a run"):
        make_learner(base).run(tasks_of(photos), tmp_path / "other")


def test_other_library_versions_are_said(base, photos, finished, tmp_path, capsys, monkeypatch):
    output = shutil.copytree(finished, tmp_path / "run")
    monkeypatch.setattr(
        "dulbe_peft.runs.resume.library_versions", lambda: {**library_versions(), "torch": "0.4", "numpy": "0.1"}
    )
    make_learner(base).run(tasks_of(photos), output)
    assert "task-002 was written with other versions of numpy, torch: the last" in capsys.readouterr().out


def test_a_folder_in_use_is_refused(base, photos, tmp_path):
    def again():
        make_learner(base).run(tasks_of(photos), tmp_path)

    with pytest.raises(CheckpointError, match=re.escape(f"output_dir {str(tmp_path)!r} is in use")):
        make_learner(base).run(breaking(tasks_of(photos), 1, again), tmp_path)


# ---------------------------------------------------------------------- what breaks


@pytest.fixture
def sigint():
    """SIGINT as Python starts with it, also where a shell started the tests in the background and ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_sigint_ends_a_run_that_then_goes_on_to_the_same_end(base, photos, finished, tmp_path, sigint):
    tasks = tasks_of(photos)
    learner = make_learner(base)
    with pytest.raises(KeyboardInterrupt):
        learner.run(breaking(tasks, 5, lambda: signal.raise_signal(signal.SIGINT)), tmp_path)
    assert len(learner.tasks) == 1 and learner.model.history_rank == 3, "the task is taken back"
    assert_first_task_is_intact(tmp_path, finished)
    make_learner(base).run(tasks, tmp_path)
    assert (tmp_path / "results.json").read_bytes() == (finished / "results.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_all", "error"),
    [
        (0, False, ValueError),
        (signal.SIGKILL, False, ChildProcessError),
        (signal.SIGINT, True, KeyboardInterrupt),  # as a terminal's Ctrl-C
        (signal.SIGTERM, True, SystemExit),  # as a scheduler's; the program decides what it means
    ],
)
def test_what_befalls_processes_that_read_images_leaves_the_last_commit(
    base, photos, finished, tmp_path, number, to_all, error, sigint
):
    def befall():
        # A process that answers SIGINT itself never gets to the second line; one that answers SIGTERM ends.
        own, main = os.getpid(), os.getppid()
        for process in ((main, own) if number == signal.SIGTERM else (own, main))[: 2 if to_all else 1]:
            if number:
                os.kill(process, number)
        raise ValueError("image 7 (a/b.jpg) cannot be read")

    words = {ValueError: "image 7", ChildProcessError: f"images died.* kept in {re.escape(str(tmp_path))}"}
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with pytest.raises(error, match=words.get(error)):
            make_learner(base, num_workers=1).run(breaking(tasks_of(photos), 3, befall), tmp_path)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert_first_task_is_intact(tmp_path, finished)
    make_learner(base, num_workers=1).run(tasks_of(photos), tmp_path)
    assert (tmp_path / "results.json").read_bytes() == (finished / "results.json").read_bytes()
