"""What a run needs of the folder it goes on in, and of a learner that has learned before."""

from __future__ import annotations

import copy
import json
import shutil

import pytest
import small_runs
import torch
from peft import get_peft_model
from small_runs import QUICK

from dulbe_peft import CheckpointError, ClassIncrementalLearner, DualModeLoraConfig, LearnerArguments
from dulbe_peft.runs.progress import Row, known_tasks
from dulbe_peft.streams.tasks import Task

NAMES = ["one", "three", "two", "zero", "five", "four"]


@pytest.fixture(scope="module")
def photos(digit_folders):
    """Handwritten digits zero to five, four images of each to learn from and two to test on."""
    return digit_folders(6, 4, 2)


def make_learner(base, strategy="frozen", **fields):
    clip, processor = base
    torch.manual_seed(0)
    model = copy.deepcopy(clip)
    if strategy != "frozen":
        model = get_peft_model(model, DualModeLoraConfig(residual_rank=2, support_rank=8, target_modules=["k_proj"]))
    args = LearnerArguments(**{**QUICK, **fields})
    return ClassIncrementalLearner(model, processor, args=args, strategy=strategy, classifiers=("bridge", "prototype"))


def tasks_of(root, names=NAMES):
    return small_runs.tasks_of(root, names)


@pytest.fixture
def root(photos, tmp_path):
    return shutil.copytree(photos, tmp_path / "photos")


@pytest.fixture(scope="module")
def whole(base, photos, tmp_path_factory):
    """The run of three tasks that nothing disturbs."""
    torch.set_num_threads(1)  # as every test has it, but this comes before them
    output = tmp_path_factory.mktemp("whole") / "run"
    make_learner(base).run(tasks_of(photos), output)
    return output


def results_of(output):
    return json.loads((output / "results.json").read_text())


# ---------------------------------------------------------------------- tasks that follow may be others


def test_a_run_goes_on_when_tasks_are_added_as_if_they_had_been_there(base, photos, whole, tmp_path):
    output, learner = tmp_path / "run", make_learner(base)
    learner.run(tasks_of(photos)[:1], output)
    first = learner.run(tasks_of(photos)[:2], output)
    assert len(first["class_names"]) == 2
    found = make_learner(base).run(tasks_of(photos), output)
    assert found == results_of(whole) and len(found["zero_shot"]["overall"]) == 3
    assert None not in found["zero_shot"]["overall"], "those of the third task are measured when it comes"
    for name in ("manifest.json", "progress.json", "head.safetensors", "data.json"):
        assert (output / "task-003" / name).read_bytes() == (whole / "task-003" / name).read_bytes(), name


@pytest.mark.parametrize("mended", ["train/two/1.png", "train/four/0.png"])
def test_a_bad_file_of_a_later_task_costs_no_finished_task(base, root, tmp_path, capsys, mended):
    good, more = (root / mended).read_bytes(), root / "train" / "five" / "extra.png"
    (root / mended).write_bytes(b"no image")
    with pytest.raises(ValueError, match=mended.rpartition("/")[2]):
        make_learner(base).run(tasks_of(root), tmp_path / "run")
    finished = sorted(path.name for path in (tmp_path / "run").glob("task-*"))
    assert finished == (["task-001"] if "two" in mended else ["task-001", "task-002"])
    (root / mended).write_bytes(good)
    shutil.copy(root / "train" / "five" / "0.png", more)
    make_learner(base).run(tasks_of(root), tmp_path / "run")
    assert f"resuming after {finished[-1]}" in capsys.readouterr().out
    again = make_learner(base).run(tasks_of(root), tmp_path / "again")
    assert results_of(tmp_path / "run") == again


def test_later_classes_may_be_others(base, photos, tmp_path):
    make_learner(base).run(tasks_of(photos)[:1], tmp_path / "run")
    found = make_learner(base).run(tasks_of(photos, [*NAMES[:2], *NAMES[4:], *NAMES[2:4]]), tmp_path / "run")
    assert found["class_names"] == [["one", "three"], ["five", "four"], ["two", "zero"]]


# ---------------------------------------------------------------------- a learner that has learned before


@pytest.mark.parametrize("strategy", ["frozen", "dulbe"])
def test_a_saved_learner_goes_on_in_a_new_folder_and_nothing_is_invented(base, photos, tmp_path, strategy):
    tasks = tasks_of(photos)
    learner = make_learner(base, strategy)
    for task in tasks[:2]:
        learner.learn_task(task.train)
    learner.save_pretrained(tmp_path / "saved")
    straight = copy.deepcopy(learner.head.state_dict())
    learner.learn_task(tasks[2].train)

    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(value, straight[name]) for name, value in loaded.head.state_dict().items())
    found = loaded.run(tasks[2:], tmp_path / "run")
    assert found["class_names"] == [list(task.class_names) for task in tasks] and found["known_tasks"] == 2
    matrix = found["head"]["matrix"]
    assert matrix[:2] == [[None], [None, None]] and matrix[2][:2] == [None, None] and 0 <= matrix[2][2] <= 1
    assert found["head"]["overall"][:2] == [None, None] and found["head"]["forgetting"] is None
    assert found["zero_shot"]["overall"][:2] == [None, None] and found["zero_shot"]["last_accuracy"] is not None
    assert results_of(tmp_path / "run") == found
    assert sorted(path.name for path in (tmp_path / "run").glob("task-*")) == ["task-003"]
    for name, classifier in learner.classifiers.items():
        for key, value in loaded.classifiers[name].state_dict().items():
            assert torch.equal(value, classifier.state_dict()[key]), (name, key)

    again = ClassIncrementalLearner.from_pretrained(tmp_path / "saved")
    assert again.run(tasks[2:], tmp_path / "run") == found, "the same call goes on"
    again = ClassIncrementalLearner.from_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="class that was seen already"):
        again.run(tasks, tmp_path / "other")


