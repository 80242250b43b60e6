"""Labels from tables: path and label, and exiftool's keywords."""

import csv
import os
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from dulbe_peft.data.digits import DIGITS
from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.data.splits import open_split, open_stream_data

MACHINE = ["--device", "cpu", "--no-progress"]
EXIFTOOL = shutil.which("exiftool")


def table(path, *rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return path


@pytest.fixture
def heap(digit_folders, tmp_path):
    """Photographs in one folder, whose names say nothing, and the digit of each."""
    labels = {}
    (tmp_path / "heap").mkdir()
    for split in ("train", "test"):
        for name in DIGITS[:3]:
            for file in sorted((digit_folders(3, 4, 2) / split / name).iterdir()):
                target = tmp_path / "heap" / f"IMG_{len(labels):03d}.jpg"
                Image.open(file).convert("RGB").resize((64, 64)).save(target, quality=95)
                labels[f"heap/{target.name}"] = name, split
    return labels


def test_a_table_names_images_labels_and_splits(heap, tmp_path, monkeypatch):
    rows = [[path, *facts] for path, facts in heap.items()]
    file = table(tmp_path / "labels.csv", ["path", "label", "split"], *rows, ["heap/none.jpg", "two", "val"])
    monkeypatch.chdir("/")  # paths begin where the table lies
    train, test, found = open_stream_data(file)
    for part, split in ((train, "train"), (test, "test")):
        names = {part.item_name(i): part.class_names[part.labels[i]] for i in range(len(part))}
        assert names == {str(tmp_path / path): label for path, (label, where) in heap.items() if where == split}
    assert [why for _, why in found.left_out] == ["the split 'val', neither learned from nor tested on"]
    assert np.asarray(train[0]["image"]).shape == (64, 64, 3)
    assert open_split(file, "test").class_names == test.class_names
    alone = table(tmp_path / "alone.csv", ["label", "path"], *([label, path] for path, (label, _) in heap.items()))
    train, test, _ = open_stream_data(alone, test_fraction=0.3)
    assert len(train) + len(test) == len(heap) and len(test)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([["file", "class"]], "has the columns .*expected path,label and perhaps split, or SourceFile,Subject"),
        ([["path", "class"], ["a.jpg", "x"]], "has guesses, the column 'class', .* and call the column 'label'"),
        ([["path", "label"], ["a.jpg", ""]], "line 2 of .* has no label"),
        ([["path", "label", "split"], ["a.jpg", "x", ""]], "line 2 of .* has no split"),
        (
            [["path", "label"], ["a.jpg", "x"], ["./a.jpg", "y"]],
            "names './a.jpg' twice, as 'x' and, in line 3, as",
        ),
        ([["path", "label"], ["a.jpg"]], "line 2 of .* has 1 cells, expected 2"),
        ([["SourceFile", "Subject"], ["a.jpg", "x"]], "a vocabulary, a file with a line for each that is a class"),
        ([["path", "label", "split"], ["a.jpg", "x", "val"]], "no split 'train'; its splits are \\['val'\\]"),
    ],
)
def test_what_a_table_lacks_is_said(tmp_path, rows, words):
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        open_stream_data(table(tmp_path / "labels.csv", *rows))


def test_keywords_of_a_vocabulary_are_labels(tmp_path):
    (tmp_path / "words.txt").write_text("cat\ndog\n")
    rows = [["SourceFile", "Subject"], ["a.jpg", "holiday, cat"], ["b.jpg", "dog"], ["c.jpg", "sea"], ["d.jpg", ""]]
    rows += [["e.jpg", "sea"], ["e.jpg.xmp", "dog, sea"]]
    images = load_data(table(tmp_path / "tags.csv", *rows), None, vocabulary=str(tmp_path / "words.txt"))
    names = [(os.path.basename(images.item_name(i)), images.class_names[images.labels[i]]) for i in range(len(images))]
    assert names == [("a.jpg", "cat"), ("b.jpg", "dog"), ("e.jpg", "dog")]
    assert [os.path.basename(path) for path, _ in images.left_out] == ["c.jpg", "d.jpg"]
    Image.new("RGB", (9, 9)).save(tmp_path / "f.png")
    for words, more, why in (
        ("cat\ndog\n", ["f.png", "dog, cat"], "f.png has the keywords 'dog' and 'cat', and both are classes"),
        ("cat\ndog\n", ["./f.png", "cat"], "has the keywords 'dog' and 'cat'"),  # beside its sidecar
        ("cat, grey\n", ["f.png", ""], "'cat, grey' of .* has ', ' in it"),
    ):
        (tmp_path / "words.txt").write_text(words)
        both = table(tmp_path / "both.csv", *rows, ["f.xmp", "dog"], more)
        with pytest.raises(ValueError, match=why):
            load_data(both, None, vocabulary=str(tmp_path / "words.txt"))


