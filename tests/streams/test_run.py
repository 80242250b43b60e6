"""Test the folder of a run: what a run resumes, what it refuses, and what remains after an error."""

import copy
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from lives import content
from PIL import Image
from small_runs import learner_of, tasks_of

from dulbe_peft import CheckpointError, ClassIncrementalLearner, run_stream
from dulbe_peft.data.store import FeatureStore
from dulbe_peft.encoders.loading import load_dual_encoder
from dulbe_peft.papers.inflora import InfLora
from dulbe_peft.streams.progress import Row, known_tasks
from dulbe_peft.streams.tasks import Task
from dulbe_peft.utils.folders import library_versions

NAMES = ["one", "three", "two", "zero", "five", "four"]


@pytest.fixture(scope="module")
def base(tiny_model):
    return load_dual_encoder(tiny_model)


@pytest.fixture(scope="module")
def photos(digit_folders):
    """Make folders of the digits zero to five, with four training and two test images each."""
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
    """Run a stream of two tasks with training, and return the folder."""
    output = tmp_path_factory.mktemp("finished") / "run"
    run_stream(make_learner(base), stream(photos), output)
    return output


@pytest.fixture
def output(finished, tmp_path):
    """Return a copy of the finished run's folder, to be resumed."""
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture(scope="module")
def whole(base, photos, tmp_path_factory):
    """Run a stream of three tasks without training, and return the folder."""
    output = tmp_path_factory.mktemp("whole") / "run"
    run_stream(frozen(base), stream(photos, 3), output)
    return output


def test_different_run_is_refused_with_the_differing_setting(base, photos, finished, output):
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
            run_stream(learner, stream(photos, names=names), output)
        assert content(output) == content(finished)


@pytest.mark.parametrize(("split", "name"), [("train", "0.png"), ("test", "4.png")])
def test_changed_image_of_a_finished_task_is_refused_by_name(base, root, finished, output, split, name):
    Image.new("RGB", (9, 9), "red").save(root / split / "two" / name)
    words = rf"{split}(ing)? images of the finished task 2, 1 are missing or changed, and 1 are new \(.*two/{name}\);"
    with pytest.raises(ValueError, match=f"task-002 belongs to another run: of the {words}"):
        run_stream(make_learner(base), stream(root), output)
    assert content(output) == content(finished)


@pytest.mark.parametrize("teacher", ["online", "cached"])
def test_missing_image_of_a_task_in_memory_is_refused(base, photos, tmp_path, teacher):
    def run(less, count=2):
        tasks = []
        for task in stream(photos, count):
            rows = [(task.train[row]["image"], task.train[row]["label"]) for row in range(less, len(task.train))]
            tasks.append(Task(rows, None, task.class_names))
        run_stream(make_learner(base, teacher=teacher), tasks, tmp_path / "run")

    run(0, 1)
    words = "the training images of the finished task 1, 1 are missing or changed, and 0 are new; restore"
    with pytest.raises(ValueError, match=words):
        run(1)
    run(0)
    assert (tmp_path / "run" / "task-002").is_dir()


def test_renamed_files_and_other_library_versions_resume_the_run(base, root, finished, output, capsys, monkeypatch):
    (root / "train" / "one" / "0.png").rename(root / "train" / "one" / "9.png")
    shutil.rmtree(output / "task-002")
    (output / "results.json").unlink()
    other = library_versions() | {"torch": "0.4", "numpy": "0.1"}
    with monkeypatch.context() as context:
        context.setattr("dulbe_peft.streams.resume.library_versions", lambda: other)
        run_stream(make_learner(base, pixel_cache_mb=1), stream(root), output)
    printed = capsys.readouterr().out
    assert "task-001 was written with other versions of numpy, torch: the last" in printed
    assert "resuming after task-001: 2 classes learned" in printed
    assert content(output / "task-002").keys() == content(finished / "task-002").keys()
    assert (output / "results.json").read_bytes() == (finished / "results.json").read_bytes()


