"""Test that photographs that were learned are not tested on, and that corrected labels of tests are used."""

import csv
import json
import shutil

import pytest
from small_runs import call

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.utils.files import read_csv


@pytest.fixture(scope="module")
def photos(digit_folders):
    """Return a folder of four digits with eight images each."""
    return digit_folders(4, 8, 1) / "train"


@pytest.fixture(scope="module")
def out(photos, tiny_model, tmp_path_factory):
    """Return the folder of a run that tests on a quarter of the photographs."""
    out = tmp_path_factory.mktemp("run") / "out"
    words = ["--model", tiny_model, "--classifiers", "lda", "--test-fraction", "0.25"]
    assert call("run", "--data", photos, *words, "--output", out) == 0
    return out


def figures(capsys, *words):
    assert call("evaluate", *words) == 0
    said = capsys.readouterr()
    return json.loads(said.out), said.err


def test_evaluate_tests_only_on_images_that_were_not_learned(photos, out, tmp_path, capsys):
    results = json.loads((out / "results.json").read_text())
    capsys.readouterr()
    for path in (out / "task-001", out):
        found, said = figures(capsys, path, "--data", photos)
        tested = len(read_csv(out / "predictions.csv")) - 1
        assert found["num_images"] == tested and found["learned_images_left_out"] == 32 - tested
        assert found["accuracy"] == results["classifiers"]["lda"]["last_accuracy"]
        assert f"left out, because they were learned: {32 - tested} images, such as {photos}" in said
    found, said = figures(capsys, out, "--data", photos, "--with-learned")
    assert found["num_images"] == 32 and found["learned_images_left_out"] == 0 and "left out" not in said
    learned = tmp_path / "learned"
    for file in photos.rglob("*.png"):
        if file.read_bytes() and str(file) not in {row[0] for row in read_csv(out / "predictions.csv")}:
            (learned / file.parent.name).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, learned / file.parent.name)
    assert call("evaluate", out, "--data", learned) == 2
    assert f"has learned all images of '{learned}': give others, or --with-learned" in capsys.readouterr().err
    for file in learned.rglob("*.png"):  # as a program does that writes a keyword into the file
        file.write_bytes(file.read_bytes() + b"keyword")
    assert call("evaluate", out, "--data", learned) == 2, "the features in the store are the same"


def write_labels(path, photos, corrected, renamed):
    """Write a table of all photographs, with the label `renamed` for those in `corrected`."""
    with path.open("w", newline="") as file:
        files = sorted(photos.rglob("*.png"))
        rows = [[file, renamed if str(file) in corrected else file.parent.name] for file in files]
        csv.writer(file).writerows([["path", "label"], *rows])


@pytest.mark.slow
@pytest.mark.parametrize("held_out", [True, False], ids=["held out again", "without a word on tests"])
def test_corrected_labels_of_tests_are_used_and_counted(photos, out, tmp_path, capsys, held_out):
    labels = tmp_path / "fixed.csv"
    tests = read_csv(out / "predictions.csv")[1:]
    corrected = [row[0] for row in tests if row[1] == "one"]
    write_labels(labels, photos, corrected, "two")
    capsys.readouterr()
    more = ["--test-fraction", "0.25"] if held_out else []
    assert call("learn", out, "--labels", labels, "--output", tmp_path / "new", *more) == 0
    said = capsys.readouterr().out
    assert f"{len(corrected)} test images moved to another class, such as {corrected[0]} from 'one' to 'two'" in said
    expected = {row[0]: "two" if row[0] in corrected else row[1] for row in tests}
    assert {row[0]: row[1] for row in read_csv(tmp_path / "new" / "predictions.csv")[1:]} == expected
    right = [row[2] == expected[row[0]] for row in read_csv(tmp_path / "new" / "predictions.csv")[1:]]
    measured = json.loads((tmp_path / "new" / "results.json").read_text())["classifiers"]["lda"]["last_accuracy"]
    assert measured == pytest.approx(sum(right) / len(right), abs=1e-12)
    loaded = [ClassIncrementalLearner.from_pretrained(folder) for folder in (out, tmp_path / "new")]
    assert loaded[0].state.known.learned == loaded[1].state.known.learned, "no test was learned"
    assert call("learn", tmp_path / "new", "--labels", labels, "--output", tmp_path / "third", *more) == 2
    assert "has nothing to learn" in capsys.readouterr().err, "the correction is kept in the learner"


@pytest.mark.slow
def test_test_that_gets_a_new_class_is_no_longer_a_test_of_the_old_one(photos, out, tmp_path, capsys):
    labels = tmp_path / "fixed.csv"
    tests = read_csv(out / "predictions.csv")[1:]
    corrected = [row[0] for row in tests if row[1] == "one"]
    write_labels(labels, photos, corrected, "lowercase l")
    assert call("learn", out, "--labels", labels, "--output", tmp_path / "new") == 0
    known = ClassIncrementalLearner.from_pretrained(tmp_path / "new").state.known
    assert "one" not in known.tested and len(known.learned["lowercase l"]) == len(corrected)
    assert not {*known.class_of()} & {*known.class_of_tested()}
