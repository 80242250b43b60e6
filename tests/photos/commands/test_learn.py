"""Test the commands that change a saved learner: `learn` with new and known classes, and `forget`."""

import json
import re
import shutil
from unittest.mock import Mock

import pytest
import torch
import write_saved
from failing_files import edited
from lives import content, differences, everything, images_of, tiny_learner
from small_runs import MACHINE, call, learner_of, some
from taught import assert_equal_states, snapshot

from dulbe_peft import ClassIncrementalLearner, class_incremental_tasks
from dulbe_peft.data.digits import DIGITS
from dulbe_peft.data.images import labelled_images
from dulbe_peft.data.names import similar_names
from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.loading import load_dual_encoder, unit_image_embeds
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.report import write_report
from dulbe_peft.streams import progress
from dulbe_peft.subspaces.inputs import collect_statistics
from dulbe_peft.subspaces.occupation import OccupationStatistics

FROZEN = ["--strategy", "frozen", "--classifiers", "bridge,prototype", *MACHINE]


@pytest.fixture(scope="module")
def photos(digit_folders):
    """Return a folder of the handwritten digits zero to five, with four training and two test images of each."""
    return digit_folders(6, 4, 2)


@pytest.fixture(scope="module")
def june(photos, tiny_model, tmp_path_factory):
    """Run the digits zero to three, without the last image of each; return the folder of the run and its data."""
    root = tmp_path_factory.mktemp("june")
    data = some(photos, root / "photos", DIGITS[:4], 0, 3)
    command = ["run", "--model", str(tiny_model), "--data", str(data), "--output", str(root / "run")]
    assert main([*command, "--increment", "2", *FROZEN]) == 0
    return root


def results_of(folder):
    return json.loads((folder / "results.json").read_text())


def learn(learner, data, output, *flags):
    return call("learn", learner, "--data", data, "--output", output, *flags)


def test_learn_adds_new_classes_and_images_of_known_ones(photos, june, tmp_path, capsys, monkeypatch):
    data = some(photos, tmp_path / "july", ["five", "one", "four"], 3)
    some(photos, data, ["five", "four"])
    before = content(june)
    with monkeypatch.context() as patch:
        known_tasks = Mock(side_effect=progress.known_tasks)
        patch.setattr(progress, "known_tasks", known_tasks)
        assert learn(june / "run", data, tmp_path / "run") == 0
    assert known_tasks.call_count == 1, "the record of june's tasks is read once"
    printed = capsys.readouterr().out
    assert "known classes get 1 further image, without training: one (1)" in printed
    assert "fewer than" not in printed, "july has one image of a class of which june has more"
    assert "task 3/3: 6 classes" in printed and "written: " in printed
    assert content(june) == before, "the learner is not changed"
    new, old = results_of(tmp_path / "run"), results_of(june / "run")
    assert new["class_names"] == [["one", "three"], ["two", "zero"], ["five", "four"]] and new["known_tasks"] == 2
    assert new["head"]["matrix"][:2] == old["head"]["matrix"] and None not in new["head"]["matrix"][2]
    assert [path.name for path in sorted((tmp_path / "run").glob("task-*"))] == ["task-003"]
    july = ClassIncrementalLearner.from_pretrained(tmp_path / "run")
    assert july.head.counts.tolist() == [4, 3, 3, 3, 4, 4]

    august = some(photos, tmp_path / "august", ["two"], 3)
    assert learn(tmp_path / "run", august, tmp_path / "august-run") == 0, "sources are passed on from run to run"
    third = results_of(tmp_path / "august-run")
    before, after = (100 * figures["head"]["overall"][2] for figures in (new, third))
    assert f"with the further images: bridge {before:.2f} % before, {after:.2f} % after" in capsys.readouterr().out
    assert third["head"]["matrix"][:2] == old["head"]["matrix"] and None not in third["head"]["matrix"][2]
    assert third["class_names"] == new["class_names"]
    page = write_report(tmp_path / "august-run").read_text(encoding="utf-8")
    for task, words in ((2, ""), (3, " of known classes: two (1)")):
        assert f"after task {task}, 1 more image{words}" in page
    assert call("forget", tmp_path / "august-run", "two", "--output", tmp_path / "less") == 0
    more = some(photos, tmp_path / "more", ["one"], 3)
    assert learn(tmp_path / "less", more, tmp_path / "last", "--again") == 0
    page = write_report(tmp_path / "last").read_text(encoding="utf-8")
    assert "after task 3, a class of task 2 was forgotten" in page
    assert "two" not in page.replace("compare the two reports", "")
    assert learn(tmp_path / "less", june / "photos", tmp_path / "back") == 0
    assert "left out, because they would count twice: 9 learned before" in capsys.readouterr().out
    back = ClassIncrementalLearner.from_pretrained(tmp_path / "back")
    counts = dict(zip(back.class_names, back.head.counts.tolist()))
    assert counts == {"one": 4, "three": 3, "zero": 3, "five": 4, "four": 4, "two": 3}