def test_damaged_task_folders_are_reported_and_skipped(base, photos, finished, output, capsys):
    assert len(ClassIncrementalLearner.from_pretrained(output).tasks) == 2
    (output / "task-002" / "statistics.safetensors").write_bytes(b"")
    (output / "task-1000").mkdir()
    assert len(ClassIncrementalLearner.from_pretrained(output).tasks) == 1, "task-001 is the newest valid folder"
    skipping = f"skipping {output / 'task-002'}: {output / 'task-002' / 'statistics.safetensors'} is damaged"
    assert skipping in capsys.readouterr().err
    run_stream(make_learner(base), stream(photos), output)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"skipping {output / 'task-1000'}: ") and lines[1].startswith(skipping)
    assert lines[2] == "resuming after task-001: 2 classes learned"
    (output / "task-1000").rmdir()
    assert content(output) == content(finished)


def test_run_refuses_a_folder_without_a_valid_task(base, photos, output, tmp_path):
    for name in ("task-001", "task-002"):
        (output / name / "manifest.json").unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "tasks.png").write_text("somebody's")
    before = content(tmp_path)
    for folder, words in (
        (output, "already has task-001 and none of its task folders is valid"),
        (tmp_path / "other", "tasks.png exists, but the folder has no task of a run"),
    ):
        with pytest.raises((ValueError, FileExistsError), match=words):
            run_stream(make_learner(base), stream(photos), folder)
    with pytest.raises(CheckpointError, match="none of its task folders is valid: .*task-002.*task-001"):
        ClassIncrementalLearner.from_pretrained(output)
    assert content(tmp_path) == before


def test_run_with_tasks_added_later_equals_a_single_run(base, photos, whole, tmp_path):
    output, learner = tmp_path / "run", frozen(base)
    for count in (1, 2):
        run_stream(learner, stream(photos, count), output)
    results = run_stream(frozen(base), stream(photos, 3), output).contents()
    assert results == results_of(whole) and len(results["zero_shot"]["overall"]) == 3
    assert None not in results["zero_shot"]["overall"], "a later task must be measured too"
    for name in ("manifest.json", "progress.json", "head.safetensors", "images.safetensors"):
        assert (output / "task-003" / name).read_bytes() == (whole / "task-003" / name).read_bytes(), name


