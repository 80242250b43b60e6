"""Test `dulbe-peft suggest`, which suggests photographs to label next."""

import os
import shutil
from dataclasses import replace
from math import isfinite
from pathlib import Path

import pytest
from PIL import ExifTags, Image
from small_runs import call

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.data.digits import DIGITS
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.photos import suggesting
from dulbe_peft.utils.files import read_csv, write_csv


@pytest.fixture
def heap(digit_folders, tmp_path):
    """Make a folder of forty photographs, of which some are to be learned; one has a copy and one is unreadable."""
    (tmp_path / "heap").mkdir()
    for file in (digit_folders(5, 8, 2) / "train").rglob("*.png"):
        name = file.parent.name
        shutil.copy(file, tmp_path / "heap" / f"{name}-{file.name}")
        if name in DIGITS[:3] and int(file.stem) < 3:
            (tmp_path / "june" / name).mkdir(parents=True, exist_ok=True)
            shutil.copy(file, tmp_path / "june" / name / f"mine-{file.name}")
    shutil.copy(tmp_path / "heap" / "four-4.png", tmp_path / "heap" / "four-copy.png")
    (tmp_path / "heap" / "z-bad.png").write_bytes(b"no image")
    os.mkfifo(tmp_path / "heap" / "pipe.png")
    return tmp_path / "heap"


@pytest.fixture
def june(heap, tmp_path, capsys):
    """Return a learner of some of the photographs."""
    model = ["--model", demo_model_folder(), "--classifiers", "lda"]
    assert call("run", "--data", tmp_path / "june", *model, "--output", tmp_path / "out") == 0
    capsys.readouterr()
    return tmp_path / "out"


def test_suggest_without_a_learner_covers_all_groups(heap, tmp_path, capsys):
    table, page = tmp_path / "label.csv", tmp_path / "label.html"
    words = ["--model", demo_model_folder(), heap, "--count", 5, "--csv", table, "--page", page]
    assert call("suggest", *words) == 0
    printed = capsys.readouterr().out
    assert "5 photographs of 40" in printed and "1 photograph in the data twice" in printed
    assert "z-bad.png: it is none" in printed and "neither a file nor a folder, such as" in printed
    assert f"correct the column predicted of {table}, and rename it to label; then" in printed
    assert f"--labels {table} --output labelled" in printed
    header, *rows = read_csv(table)
    assert header == ["path", "reason", "predicted", "novelty"] and len(rows) == 5
    assert all(Path(path).parent == heap and not name and not novelty for path, _, name, novelty in rows)
    assert len({Path(path).name.split("-")[0] for path, *_ in rows}) >= 4, "groups correspond to digits, approximately"
    text = page.read_text(encoding="utf-8")
    assert text.count("<figure>") == 5 and all(Path(path).name in text for path, *_ in rows)


def test_suggest_leaves_out_learned_photographs(heap, june, tmp_path, capsys):
    table = tmp_path / "label.csv"
    assert call("suggest", june, heap, "--count", 12, "--csv", table) == 0
    printed = capsys.readouterr().out
    assert "left out: 9 photographs learned before" in printed and "z-bad.png: it is none" in printed
    _, *rows = read_csv(table)
    known = {f"{name}-{number}.png" for name in DIGITS[:3] for number in range(3)}
    assert len(rows) == 12 and not known & {Path(path).name for path, *_ in rows}
    assert len({Path(path).read_bytes() for path, *_ in rows}) == 12
    assert all(isfinite(float(novelty)) and (name or "unlike" in why) for _, why, name, novelty in rows)
    assert any(why.startswith("unsure") for _, why, *_ in rows)
    for words, why in (
        ([june, heap / "one-0.png"], "no readable photograph is left that was not learned"),
        (["--model", demo_model_folder()], "name the photographs"),
        ([heap], "name a saved learner"),
    ):
        assert call("suggest", *words) == 2
        assert why in capsys.readouterr().err