def test_rows_of_the_run_that_a_learner_comes_from_stay_and_given_tests_are_run(base, photos, whole, tmp_path):
    tasks = tasks_of(photos)
    make_learner(base).run(tasks[:2], tmp_path / "june")
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "june")
    found = loaded.run(tasks[2:], tmp_path / "july", known_tests=[task.test for task in tasks[:2]])
    assert {**found, "known_tasks": None} == {**results_of(whole), "known_tasks": None}
    timings = json.loads((tmp_path / "july" / "timings.json").read_text())["tasks"]
    assert len(timings) == 3 and timings[0] == json.loads((tmp_path / "june" / "timings.json").read_text())["tasks"][0]

    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "june" / "task-002")
    partly = loaded.run(tasks[2:], tmp_path / "august", known_tests=[None, tasks[1].test])
    assert partly["head"]["matrix"][:2] == found["head"]["matrix"][:2]
    assert partly["head"]["matrix"][2] == [None, *found["head"]["matrix"][2][1:]]

    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "june")
    loaded.forget_class("one")
    assert all(task.row == Row() for task in known_tasks(loaded)), "what was measured was of other classes"
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "june")
    with pytest.raises(ValueError, match="known_tests has 1 entries, the learner had learned 2 tasks"):
        loaded.run(tasks[2:], tmp_path / "x", known_tests=[None])


def test_a_learner_without_a_new_task_is_committed_and_tested_again(base, photos, tmp_path):
    tasks = tasks_of(photos)
    make_learner(base).run(tasks[:2], tmp_path / "june")
    for _ in range(2):  # the second time, the folder is there
        learner = ClassIncrementalLearner.from_pretrained(tmp_path / "june")
        learner.update_classes(tasks[1].test)
        found = learner.run([], tmp_path / "july", known_tests=[task.test for task in tasks[:2]])
        assert found["head"]["matrix"][0] == results_of(tmp_path / "june")["head"]["matrix"][0]
    assert ClassIncrementalLearner.from_pretrained(tmp_path / "july").head.counts.tolist() == [4, 4, 6, 6]
    changed = ClassIncrementalLearner.from_pretrained(tmp_path / "june")
    with pytest.raises(ValueError, match="a run that began with another learner of the same classes"):
        changed.run([], tmp_path / "july", known_tests=[None, None])
    with pytest.raises(ValueError, match="tasks is empty"):
        make_learner(base).run([], tmp_path / "x")


def test_what_a_learner_took_in_since_is_not_thrown_away_in_silence(base, photos, tmp_path):
    tasks, learner = tasks_of(photos), make_learner(base, "dulbe")
    learner.run(tasks[:2], tmp_path / "run")
    learner.update_classes(tasks[1].test)
    with torch.no_grad():
        next(learner.model.shared_parameters()).add_(1)
    counts, model = learner.head.counts.clone(), copy.deepcopy(learner.model.state_dict())
    with pytest.raises(ValueError, match="this learner is not the one in .*task-002.* by update_classes for instance"):
        learner.run(tasks, tmp_path / "run")
    assert torch.equal(learner.head.counts, counts)
    assert all(torch.equal(value, model[name]) for name, value in learner.model.state_dict().items())


def test_another_learner_s_folder_is_refused(base, photos, whole, tmp_path):
    output, learner = shutil.copytree(whole, tmp_path / "run"), make_learner(base)
    with pytest.raises(ValueError, match="task 3 has the classes .* there, and None in the stream now given"):
        learner.run(tasks_of(photos)[:2], output)
    learner.learn_task(tasks_of(photos)[1].train)
    with pytest.raises(ValueError, match=r"it holds the tasks .* this learner has learned \[\['two', 'zero'\]\]"):
        learner.run(tasks_of(photos), output)


# ---------------------------------------------------------------------- what is read is checked


def test_a_run_s_folder_loads_its_newest_whole_task(base, photos, whole, tmp_path, capsys):
    output = shutil.copytree(whole, tmp_path / "run")
    assert len(ClassIncrementalLearner.from_pretrained(output).tasks) == 3
    (output / "task-003" / "head.safetensors").write_bytes(b"")
    capsys.readouterr()
    assert len(ClassIncrementalLearner.from_pretrained(output).tasks) == 2
    said = capsys.readouterr()
    assert f"stepping over {output / 'task-003'}: " in said.err and "head.safetensors is damaged" in said.err
    for name in ("task-001", "task-002"):
        (output / name / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="none of its tasks is whole: .*task-003.*task-002.*task-001"):
        ClassIncrementalLearner.from_pretrained(output)


def test_without_listings_a_change_is_told_without_names(base, root, whole, tmp_path):
    """`data.json` lists the images of its own task; the files are named by it."""
    output = shutil.copytree(whole, tmp_path / "run")
    path = output / "task-001" / "data.json"
    assert {entry.split("/")[0] for entry in json.loads(path.read_text())["train"]} == {"one", "three"}
    path.write_text('{"train": [1]}')
    (root / "train" / "one" / "0.png").unlink()
    with pytest.raises(ValueError, match="training images of task 1, which is finished, differ; put"):
        make_learner(base).run(tasks_of(root), output)


def test_streams_without_tests_still_run(base, photos, tmp_path):
    tasks = [Task(task.train, None, task.class_names) for task in tasks_of(photos)]
    make_learner(base).run(tasks[:1], tmp_path / "run")
    found = make_learner(base).run(tasks, tmp_path / "run")
    assert "classifiers" not in found and len(found["class_names"]) == 3