def test_different_spelling_of_a_known_class_is_refused(photos, june, tmp_path, capsys):
    data = some(photos, tmp_path / "july", ["five"], 3, called={"five": "One"})
    assert learn(june / "run", data, tmp_path / "out") == 2
    assert "'One', a class that was already seen with the spelling 'one': use that spelling" in capsys.readouterr().err


def test_copies_are_counted_once_in_a_run(photos, tiny_model, tmp_path, capsys):
    """One file is in a class twice, and another one is in two classes."""
    data = some(photos, tmp_path / "data", ["one", "two"], 0, 3)
    train = data / "train"
    first, other = sorted((train / "one").iterdir())[0], sorted((train / "two").iterdir())[0]
    shutil.copy(first, train / "one" / "copy.png"), shutil.copy(other, train / "one" / "z.png")
    command = ["run", "--model", str(tiny_model), "--data", str(data), "--output", str(tmp_path / "run"), *FROZEN]
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert "would count twice: 1 in the data twice, such as" in printed
    assert "1 in two classes, of which the first" in printed
    assert ClassIncrementalLearner.from_pretrained(tmp_path / "run").state.image_counts() == {"one": 4, "two": 2}


def test_learn_equals_learning_by_hand(photos, june, tmp_path):
    data = some(photos, tmp_path / "july", ["five", "four"])
    images = load_data(some(photos, data, ["one"], 3))
    assert learn(june / "run", data, tmp_path / "run", "--increment", "1") == 0
    learner = ClassIncrementalLearner.from_pretrained(june / "run")
    learner.update_classes(images.select(["one"]))
    for name in ("five", "four"):
        learner.learn_task(images.select([name]))
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "run")
    assert loaded.tasks == learner.tasks and len(loaded.tasks) == 4
    for name, classifier in learner.classifiers.items():
        assert_equal_states(loaded.classifiers[name].state_dict(), classifier.state_dict())


def test_missing_test_images_are_reported_and_their_tasks_unmeasured(photos, june, tmp_path, capsys):
    root = shutil.copytree(june, tmp_path / "june")
    for task, data in enumerate((tmp_path / "nowhere", root / "photos")):
        edited(root / "run" / "sources.json", "tasks", task, "data", str(data))
    (root / "photos" / "test" / "two" / "5.png").unlink()
    assert learn(root / "run", some(photos, tmp_path / "july", ["five", "four"]), tmp_path / "run") == 0
    captured = capsys.readouterr()
    assert "6 classes, tested on the images of task 3 only, " in captured.out
    assert f"the test images of task 1 are not used again: {tmp_path / 'nowhere'} does not exist" in captured.err
    assert "task 2 are not used again: the images in" in captured.err
    new, old = results_of(tmp_path / "run"), results_of(root / "run")
    assert new["head"]["matrix"][2][:2] == [None, None] and new["head"]["matrix"][2][2] is not None
    assert new["head"]["matrix"][:2] == old["head"]["matrix"]
    assert learn(root / "run", some(photos, tmp_path / "more", ["two"], 3), tmp_path / "new") == 0
    assert "with the further images" not in capsys.readouterr().out
    assert results_of(tmp_path / "new")["head"]["last_accuracy"] is None