@pytest.mark.slow
def test_table_is_learned_after_renaming_its_class_column(june, tmp_path, capsys, monkeypatch):
    """The table is not in the working directory, so its paths are absolute."""
    (tmp_path / "tables").mkdir()
    monkeypatch.chdir(tmp_path)
    table = Path("tables/label.csv")
    assert call("suggest", "out", "heap", "--count", 9, "--csv", table) == 0
    command = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("next: dulbe-peft learn "))
    words = command.removeprefix("next: dulbe-peft ").split()
    assert call(*words) == 2 and "rename the column to 'label'" in capsys.readouterr().err
    header, *rows = read_csv(table)
    assert all(Path(path).is_absolute() for path, *_ in rows)
    assert call("suggest", "out", "heap", "--csv", table) == 2
    assert "may hold your corrections" in capsys.readouterr().err and read_csv(table)[1:] == rows
    right = [[path, why, Path(path).name.split("-")[0], novelty] for path, why, _, novelty in rows]
    write_csv(table, ["label" if name == "predicted" else name for name in header], right)
    assert call(*words) == 0
    printed = capsys.readouterr().out
    assert "cannot be read" not in printed and "known classes get" in printed
    assert call("suggest", "out", "nothing", "--csv", table, "--overwrite") == 2 and read_csv(table)[1:] == right
    assert call("suggest", "out", "heap", "--csv", table, "--overwrite") == 0
    assert read_csv(Path(f"{table}.old"))[1:] == right and len(read_csv(table)) > 1