def test_damaged_image_of_a_later_task_keeps_finished_tasks(base, root, tmp_path, capsys):
    damaged = "train/two/1.png"
    good = (root / damaged).read_bytes()
    (root / damaged).write_bytes(b"no image")
    with pytest.raises(ValueError, match="two/1.png"):
        run_stream(frozen(base), stream(root, 3), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").glob("task-*")] == ["task-001"]
    (root / damaged).write_bytes(good)
    shutil.copy(root / "train" / "five" / "0.png", root / "train" / "five" / "extra.png")
    results = run_stream(frozen(base), stream(root, 3), tmp_path / "run").contents()
    assert "resuming after task-001" in capsys.readouterr().out
    assert results == run_stream(frozen(base), stream(root, 3), tmp_path / "again").contents()


def test_run_of_a_loaded_learner_leaves_earlier_tasks_unmeasured(base, photos, tmp_path):
    tasks, learner = stream(photos, 3), make_learner(base)
    for task in tasks[:2]:
        learner.learn_task(task.train)
    learner.save_pretrained(tmp_path / "saved")
    learner.learn_task(tasks[2].train)
    loaded, again, other = (ClassIncrementalLearner.from_pretrained(tmp_path / "saved") for _ in range(3))
    results = run_stream(loaded, tasks[2:], tmp_path / "run").contents()
    assert results["class_names"] == [list(task.class_names) for task in tasks] and results["known_tasks"] == 2
    matrix = results["head"]["matrix"]
    assert matrix[:2] == [[None], [None, None]] and matrix[2][:2] == [None, None] and 0 <= matrix[2][2] <= 1
    assert results["head"]["overall"][:2] == [None, None] and results["head"]["forgetting"] is None
    assert results["zero_shot"]["overall"][:2] == [None, None] and results["zero_shot"]["last_accuracy"] is not None
    assert results_of(tmp_path / "run") == results
    assert sorted(path.name for path in (tmp_path / "run").glob("task-*")) == ["task-003"]
    for name, classifier in learner.classifiers.items():
        for key, value in loaded.classifiers[name].state_dict().items():
            assert torch.equal(value, classifier.state_dict()[key]), (name, key)
    assert run_stream(again, tasks[2:], tmp_path / "run").contents() == results, "the same call resumes the run"
    with pytest.raises(ValueError, match="class that was already seen"):
        run_stream(other, tasks, tmp_path / "other")


def test_new_run_keeps_earlier_rows_and_runs_known_tests(base, photos, whole, tmp_path):
    tasks = stream(photos, 3)
    run_stream(frozen(base), tasks[:2], tmp_path / "june")
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "june")
    results = run_stream(
        loaded, tasks[2:], tmp_path / "july", known_tests=[task.test for task in tasks[:2]]
    ).contents()
    assert results == results_of(whole) | {"known_tasks": 2}
    timings = json.loads((tmp_path / "july" / "timings.json").read_text())["tasks"]
    assert len(timings) == 3 and timings[0] == json.loads((tmp_path / "june" / "timings.json").read_text())["tasks"][0]
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "june")
    partly = run_stream(loaded, tasks[2:], tmp_path / "august", known_tests=[None, tasks[1].test]).contents()
    assert partly["head"]["matrix"] == [*results["head"]["matrix"][:2], [None, *results["head"]["matrix"][2][1:]]]
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "june")
    with pytest.raises(ValueError, match="known_tests has 1 entries, but the learner had learned 2 tasks"):
        run_stream(loaded, tasks[2:], tmp_path / "x", known_tests=[None])
    loaded.forget_class("one")
    assert all(task.row == Row() for task in known_tasks(loaded)), "the old accuracies are of other classes"


def test_run_without_new_tasks_commits_and_tests_the_learner(base, photos, tmp_path):
    tasks = stream(photos, 3)
    run_stream(frozen(base), tasks[:2], tmp_path / "june")
    for _ in range(2):  # the second time, the folder exists
        learner = ClassIncrementalLearner.from_pretrained(tmp_path / "june")
        learner.update_classes(tasks[1].test)
        results = run_stream(learner, [], tmp_path / "july", known_tests=[task.test for task in tasks[:2]]).contents()
        assert results["head"]["matrix"][0] == results_of(tmp_path / "june")["head"]["matrix"][0]
    assert ClassIncrementalLearner.from_pretrained(tmp_path / "july").head.counts.tolist() == [4, 4, 6, 6]
    changed = ClassIncrementalLearner.from_pretrained(tmp_path / "june")
    with pytest.raises(ValueError, match="a run that began with another learner of the same classes"):
        run_stream(changed, [], tmp_path / "july", known_tests=[None, None])
    with pytest.raises(ValueError, match="tasks is empty"):
        run_stream(frozen(base), [], tmp_path / "x")


def test_run_refuses_to_discard_updates_of_the_learner(base, photos, tmp_path):
    tasks, learner = stream(photos, 3), make_learner(base)
    run_stream(learner, tasks[:2], tmp_path / "run")
    learner.update_classes(tasks[1].test)
    with torch.no_grad():
        next(learner.model.shared_parameters()).add_(1)
    counts, model = learner.head.counts.clone(), copy.deepcopy(learner.model.state_dict())
    with pytest.raises(
        ValueError, match="this learner differs from the one in .*task-002.* for example by update_classes"
    ):
        run_stream(learner, tasks, tmp_path / "run")
    assert torch.equal(learner.head.counts, counts)
    assert all(torch.equal(value, model[name]) for name, value in learner.model.state_dict().items())


