"""Test that only one process writes to a table or folder, and that copies are complete."""

import os

import pytest

from dulbe_peft.metrics.prediction import Prediction
from dulbe_peft.photos import output_files
from dulbe_peft.photos.output_files import ItemAnswers, only_writer, sorted_folder
from dulbe_peft.utils.files import TEMPORARY_MARK
from dulbe_peft.utils.folders import CheckpointError


def test_second_writer_of_a_table_or_folder_is_refused(tmp_path):
    (tmp_path / "link.csv").symlink_to("t.csv")
    words = r"link\.csv is in use by another process"
    table, link = only_writer(str(tmp_path / "t.csv")), only_writer(str(tmp_path / "link.csv"))
    with table, pytest.raises(CheckpointError, match=words), link:
        pass
    folder = str(tmp_path / "sorted")
    with sorted_folder(folder), pytest.raises(CheckpointError, match="sorted is in use"), sorted_folder(folder):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.csv"]


def test_copies_are_complete_and_replace_nothing(tmp_path, monkeypatch):
    long, folder = f"{'n' * 250}.png", tmp_path / "sorted" / "a%2Fb"
    for name in ("1.png", "2.png", long):
        (tmp_path / name).write_bytes(name.encode())
    folder.mkdir(parents=True)
    (folder / "1.png").write_bytes(b"another picture")
    (folder / "1-2.png").symlink_to("nowhere")
    (folder / f".2.png{TEMPORARY_MARK}abcd_123").mkdir()  # left behind by a process that was killed
    with sorted_folder(str(tmp_path / "sorted")) as copy:
        for name in ("1.png", "2.png", long, "1.png"):
            copy(tmp_path / name, "a/b")
        with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
            patch.setattr(output_files.shutil, "copyfileobj", lambda source, target: target.write(b"x") and no_space())
            copy(tmp_path / "1.png", "full")
        with pytest.raises(OSError, match=r"No such file or directory: '.*gone\.png'"):
            copy(tmp_path / "gone.png", "a/b")
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.exists()} == {
        "1.png": b"another picture",
        "1-3.png": b"1.png",
        "2.png": b"2.png",
        long: long.encode(),
    }
    assert os.readlink(folder / "1-2.png") == "nowhere" and not list((tmp_path / "sorted" / "full").iterdir())


def no_space():
    raise OSError(28, "No space left on device")


def test_photograph_that_is_given_by_two_paths_counts_once_in_the_answer_of_its_item(tmp_path):
    names = [str(tmp_path / "a.png"), f"{tmp_path}/./a.png", str(tmp_path / "b.png")]
    items = ItemAnswers(dict.fromkeys(names, "x"), dict.fromkeys(names), dict.fromkeys(names, ""), 1)
    shares = ((0.9, 0.1), (0.9, 0.1), (0.2, 0.8))
    rows = [items.add(Prediction(name, ("cat", "dog"), each, True)) for name, each in zip(names, shares, strict=True)]
    cat, dog = (0.9 * 0.2) ** 0.5, (0.1 * 0.8) ** 0.5
    answer = items.answers()["x"]
    assert answer.classes == ("cat",) and answer.probabilities[0] == pytest.approx(cat / (cat + dog))
    assert [row.classes for row in items.answered(rows)] == [("cat",)] * 3
    items.write(str(tmp_path / "items.csv"))
    assert (tmp_path / "items.csv").read_text().splitlines()[1].split(",")[3] == "2", "photographs"


def test_photograph_in_two_items_counts_in_both(tmp_path):
    """A link to a photograph of another item is a photograph of its own item, too."""
    (tmp_path / "a.png").touch()
    (tmp_path / "b.png").symlink_to("a.png")
    names = [str(tmp_path / name) for name in ("a.png", "b.png")]
    items = ItemAnswers(dict(zip(names, "xy", strict=True)), dict.fromkeys(names), dict.fromkeys(names, ""), 1)
    rows = [items.add(Prediction(name, ("cat", "dog"), (0.9, 0.1), True)) for name in names]
    assert [(row.group, row.classes) for row in items.answered(rows)] == [("x", ("cat",)), ("y", ("cat",))]
    items.write(str(tmp_path / "items.csv"))
    assert len((tmp_path / "items.csv").read_text().splitlines()) == 3