def test_saved_folder_learns_and_no_update_skips_known_classes(photos, june, tmp_path, capsys):
    ClassIncrementalLearner.from_pretrained(june / "run").save_pretrained(tmp_path / "saved")
    data = some(photos, tmp_path / "july", ["five", "one"])
    assert learn(tmp_path / "saved", data, tmp_path / "run", "--no-update") == 0
    captured = capsys.readouterr()
    assert "left out: images of known classes (one)" in captured.out
    assert "task 1 are not used again: the run did not record where they came from" in captured.err
    assert results_of(tmp_path / "run")["head"]["matrix"][:2] == [[None], [None, None]]
    assert ClassIncrementalLearner.from_pretrained(tmp_path / "run").head.counts.tolist() == [3, 3, 3, 3, 4]
    assert learn(tmp_path / "run", data, tmp_path / "again", "--no-update") == 2
    assert "has nothing to learn" in capsys.readouterr().err and not (tmp_path / "again").exists()


def test_class_names_that_contradict_the_dataset_are_refused():
    class Named(list):
        class_names = ("one", "zero")

    with pytest.raises(ValueError, match="label 0 is 'zero' in class_names but 'one' in the dataset's class names"):
        tiny_learner().learn_task(Named(images_of(0, 1)), ["zero", "one"])


@pytest.mark.slow
def test_classes_added_to_the_data_of_a_run_become_new_tasks(photos, june, tiny_model, tmp_path, capsys):
    """The class five sorts before one, but comes after it in the run."""
    root = shutil.copytree(june, tmp_path / "june")
    command = [
        "run",
        "--model",
        str(tiny_model),
        "--data",
        str(root / "photos"),
        "--output",
        str(root / "run"),
        *FROZEN,
    ]
    for name in ("five", "four"):
        some(photos, root / "photos", [name])
        assert main([*command, "--increment", "2"]) == 0
        assert "resuming after task-00" in capsys.readouterr().out
    tasks = [["one", "three"], ["two", "zero"], ["five"], ["four"]]
    assert results_of(root / "run")["class_names"] == tasks
    for flags, words in (
        (["--increment", "3"], "task 1 has the classes ['one', 'three'] there"),
        (["--increment", "2", "--order-seed", "1"], "must begin with the finished tasks"),
    ):
        assert main([*command, *flags]) == 2 and words in capsys.readouterr().err
    for name in ("task-003", "task-004"):
        shutil.rmtree(root / "run" / name)
    assert main(command) == 0, "without --increment, one task has all new classes"
    assert results_of(root / "run")["class_names"] == [*tasks[:2], ["five", "four"]]


def test_outputs_inside_a_learner_or_the_data_are_refused(june, photos, tiny_model, tmp_path, capsys):
    before = content(june)
    july = some(photos, tmp_path / "july", ["four"], 0)
    first, second, model = str(june / "run" / "task-001"), str(june / "run" / "task-002"), str(tiny_model)
    for command in (
        ["forget", second, "one", "--output", first],
        ["forget", str(june / "run"), "one", "--output", second],
        ["learn", second, "--data", str(july), "--output", first],
        *(["learn", str(june / "run"), "--data", str(july), "--output", str(june / w)] for w in ("run", "run/new")),
        ["run", "--model", model, "--data", str(july), "--output", str(july / "train")],
        ["run", "--model", model, "--data", str(july), "--output", first, *FROZEN],
    ):
        assert main(command) == 2
        assert re.search("saved learner|'task of a run'|never changed: choose another folder", capsys.readouterr().err)
    assert content(june) == before
    shutil.copytree(second, tmp_path / "copy")  # folders beside a copy are not part of a run
    assert main(["forget", str(tmp_path / "copy"), "one", "--output", str(tmp_path / "without")]) == 0