def run(*words):
    return main([*map(str, words), *MACHINE])


def test_run_and_learn_take_a_table(heap, tmp_path, capsys):
    rows = [[path, *facts] for path, facts in heap.items()]
    june = table(tmp_path / "june.csv", ["path", "label", "split"], *(row for row in rows if row[1] != "two"))
    model = ["--model", demo_model_folder(), "--classifiers", "lda"]
    assert run("run", "--labels", june, *model, "--output", tmp_path / "june") == 0
    july = table(tmp_path / "july.csv", ["path", "label", "split"], *(row for row in rows if row[1] == "two"))
    capsys.readouterr()
    assert run("learn", tmp_path / "june", "--labels", july, "--output", tmp_path / "july") == 0
    said = capsys.readouterr()
    assert "3 classes" in said.out and "not used again" not in said.err, "the tests of June are found in its table"
    for words, why in (
        (["--labels", july, "--data", tmp_path], "give it alone"),
        (["--labels", tmp_path], "expected a .csv file"),
        ([], "--data is required"),
    ):
        assert run("learn", tmp_path / "june", *words, "--output", tmp_path / "no") == 2
        assert why in capsys.readouterr().err
    assert run("run", "--labels", july, "--data", tmp_path, *model, "--output", tmp_path / "no") == 2


@pytest.fixture
def learner(digit_folders, tmp_path):
    data = ["--data", digit_folders(3, 4, 2), "--output", tmp_path / "out"]
    assert run("run", *data, "--model", demo_model_folder(), "--classifiers", "lda") == 0
    return tmp_path / "out"


def test_guesses_are_a_table_for_exiftool(heap, learner, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("predict", learner, "heap", "--exiftool", "guesses.csv") == 0
    with open("guesses.csv", newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["SourceFile", "HierarchicalSubject"] and [path for path, _ in rows] == sorted(heap)
    assert {guess for _, guess in rows} <= {f"dulbe|{name}" for name in DIGITS[:3]}
    assert sum(guess == f"dulbe|{heap[path][0]}" for path, guess in rows) > len(rows) / 2
    assert run("rename", learner, "two", "a|b", "--output", "other") == 0
    assert run("predict", "other", "heap", "--exiftool", "more.csv") == 2
    assert "has '|' or ', ' in it" in capsys.readouterr().err and not os.path.exists("more.csv")


def exiftool(*words):
    return subprocess.run([EXIFTOOL, *words], check=True, capture_output=True, text=True).stdout


def keywords(*files):
    lines = exiftool("-csv", "-Subject", "-HierarchicalSubject", *map(str, files)).splitlines()
    return {row["SourceFile"]: row for row in csv.DictReader(lines)}


@pytest.mark.skipif(EXIFTOOL is None, reason="exiftool is not installed")
@pytest.mark.parametrize("sidecars", [False, True])
def test_the_real_exiftool_reads_labels_and_takes_guesses_twice(heap, learner, tmp_path, monkeypatch, sidecars):
    """A person's tags stay, and a second call adds nothing."""
    monkeypatch.chdir(tmp_path)
    for path, (label, _) in heap.items():
        own = [f"-Subject={label}", "-Subject=holiday", "-HierarchicalSubject=people|me", "-overwrite_original"]
        exiftool(*own, *(["-o", f"{path}.xmp"] if sidecars else []), path)
    kind = ["-ext", "xmp"] if sidecars else []
    (tmp_path / "tags.csv").write_text(exiftool("-csv", "-r", "-Subject", *kind, "heap"))
    (tmp_path / "words.txt").write_text("\n".join(DIGITS[:3]))
    images = load_data("tags.csv", None, vocabulary="words.txt")
    found = {images.item_name(i): images.class_names[images.labels[i]] for i in range(len(images))}
    assert found == {path: label for path, (label, _) in heap.items()}
    for _ in range(2):
        assert run("predict", learner, "heap", "--exiftool", "guesses.csv") == 0
        exiftool("-csv+=guesses.csv", "-sep", ", ", "-overwrite_original", *kind, "heap")
        single = "-HierarchicalSubject<${HierarchicalSubject;NoDups}"
        exiftool("-sep", "##", single, "-overwrite_original", *kind, "heap")
    for file, row in keywords(*kind, "heap").items():
        assert row["Subject"] == f"{heap[file.removesuffix('.xmp')][0]}, holiday"
        mine, guess = row["HierarchicalSubject"].split(", ")
        assert mine == "people|me" and guess.startswith("dulbe|")
