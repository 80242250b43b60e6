"""A stream's folder: what a run goes on with and what it refuses, and what is left of it when something breaks."""

import copy
import json
import shutil

import pytest
import torch
from lives import content
from PIL import Image
from small_runs import learner_of, tasks_of

from dulbe_peft import CheckpointError, ClassIncrementalLearner
from dulbe_peft.data.store import FeatureStore
from dulbe_peft.encoders.loading import load_dual_encoder
from dulbe_peft.streams.progress import Row, known_tasks
from dulbe_peft.streams.tasks import Task
from dulbe_peft.utils.folders import library_versions

NAMES = ["one", "three", "two", "zero", "five", "four"]


@pytest.fixture(scope="module")
def base(tiny_model):
    return load_dual_encoder(tiny_model)


@pytest.fixture(scope="module")
def photos(digit_folders):
    """Handwritten digits zero to five, four images of each to learn from and two to test on."""
    return digit_folders(6, 4, 2)


@pytest.fixture
def root(photos, tmp_path):
    return shutil.copytree(photos, tmp_path / "photos")


def stream(root, tasks=2, names=NAMES):
    return tasks_of(root, names)[:tasks]


def make_learner(base, rank=2, strategy="dulbe", classifiers="bridge", **fields):
    return learner_of(base, strategy, classifiers, {"residual_rank": rank, "target_modules": ["fc1"]}, **fields)


def frozen(base):
    return make_learner(base, strategy="frozen", classifiers=("bridge", "prototype"))


def results_of(output):
    return json.loads((output / "results.json").read_text())


@pytest.fixture(scope="module")
def finished(base, photos, tmp_path_factory):
    """A run of two trained tasks."""
    output = tmp_path_factory.mktemp("finished") / "run"
    make_learner(base).run(stream(photos), output)
    return output