@pytest.fixture(scope="module")
def base(tiny_model):
    return load_dual_encoder(tiny_model)


@pytest.fixture(scope="module")
def digits():
    """Return handwritten digits: six training images of each class, then six further ones."""
    return write_saved.digits(0, 6), write_saved.digits(6, 12)


def taught(base, data, strategy="frozen", classifiers=("bridge", "prototype", "lda")):
    targets = ["visual_projection"] if strategy == "bofa" else ["k_proj", "v_proj"]
    learner = learner_of(base, strategy, classifiers, {"target_modules": targets}, prompt_template="the digit {}.")
    for task in class_incremental_tasks(data, increment=2)[:2]:
        learner.learn_task(task.train)
    return learner


@pytest.mark.plain("bofa")
@pytest.mark.parametrize("strategy", ["dulbe", "loda", "bofa"])
def test_update_adds_images_to_the_input_sums_and_keeps_the_model(base, digits, strategy):
    first, more = digits
    learner = taught(base, first, strategy=strategy)
    model, old = snapshot(learner.model), learner.memory
    before = {name: value.clone() for name, value in old.items()}
    images = labelled_images(more).select(("one", "two"))
    learner.update_classes(images)
    rows = [images[i]["image"].convert("RGB") for i in range(len(images))]
    pixels = learner.processor.image_processor(images=rows, return_tensors="pt")["pixel_values"]
    inputs, forward = OccupationStatistics(), lambda _, batch: unit_image_embeds(learner.clip, batch)
    collect_statistics(learner.model, [pixels], forward, into=inputs)
    assert set(learner.memory) == set(before) == set(inputs)
    for name, matrix in learner.memory.items():
        torch.testing.assert_close(matrix, before[name] + inputs[name], rtol=1e-4, atol=1e-3)
        assert torch.equal(old[name], before[name]), "the old sums are not changed in place"
    assert_equal_states(learner.model.state_dict(), model)
    learner.learn_task(class_incremental_tasks(first, increment=2)[2].train)


def test_labels_are_resolved_by_the_class_names_of_the_dataset(base, digits):
    learner = taught(base, digits[0], classifiers="prototype")
    learner.update_classes(digits[1].at(range(18, 24)))  # images of "three", which has label 3 of ten
    assert learner.classifier.counts.tolist() == [6, 6, 6, 12]
    pairs = [(digits[1][0]["image"], 1)] * 2
    learner.update_classes(pairs, ("three", "zero"))
    assert learner.classifier.counts.tolist() == [8, 6, 6, 12]
    learner.update_classes(pairs)  # without names, labels number all learned classes in their order
    assert learner.classifier.counts.tolist() == [8, 8, 6, 12]


@pytest.mark.slow
def test_task_that_lost_all_its_classes_is_still_counted(base, digits, tmp_path):
    learner = taught(base, digits[0], strategy="dulbe")
    for name in ("zero", "one"):
        learner.forget_class(name)
    learner.save_pretrained(tmp_path / "saved")
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "saved")
    for either in (loaded, learner):
        either.learn_task(class_incremental_tasks(digits[0], increment=2)[2].train)
    assert set(differences(everything(loaded), everything(learner))) <= {"learner"}
    assert loaded.tasks == [(), ("two", "three"), ("four", "five")]