def test_folder_of_another_learner_is_refused(base, photos, whole, tmp_path):
    output, learner = shutil.copytree(whole, tmp_path / "run"), frozen(base)
    with pytest.raises(ValueError, match="task 3 has the classes .* there, and None in the given stream"):
        run_stream(learner, stream(photos), output)
    learner.learn_task(stream(photos)[1].train)
    with pytest.raises(ValueError, match=r"its tasks are .* but this learner has learned \[\['two', 'zero'\]\]"):
        run_stream(learner, stream(photos, 3), output)


@pytest.mark.parametrize("strategy", ["frozen", "dulbe"])
def test_evaluating_tests_together_equals_evaluating_each_alone(base, photos, monkeypatch, strategy):
    """The store is queried once for all tests, and missing features are encoded test by test."""
    learner, tasks = make_learner(base, strategy=strategy, classifiers=("bridge", "lda")), stream(photos, 3)
    for task in tasks:
        learner.learn_task(task.train, task.class_names)
    tests = [(task.test, task.class_names) for task in tasks]
    queries, get = [], FeatureStore.get
    monkeypatch.setattr(FeatureStore, "get", lambda *given: queries.append(len(given[2])) or get(*given))
    learner.encoder.store = FeatureStore()
    alone = [learner.evaluate_images(*test) for test in tests[:2]]
    learner.evaluate_images(*tests[0])
    queries.clear()
    together = learner.evaluations(tests)
    alone.append(learner.evaluate_images(*tests[2]))
    assert queries[:2] == ([12, 4] if strategy == "frozen" else []), "the store has no features of the last test"
    queries.clear()
    for evaluations in (together, learner.evaluations(tests)):
        for actual, expected in zip(evaluations, alone, strict=True):
            assert (actual.images, actual.class_names) == (expected.images, expected.class_names)
            for kind in ("classifiers", "baselines"):
                left, right = getattr(actual, kind), getattr(expected, kind)
                assert left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
            for name in ("truth", "probability", "features"):
                assert torch.equal(getattr(actual, name), getattr(expected, name)), name
    assert queries == ([12] if strategy == "frozen" else [])


def test_strategy_knows_the_number_of_tasks_of_a_run_and_of_a_resumed_one(base, photos, tmp_path, monkeypatch):
    seen = []

    def threshold(self, task):
        seen.append((task.index, task.planned))
        return 0.9

    monkeypatch.setattr(InfLora, "threshold", threshold)
    learner = make_learner(base, strategy="inflora")
    run_stream(learner, stream(photos)[:1], tmp_path / "run")
    assert seen == [(0, 1)] and learner.state.planned is None
    run_stream(make_learner(base, strategy="inflora"), stream(photos), tmp_path / "run")
    assert seen == [(0, 1), (1, 2)]


def test_tracker_receives_the_accuracies_after_each_task(base, photos, tmp_path, monkeypatch):
    logged = []
    tracker = SimpleNamespace(
        init_trackers=lambda _: None, log=lambda values, step: logged.append((values, step)), end_training=lambda: None
    )
    monkeypatch.setattr("dulbe_peft.streams.run.Accelerator", lambda **_: tracker)
    monkeypatch.setattr("dulbe_peft.training.preparing.filter_trackers", lambda names, *_: [names])
    learner = make_learner(base, classifiers=("bridge", "lda"), log_with="tensorboard")
    results = run_stream(learner, stream(photos), tmp_path / "run").contents()
    accuracies = [(values, step) for values, step in logged if "accuracy/lda" in values]
    assert [values["accuracy/lda"] for values, _ in accuracies] == results["classifiers"]["lda"]["overall"]
    assert [set(values) for values, _ in accuracies] == [{"accuracy/bridge", "accuracy/lda"}] * 2
    steps = [step for _, step in logged]
    assert steps == sorted(steps) and steps[-1] == learner.state.step
