"""Careless or hostile users and programs: nothing is lost, and errors say what is wrong."""

import copy
import multiprocessing
import os
import sys
import unicodedata
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from lives import content, differences, everything, images_of, learned, tiny_base, tiny_learner
from PIL import Image
from small_runs import opened

from dulbe_peft import CheckpointError, ClassIncrementalLearner
from dulbe_peft.data.folders import ImageFolder
from dulbe_peft.data.images import labelled_images
from dulbe_peft.data.names import check_class_names
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.commands.paths import claim
from dulbe_peft.streams.tasks import class_incremental_tasks
from dulbe_peft.utils.files import read_csv, read_lines

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:the images that calibrate")


@pytest.mark.parametrize(
    "name, message",
    [
        ("data.csv", "is a file that the command reads"),
        ("link.csv", "is a file that the command reads"),
        ("config.json", "choose another name"),
        ("run/sources.json", "choose another name"),
        ("run/predictions.csv", "choose another name"),
        ("run/task-001/new.json", "of kind 'task of a run'"),
        ("data.csv/x.csv", "the folder .*data.csv does not exist"),
    ],
)
def test_output_that_would_overwrite_an_input_or_kept_file_is_refused(run_copy, tmp_path, name, message):
    (tmp_path / "data.csv").write_bytes(b"images")
    (tmp_path / "link.csv").symlink_to("data.csv")
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / name
    with pytest.raises((ValueError, OSError), match=message):
        claim(("--x", str(path), path.suffix), reads=[str(tmp_path / "data.csv")])
    for path in ("-", str(tmp_path / "answers")):
        with pytest.raises(ValueError, match="--csv and --json are both"):
            claim(("--csv", path, ".csv"), ("--json", path, ".json"))
    claim(("--csv", str(tmp_path / "predictions.csv"), ".csv"), ("--json", None, ".json"))


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_too_little_memory_is_reported_in_one_line(finished_run, tmp_path, monkeypatch, capsys, error):
    Image.new("RGB", (9, 9)).save(tmp_path / "x.png")
    monkeypatch.setattr("dulbe_peft.checkpoints.restoring.loaded_state", lambda *_: (_ for _ in ()).throw(error))
    assert main(["predict", str(finished_run), str(tmp_path / "x.png")]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("dulbe-peft: there is too little memory, close other programs: ")
    assert printed.count("\n") == 1


def test_too_few_allowed_open_files_are_an_error(monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (12, 12))
    with pytest.raises(OSError, match="num_workers=1 needs 72 open files, but the system allows 12: use fewer"):
        tiny_learner(num_workers=1).learn_task(images_of(0, 1), ["a", "b"])


@pytest.mark.skipif(sys.platform != "linux", reason="other systems never fork")
def test_workers_read_a_data_set_that_cannot_be_pickled_where_python_does_not_fork(monkeypatch):
    """Python 3.14 starts processes with a server, to which it sends what they need."""
    server = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", server)

    class Local(list):
        pass

    learner = tiny_learner(num_workers=1)
    learner.learn_task(Local(images_of(0, 1)), ["a", "b"])
    assert learner.predict(images_of(0)[0][0]) == "a"


def test_byte_order_mark_is_not_part_of_a_name(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("cat\n\ndog \n", encoding="utf-8-sig")
    assert read_lines(path) == ["cat", "dog"]
    path.write_text("cat", encoding="utf-16")
    for read, words in ((read_lines, "is not a text file in UTF-8"), (read_csv, "is not a CSV file in UTF-8")):
        with pytest.raises(ValueError, match=rf"names\.txt {words}"):
            read(path)


class Calling(list):
    """Images that call a learner while they are read."""

    def __getitem__(self, index):
        self.call()
        return super().__getitem__(index)


@pytest.mark.parametrize("outer", ["learn_task", "update_classes"])
@pytest.mark.parametrize(
    ("inner", "value"), [("predict", images_of(0)[0][0]), ("forget_class", "a0"), ("__deepcopy__", {})]
)
def test_data_set_that_calls_its_learner_is_refused_and_changes_nothing(outer, inner, value):
    learner = learned(tiny_learner(pixel_cache_mb=0), 1)
    before, images = everything(learner), Calling(images_of(0, 1))
    images.call = lambda: getattr(learner, inner)(value)
    with pytest.raises(RuntimeError, match=f"{inner}.* is called inside {outer}"):
        getattr(learner, outer)(images, ["new", "other"] if outer == "learn_task" else ["a0", "b0"])
    assert not differences(everything(learner), before)


@pytest.mark.parametrize("take_out", ["unload", "merge_and_unload"])
def test_learner_without_its_adapter_neither_predicts_nor_saves(tmp_path, take_out):
    learner = learned(tiny_learner(), 1)
    learner.save_pretrained(tmp_path / "saved")
    before = content(tmp_path)
    getattr(learner.model, take_out)()
    for call in (
        lambda: learner.predict(images_of(0)[0][0]),
        lambda: learner.evaluate(images_of(0, 1), ["a0", "b0"]),
        lambda: learner.save_pretrained(tmp_path / "saved"),
        lambda: learner.learn_task(images_of(0, 1), ["x", "y"]),
    ):
        with pytest.raises(ValueError, match="have no adapter any more"):
            call()
    assert content(tmp_path) == before


def test_learner_with_another_active_adapter_does_not_predict():
    learner = learned(tiny_learner(), 1)
    images = [image for image, _ in images_of(0, 1)]
    answers = learner.predict(images)
    learner.model.add_adapter("x", copy.deepcopy(learner.model.peft_config["default"]))
    learner.model.set_adapter("x")
    with pytest.raises(ValueError, match=r"active adapters are \['x'\].*set_adapter\('default'\)"):
        learner.predict(images)
    learner.model.set_adapter("default")
    assert learner.predict(images) == answers


def test_weight_that_becomes_nan_in_the_last_step_is_an_error(monkeypatch):
    def after_step(self, task):
        next(p for p in task.adapter.parameters() if p.requires_grad).fill_(float("nan"))

    learner = tiny_learner(strategy="lora")
    monkeypatch.setattr(type(learner.strategy), "after_step", after_step)
    with pytest.raises(ValueError, match="infinite after training: lower the learning_rate"):
        learner.learn_task(images_of(0, 1), ["a", "b"])
    assert not learner.tasks


def test_folder_names_in_another_unicode_form_are_the_same_classes(tmp_path):
    one, other = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    for split, name in (("train", one), ("test", other)):
        for folder in (name, "tea"):
            (tmp_path / split / folder).mkdir(parents=True)
            for number in range(2):
                picture = Image.new("RGB", (16, 16), (90 * number, 200 * (folder == "tea"), 40))
                picture.save(tmp_path / split / folder / f"{number}.png")
    train, test, data = opened(tmp_path)
    assert data.class_names == test.class_names == (one, "tea")
    orders = {"class_order": ["tea", other], "first_tasks": [[other, "tea"]]}
    (task,) = class_incremental_tasks(train, test, increment=2, **orders)
    learner = tiny_learner()
    learner.learn_task(task.train, task.class_names)
    copy_of_it = ImageFolder(tmp_path, "test")
    assert learner.class_names == copy_of_it.class_names == (one, "tea") and other in copy_of_it.item_name(0)
    assert learner.evaluate(copy_of_it) == learner.evaluate(task.test) == learner.evaluate(copy_of_it, [one, "tea"])
    learner.update_classes(labelled_images(copy_of_it).select([other]))
    assert learner.state.updates[-1].images == {one: 2}
    (tmp_path / "names.txt").write_text(f"{one}\tcoffee\ntea\tgreen tea\n", encoding="utf-8")
    assert copy_of_it.renamed(tmp_path / "names.txt").class_names == ("coffee", "green tea")
    learner.forget_class(other)
    assert learner.class_names == ("tea",)
    with pytest.raises(ValueError, match="names must differ"):
        check_class_names([one, other])


TASK = images_of(0, 1, 0, 1, seed=1), ["a1", "b1"]
MORE = images_of(0, seed=3), ["a0"]
PROBES = [image for image, _ in images_of(0, 1, seed=99)]


@pytest.fixture(scope="module")
def beginning():
    return learned(tiny_learner(), 1)


@pytest.fixture
def learner(beginning):
    return copy.deepcopy(beginning)


def live(learner):
    """Let the learner learn, update, evaluate and predict; return its results."""
    learner.learn_task(*TASK)
    learner.update_classes(*MORE)
    figures = learner.evaluate(TASK[0], TASK[1])
    return figures, learner.predict(PROBES, top_k=4, return_scores=True)


@pytest.fixture(scope="module")
def usual(beginning):
    """Return the results of `live` without global settings, and the whole state then and after another task."""
    learner = copy.deepcopy(beginning)
    results, state = live(learner), everything(learner)
    learner.learn_task(images_of(0, seed=5), ["c1"])
    return results, state, everything(learner)


@contextmanager
def switched(switch, on, off):
    switch(on)
    try:
        yield
    finally:
        switch(off)


SETTINGS = {
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "float64": partial(switched, torch.set_default_dtype, torch.float64, torch.float32),
    "another default device": partial(torch.device, "meta"),
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "deterministic": partial(switched, torch.use_deterministic_algorithms, True, False),
}


@pytest.mark.plain("float64", "autocast")
@pytest.mark.parametrize("name", SETTINGS)
def test_global_torch_settings_change_no_result(usual, learner, name, tmp_path):
    expected, state, later = usual
    with SETTINGS[name]():
        assert live(learner) == expected
        learner.save_pretrained(tmp_path / "saved")
        base, machine = copy.deepcopy(tiny_base()[0]), {"device": "cpu", "progress": False}
        again = ClassIncrementalLearner.from_pretrained(tmp_path / "saved", base, machine=machine)
        assert again.predict(PROBES, top_k=4, return_scores=True) == expected[1]
    assert not differences(everything(learner), state)
    learner.learn_task(images_of(0, seed=5), ["c1"])
    assert not differences(everything(learner), later)


def test_training_mode_is_left_on_and_does_not_change_results(usual, learner):
    learner.model.train()
    assert live(learner) == usual[0]
    assert all(module.training for module in learner.model.modules())


@pytest.mark.parametrize(("flag", "words"), [(True, "requires a gradient"), (False, "requires no gradient")])
def test_wrong_choice_of_trainable_parameters_is_an_error(learner, flag, words):
    """A trained base weight could not be restored, and the saved learner would not fit its base model."""
    learner.model.requires_grad_(flag)
    before = everything(learner)
    with pytest.raises(ValueError, match=words):
        learner.learn_task(*TASK)
    assert not differences(everything(learner), before)
    learner.model.requires_grad_(False)
    learner.model.set_adapter("default")
    live(learner)


def test_interrupted_learning_leaves_the_learner_unchanged(learner, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = everything(learner)
    with monkeypatch.context() as context, pytest.raises(KeyboardInterrupt):
        context.setattr("dulbe_peft.training.task_trainer.learn_task", interrupt)
        learner.learn_task(*TASK)
    assert not differences(everything(learner), before)
    live(learner)


@pytest.mark.parametrize("place", ["", ".", ".."])
def test_saving_into_the_current_folder_is_refused(learner, tmp_path, monkeypatch, place):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(FileExistsError, match="current folder"):
        learner.save_pretrained(place)
    assert os.getcwd() == str(tmp_path / "here") and not list((tmp_path / "here").iterdir())


def test_pipe_instead_of_a_file_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "manifest.json")
    with pytest.raises(CheckpointError, match=r"manifest\.json is not a regular file"):
        ClassIncrementalLearner.from_pretrained(tmp_path)