@pytest.mark.slow
@pytest.mark.parametrize("again", [pytest.param(False, marks=pytest.mark.slow), True])
def test_photograph_in_another_folder_than_before_is_moved(digit_folders, tiny_model, tmp_path, capsys, again):
    """The round of the pages: photographs are learned, some are found to be in the wrong folder, and learned again."""
    june = shutil.copytree(digit_folders(3, 6, 0), tmp_path / "june")
    first = ["run", "--data", str(june), "--model", str(tiny_model), "--classifiers", "bayes:features=20,lda"]
    assert main([*first, "--output", str(tmp_path / "out"), "--device", "cpu", "--no-progress"]) == 0
    for number, file in enumerate(sorted((june / "train" / "zero").iterdir())[:2]):
        file.rename(june / "train" / "one" / f"moved-{number}.png")
    for file in sorted((june / "train" / "two").iterdir()):
        file.rename(june / "train" / "zero" / f"two-{file.name}")
    capsys.readouterr()
    words = [
        "learn",
        tmp_path / "out",
        "--data",
        june,
        "--output",
        tmp_path / "july",
        "--device",
        "cpu",
        "--no-progress",
    ]
    assert main([*map(str, words), *["--again"] * again]) == 0
    printed = capsys.readouterr().out
    assert "8 images moved to another class, such as " in printed and "the class 'two' has no image left" in printed
    learner = ClassIncrementalLearner.from_pretrained(tmp_path / "july")
    counts = learner.state.image_counts()
    assert learner.class_names == ("one", "zero") and (counts == {"zero": 10, "one": 8} or again)
    assert set(learner.state.known.class_of().values()) == {"zero", "one"}
    assert len({*learner.state.known.class_of()}) == 18


@pytest.mark.slow
def test_photographs_of_another_known_class_stay_with_no_update(digit_folders, tiny_model, tmp_path, capsys):
    june = shutil.copytree(digit_folders(3, 6, 0), tmp_path / "june")
    shutil.move(june / "train" / "two", tmp_path / "two")
    first = ["run", "--data", june, "--model", tiny_model, "--classifiers", "bayes:features=20", *MACHINE]
    assert main([*map(str, first), "--output", str(tmp_path / "out")]) == 0
    shutil.move(tmp_path / "two", june / "train" / "two")
    one, other = sorted((june / "train" / "zero").iterdir())[:2]
    one.rename(june / "train" / "one" / "moved.png")  # a known class
    other.rename(june / "train" / "two" / "moved.png")  # a new class
    assert learn(tmp_path / "out", june, tmp_path / "july", "--no-update") == 0
    printed = capsys.readouterr().out
    assert "--no-update: 1 image left in the class learned before" in printed and "1 image moved to another" in printed
    counts = ClassIncrementalLearner.from_pretrained(tmp_path / "july").state.image_counts()
    assert counts == {"zero": 5, "one": 6, "two": 7}


@pytest.mark.slow
def test_names_of_new_classes_are_printed_with_the_known_one_they_resemble(
    digit_folders, tiny_model, tmp_path, capsys
):
    photos = digit_folders(3, 4, 0)
    june = tmp_path / "june"
    for name in ("one", "two"):
        shutil.copytree(photos / "train" / name, june / "train" / name)
    shutil.copytree(photos / "train" / "zero", tmp_path / "july" / "train" / "ones")
    run = ["run", "--data", june, "--model", tiny_model, "--classifiers", "lda", "--output", tmp_path / "out"]
    assert call(*run) == 0
    capsys.readouterr()
    assert learn(tmp_path / "out", tmp_path / "july", tmp_path / "more") == 0
    printed = capsys.readouterr().out
    assert (
        "new: ones" in printed and "'ones' is a new class, although 'one' is known: if they are one, rename" in printed
    )


def test_similar_names_are_within_two_edits_or_a_plural():
    known = ("polar bear", "saxophone", "fox", "cat", "box")
    assert similar_names(["polar bears", "saxophon", "boxes", "dog", "bat", "ox"], known) == [
        ("polar bears", "polar bear"),
        ("saxophon", "saxophone"),
        ("boxes", "box"),
    ]
    assert not similar_names(["cat", "Polar Bear"], known)