@pytest.fixture
def output(finished, tmp_path):
    """A copy of it to go on in."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture(scope="module")
def whole(base, photos, tmp_path_factory):
    """A run of three tasks without training."""
    output = tmp_path_factory.mktemp("whole") / "run"
    frozen(base).run(stream(photos, 3), output)
    return output


def test_another_run_is_refused_by_the_names_of_what_differs(base, photos, finished, output):
    changed = make_learner(base)
    changed.clip.vision_model.encoder.layers[1].mlp.fc1.base_layer.weight.data[0, 0] += 1
    first, second = ["three", "one", *NAMES[2:]], [*NAMES[:2], "zero", "two", *NAMES[4:]]
    for learner, names, words in (
        (make_learner(base, seed=1), NAMES, "seed was 0 and is now 1;"),
        (make_learner(base, classifiers="bridge:depths=0.5"), NAMES, r"classifiers\.bridge\.depths"),
        (changed, NAMES, "base_model was "),
        (make_learner(base), first, r"task 1 has the classes \['one', 'three'\] there, and \['three', "),
        (make_learner(base), second, r"task 2 has the classes .* there, and \['zero', 'two'\]"),
    ):
        with pytest.raises(ValueError, match=f"task-002 belongs to another run: {words}"):
            learner.run(stream(photos, names=names), output)
        assert content(output) == content(finished)


@pytest.mark.parametrize(("split", "name"), [("train", "0.png"), ("test", "4.png")])
def test_other_data_of_a_finished_task_are_refused_by_the_files(base, root, finished, output, split, name):
    Image.new("RGB", (9, 9), "red").save(root / split / "two" / name)
    words = rf"{split}(ing)? images of task 2, .* 1 are gone or changed, and 1 are new \(.*two/{name}\); put"
    with pytest.raises(ValueError, match=f"task-002 belongs to another run: of the {words}"):
        make_learner(base).run(stream(root), output)
    assert content(output) == content(finished)


@pytest.mark.parametrize("teacher", ["online", "cached"])
def test_images_that_are_no_files_are_told_at_least_by_their_classes(base, photos, tmp_path, teacher):
    def run(less, count=2):
        tasks = []
        for task in stream(photos, count):
            rows = [(task.train[row]["image"], task.train[row]["label"]) for row in range(less, len(task.train))]
            tasks.append(Task(rows, None, task.class_names))
        make_learner(base, teacher=teacher).run(tasks, tmp_path / "run")

    run(0, 1)
    words = "the training images of task 1, which is finished, 1 are gone or changed, and 0 are new; put"
    with pytest.raises(ValueError, match=words):
        run(1)
    run(0)
    assert (tmp_path / "run" / "task-002").is_dir()


def test_data_elsewhere_and_another_machine_are_the_same_run(base, root, finished, output, capsys, monkeypatch):
    (root / "train" / "one" / "0.png").rename(root / "train" / "one" / "9.png")
    shutil.rmtree(output / "task-002")
    (output / "results.json").unlink()
    other = library_versions() | {"torch": "0.4", "numpy": "0.1"}
    with monkeypatch.context() as context:
        context.setattr("dulbe_peft.streams.resume.library_versions", lambda: other)
        make_learner(base, pixel_cache_mb=1).run(stream(root), output)
    said = capsys.readouterr().out
    assert "task-001 was written with other versions of numpy, torch: the last" in said
    assert "resuming after task-001: 2 classes learned" in said
    assert content(output / "task-002").keys() == content(finished / "task-002").keys()
    assert (output / "results.json").read_bytes() == (finished / "results.json").read_bytes()


def test_damaged_folders_are_named_and_stepped_over(base, photos, finished, output, capsys):
    assert len(ClassIncrementalLearner.from_pretrained(output).tasks) == 2
    (output / "task-002" / "statistics.safetensors").write_bytes(b"")
    (output / "task-1000").mkdir()
    assert len(ClassIncrementalLearner.from_pretrained(output).tasks) == 1, "of the newest task that is whole"
    stepping = f"stepping over {output / 'task-002'}: {output / 'task-002' / 'statistics.safetensors'} is damaged"
    assert stepping in capsys.readouterr().err
    make_learner(base).run(stream(photos), output)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(f"stepping over {output / 'task-1000'}: ") and said[1].startswith(stepping)
    assert said[2] == "resuming after task-001: 2 classes learned"
    (output / "task-1000").rmdir()
    assert content(output) == content(finished)


def test_where_no_folder_is_valid_nothing_is_replaced(base, photos, output, tmp_path):
    for name in ("task-001", "task-002"):
        (output / name / "manifest.json").unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tasks.png").write_text("somebody's")
    before = content(tmp_path)
    for folder, words in (
        (output, "already holds task-001 and none of them is valid"),
        (tmp_path / "other", "tasks.png is there, and no task of a run"),
    ):
        with pytest.raises((ValueError, FileExistsError), match=words):
            make_learner(base).run(stream(photos), folder)
    with pytest.raises(CheckpointError, match="none of its tasks is whole: .*task-002.*task-001"):
        ClassIncrementalLearner.from_pretrained(output)
    assert content(tmp_path) == before


def test_a_run_goes_on_when_tasks_are_added_as_if_they_had_been_there(base, photos, whole, tmp_path):
    output, learner = tmp_path / "run", frozen(base)
    for count in (1, 2):
        learner.run(stream(photos, count), output)
    found = frozen(base).run(stream(photos, 3), output)
    assert found == results_of(whole) and len(found["zero_shot"]["overall"]) == 3
    assert None not in found["zero_shot"]["overall"], "those of the third task are measured when it comes"
    for name in ("manifest.json", "progress.json", "head.safetensors", "images.safetensors"):
        assert (output / "task-003" / name).read_bytes() == (whole / "task-003" / name).read_bytes(), name


def test_a_bad_file_of_a_later_task_costs_no_finished_task(base, root, tmp_path, capsys):
    mended = "train/two/1.png"
    good = (root / mended).read_bytes()
    (root / mended).write_bytes(b"no image")
    with pytest.raises(ValueError, match="two/1.png"):
        frozen(base).run(stream(root, 3), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").glob("task-*")] == ["task-001"]
    (root / mended).write_bytes(good)
    shutil.copy(root / "train" / "five" / "0.png", root / "train" / "five" / "extra.png")
    found = frozen(base).run(stream(root, 3), tmp_path / "run")
    assert "resuming after task-001" in capsys.readouterr().out
    assert found == frozen(base).run(stream(root, 3), tmp_path / "again")


def test_a_saved_learner_goes_on_in_a_new_folder_and_nothing_is_invented(base, photos, tmp_path):
    tasks, learner = stream(photos, 3), make_learner(base)
    for task in tasks[:2]:
        learner.learn_task(task.train)
    learner.save_pretrained(tmp_path / "saved")
    learner.learn_task(tasks[2].train)
    loaded, again, other = (ClassIncrementalLearner.from_pretrained(tmp_path / "saved") for _ in range(3))
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
    assert again.run(tasks[2:], tmp_path / "run") == found, "the same call goes on"
    with pytest.raises(ValueError, match="class that was already seen"):
        other.run(tasks, tmp_path / "other")


def test_rows_of_the_run_that_a_learner_comes_from_stay_and_given_tests_are_run(base, photos, whole, tmp_path):
    tasks = stream(photos, 3)
    frozen(base).run(tasks[:2], tmp_path / "june")
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "june")
    found = loaded.run(tasks[2:], tmp_path / "july", known_tests=[task.test for task in tasks[:2]])
    assert found == results_of(whole) | {"known_tasks": 2}
    timings = json.loads((tmp_path / "july" / "timings.json").read_text())["tasks"]
    assert len(timings) == 3 and timings[0] == json.loads((tmp_path / "june" / "timings.json").read_text())["tasks"][0]
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "june")
    partly = loaded.run(tasks[2:], tmp_path / "august", known_tests=[None, tasks[1].test])
    assert partly["head"]["matrix"] == [*found["head"]["matrix"][:2], [None, *found["head"]["matrix"][2][1:]]]
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "june")
    with pytest.raises(ValueError, match="known_tests has 1 entries, the learner had learned 2 tasks"):
        loaded.run(tasks[2:], tmp_path / "x", known_tests=[None])
    loaded.forget_class("one")
    assert all(task.row == Row() for task in known_tasks(loaded)), "what was measured was of other classes"


def test_a_learner_without_a_new_task_is_committed_and_tested_again(base, photos, tmp_path):
    tasks = stream(photos, 3)
    frozen(base).run(tasks[:2], tmp_path / "june")
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
        frozen(base).run([], tmp_path / "x")


def test_what_a_learner_took_in_since_is_not_thrown_away_in_silence(base, photos, tmp_path):
    tasks, learner = stream(photos, 3), make_learner(base)
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
    output, learner = shutil.copytree(whole, tmp_path / "run"), frozen(base)
    with pytest.raises(ValueError, match="task 3 has the classes .* there, and None in the stream now given"):
        learner.run(stream(photos), output)
    learner.learn_task(stream(photos)[1].train)
    with pytest.raises(ValueError, match=r"it holds the tasks .* this learner has learned \[\['two', 'zero'\]\]"):
        learner.run(stream(photos, 3), output)


@pytest.mark.parametrize("strategy", ["frozen", "dulbe"])
def test_tests_in_one_pass_say_what_each_says_by_itself(base, photos, monkeypatch, strategy):
    """The store is asked once for all of them, and what it lacks is encoded test by test."""
    learner, tasks = make_learner(base, strategy=strategy, classifiers=("bridge", "lda")), stream(photos, 3)
    for task in tasks:
        learner.learn_task(task.train, task.class_names)
    tests = [(task.test, task.class_names) for task in tasks]
    asked, get = [], FeatureStore.get
    monkeypatch.setattr(FeatureStore, "get", lambda *given: asked.append(len(given[2])) or get(*given))
    learner.encoder.store = FeatureStore()
    alone = [learner.evaluate_images(*test) for test in tests[:2]]
    learner.evaluate_images(*tests[0])
    asked.clear()
    together = learner.evaluations(tests)
    alone.append(learner.evaluate_images(*tests[2]))
    assert asked[:2] == ([12, 4] if strategy == "frozen" else []), "of the last test the store knows nothing"
    asked.clear()
    for found in (together, learner.evaluations(tests)):
        for one, other in zip(found, alone, strict=True):
            assert (one.images, one.class_names) == (other.images, other.class_names)
            for kind in ("classifiers", "baselines"):
                left, right = getattr(one, kind), getattr(other, kind)
                assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
            for name in ("truth", "probability", "features"):
                assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert asked == ([12] if strategy == "frozen" else [])