def test_table_is_written_to_standard_output(heap, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("-").write_text("mine")
    for name in ("-", "/dev/stdout"):
        assert call("suggest", "--model", demo_model_folder(), heap, "--csv", name, "--overwrite") == 0
        assert capfd.readouterr().out.startswith("path,reason,predicted,novelty")
    assert Path("-").read_text() == "mine" and Path("/dev/stdout").is_symlink()


def test_negative_novelty_is_a_number_in_the_table(heap, tmp_path, monkeypatch):
    original, table = suggesting.suggestions, tmp_path / "label.csv"
    monkeypatch.setattr(suggesting, "suggestions", lambda *given: [replace(original(*given)[0], novelty=-0.7056421)])
    assert call("suggest", "--model", demo_model_folder(), heap, "--csv", table) == 0
    assert read_csv(table)[1][3] == "-0.705642"


@pytest.fixture
def frames(heap, tmp_path):
    """Make five folders of one photograph of the heap each, with three brighter frames, ten minutes apart."""
    for number, name in enumerate(DIGITS[:5]):
        (tmp_path / "bursts" / f"item{number}").mkdir(parents=True)
        grey = Image.open(heap / f"{name}-4.png").convert("L")
        for frame in range(4):
            exif = Image.Exif()
            exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = f"2024:06:01 12:{number}0:0{frame}"
            image = grey.point([min(255, value + 8 * frame) for value in range(256)])
            image.save(tmp_path / "bursts" / f"item{number}" / f"{frame}.jpg", exif=exif)
    return tmp_path / "bursts"


@pytest.mark.plain("flags1")
@pytest.mark.parametrize("flags", [["--group", "folder"], ["--group", "(item[0-9])"], ["--group-seconds", 60]])
def test_items_are_suggested_once_and_those_with_a_label_last(frames, tmp_path, capsys, flags):
    table, model = tmp_path / "label.csv", ["--model", demo_model_folder()]

    def items(*words):
        assert call("suggest", *words, frames, "--csv", table, "--overwrite", *flags) == 0
        return [Path(path).parent.name for path, *_ in read_csv(table)[1:]]

    first = items(*model, "--count", 10)
    printed = capsys.readouterr().out
    assert sorted(first[:5]) == [f"item{number}" for number in range(5)] and len(first) == 10
    assert "5 groups of images" in printed and "--output labelled --group group" in printed
    rows = [[str(frames / f"item{number}" / "1.jpg"), DIGITS[number]] for number in (0, 3)]
    write_csv(tmp_path / "given.csv", ["path", "label"], rows)
    words = ["run", "--labels", tmp_path / "given.csv", *model, "--classifiers", "lda", "--output", tmp_path / "out"]
    assert call(*words) == 0
    learned = items(tmp_path / "out", "--count", 5)
    assert sorted(learned[:3]) == ["item1", "item2", "item4"] and set(learned[3:]) == {"item0", "item3"}


@pytest.mark.plain("flags1")
@pytest.mark.parametrize("flags", [["--group", "folder"], ["--group-seconds", 1]])
def test_table_of_suggestions_tells_the_same_items_apart_when_it_is_learned(frames, tmp_path, flags):
    """A photograph in the given folder is no item, but its folder in the table is. A table lacks times in between."""
    for number in range(5):
        (frames / f"item{number}" / "0.jpg").rename(frames / f"loose{number}.jpg")
    table, learner = tmp_path / "label.csv", tmp_path / "out"
    words = ["--model", demo_model_folder(), frames, "--csv", table]
    assert call("suggest", *words, "--count", 20, *flags) == 0
    header, *rows = read_csv(table)
    assert header[-1] == "group" and len(rows) == 20
    labelled = [[path, DIGITS[number % 2], group] for number, (path, *_, group) in enumerate(rows)]
    write_csv(table, ["path", "label", "group"], [row for row in labelled if not row[0].endswith("/2.jpg")])
    words = ["run", "--labels", table, "--model", demo_model_folder(), "--classifiers", "lda"]
    assert call(*words, "--group", "group", "--output", learner) == 0
    groups = ClassIncrementalLearner.from_pretrained(learner).state.known.groups
    assert len(groups) == 15 and len({*groups.values()}) == 10


def test_equal_paths_in_two_folders_are_two_items(frames, tmp_path, capsys):
    other = shutil.copytree(frames, tmp_path / "july")
    for path in other.rglob("*.jpg"):
        path.write_bytes(path.read_bytes() + b"later")
    words = ["suggest", "--model", demo_model_folder(), frames, other, "--count", 3, "--group"]
    assert call(*words, "folder") == 0 and "10 groups of images" in capsys.readouterr().out
    assert call(*words, "(july|bursts)") == 0 and "2 groups of images" in capsys.readouterr().out


def test_wrong_groups_of_photographs_are_refused(frames, heap, tmp_path, capsys):
    for flags, why in (
        (["--group", "item"], "it has no columns"),
        (["--group", "(nothing)"], "no path matches"),
        (["--group", "([^/]+)/"], "no image has a group"),
        (["--group", "folder"], "directly in"),
        (["--group-seconds", 60], "do not say when they were taken"),
    ):
        assert call("suggest", "--model", demo_model_folder(), heap, *flags) == 2
        assert why in capsys.readouterr().err


@pytest.mark.slow
def test_suggest_asks_for_the_groups_of_the_learner(frames, tmp_path, capsys):
    for number in range(5):
        for frame in range(2):
            target = tmp_path / "classes" / DIGITS[number % 2] / f"item{number}"
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy(frames / f"item{number}" / f"{frame}.jpg", target)
    words = ["--model", demo_model_folder(), "--group", "(item[0-9])", "--output", tmp_path / "out"]
    assert call("run", "--data", tmp_path / "classes", *words) == 0
    capsys.readouterr()
    assert call("suggest", tmp_path / "out", frames, "--count", 3) == 0
    assert "learned photographs have groups: give --group" in capsys.readouterr().out


@pytest.mark.slow
def test_rejection_says_that_classes_with_one_image_are_rejected_more_often(heap, june, tmp_path, capsys):
    words = ["--reject", 0.3, "--csv", tmp_path / "answers.csv", "--overwrite"]
    assert call("predict", june, heap / "one-0.png", *words) == 0
    assert "have one image" not in capsys.readouterr().err
    (tmp_path / "june" / "three").mkdir(exist_ok=True)
    model = ["--model", demo_model_folder(), "--classifiers", "lda"]
    for numbers, group in (([4], []), ([4, 5], ["--group", "(three)"])):
        for number in numbers:
            shutil.copy(heap / f"three-{number}.png", tmp_path / "june" / "three")
        out = tmp_path / f"learner{len(numbers)}"
        assert call("run", "--data", tmp_path / "june", *model, *group, "--output", out) == 0
        capsys.readouterr()
        assert call("predict", out, heap / "one-0.png", *words) == 0
        assert "1 of 4 classes have one image or group, which cannot be left out" in capsys.readouterr().err


def test_only_possible_classes_are_proposed(june, heap, tmp_path, capsys):
    only, table = tmp_path / "only.txt", tmp_path / "t.csv"
    only.write_text("one\nthree\n")
    assert call("suggest", june, heap, "--csv", table, "--page", tmp_path / "p.html", "--only", only) == 0
    assert f"--only {only}" in (tmp_path / "p.html").read_text()
    proposed = {row[2] for row in read_csv(table)[1:]}
    assert proposed <= {"one", "three", ""} and proposed & {"one", "three"}
    assert not any(name in row[1] for row in read_csv(table)[1:] for name in DIGITS if name not in ("one", "three"))
    capsys.readouterr()
    assert call("suggest", "--model", demo_model_folder(), heap, "--only", only) == 2
    assert "--only names classes of a learner" in capsys.readouterr().err
    assert call("suggest", "--model", demo_model_folder(), heap, "--classifier", "lda") == 2
    assert "has learned nothing: give a learner" in capsys.readouterr().err
