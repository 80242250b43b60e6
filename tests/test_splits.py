"""Taking stock of images, holding some of them back, and finding out what a folder holds."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dulbe_peft.data import inventory
from dulbe_peft.data.folders import ImageFolder
from dulbe_peft.data.inventory import inspect_images
from dulbe_peft.data.splits import draw_per_class, hold_out, open_stream_data
from dulbe_peft.streams.tasks import class_incremental_tasks


def photo(path: Path, value: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (6, 5), (value % 256, 0, 90)).save(path)
    return path


def photos(root: Path, counts: dict[str, int]) -> Path:
    for name, count in counts.items():
        for number in range(count):
            photo(root / name / f"{number}.jpg", number)
    return root


def names(dataset) -> set[str]:
    return {Path(dataset.item_name(index)).as_posix() for index in range(len(dataset))}


# ---------------------------------------------------------------------- what there is


def test_an_inventory_counts_and_names(tmp_path):
    photos(tmp_path / "train", {"cat": 3, "dog": 2})
    (tmp_path / "train" / "cat" / "notes.txt").write_text("x")
    (tmp_path / "train" / "cat" / "raw.CR2").write_text("x")
    (tmp_path / "train" / "cat" / ".hidden.jpg").write_text("x")
    (tmp_path / "train" / "readme.md").write_text("x")
    (tmp_path / "train" / "fox").mkdir()
    (tmp_path / "train" / "dog" / "0.jpg").write_bytes(b"no image")
    data = ImageFolder(tmp_path, "train")
    found = inspect_images(data)
    assert found.counts == {"train": {"cat": 3, "dog": 2}} and found.unchecked == 0
    bad = str(tmp_path / "train" / "dog" / "0.jpg")
    assert [name for name, _ in found.unreadable] == [bad] and found.positions == {"train": [3]}
    whys = {Path(path).name: why for path, why in found.left_out}
    assert whys == {
        "notes.txt": "files ending in .txt are not read",
        "raw.CR2": "files ending in .cr2 are not read",
        ".hidden.jpg": "hidden",
        "readme.md": "not in a class folder",
        "fox": "an empty folder",
    }
    assert found.summary() == "2 classes; images: 5 in train; left out: 5; cannot be read: 1"
    assert found.format().splitlines()[:4] == [
        "class       train",
        "cat             3",
        "dog             2",
        "2 classes       5",
    ]
    assert f"  {bad}: it is none of the formats JPEG, PNG" in found.format()


@pytest.mark.parametrize("slow", [-1, 1e9])
def test_headers_are_read_one_by_one_or_in_threads(tmp_path, slow, monkeypatch):
    photos(tmp_path, {"a": 7, "b": 8})
    (tmp_path / "b" / "3.jpg").write_bytes(b"")
    monkeypatch.setattr(inventory, "_FIRST", 3)
    monkeypatch.setattr(inventory, "_SLOW", slow)
    assert inspect_images(ImageFolder(tmp_path)).positions == {"images": [10]}


def test_an_inventory_of_tasks_and_lists(tmp_path):
    photos(tmp_path, {"finch": 1, "robin": 2})
    (tmp_path / "robin" / "1.jpg").write_bytes(b"damaged")
    tasks = class_incremental_tasks(ImageFolder(tmp_path), increment=1)
    assert inspect_images(tasks[1].train).positions == {"images": [1]}
    rows = [(Image.new("RGB", (4, 4)), 1), (Image.new("RGB", (4, 4)), 0)]
    plain = inspect_images(rows)
    assert plain.unchecked == 2 and plain.counts == {"images": {"0": 1, "1": 1}}
    assert "not looked at before training: 2 images" in plain.format()


# ---------------------------------------------------------------------- held-back images


def test_hold_out_is_a_division_that_ignores_order_and_place(tmp_path):
    data = ImageFolder(photos(tmp_path / "one", {"a": 60, "b": 60, "c": 1, "d": 2}))
    train, test = hold_out(data, 0.25)
    assert names(train) | names(test) == names(data) and not names(train) & names(test)
    labels = np.bincount(test.labels, minlength=4)
    assert 6 <= labels[0] <= 26 and 6 <= labels[1] <= 26 and labels[2] == 0 and labels[3] == 1
    assert all(test[index]["label"] == test.labels[index] for index in range(len(test)))
    again = hold_out(ImageFolder(photos(tmp_path / "two", {"d": 2, "c": 1, "b": 60, "a": 60})), 0.25)[1]
    here, there = (
        {name.split("/", maxsplit=name.count("/") - 1)[-1] for name in names(part)} for part in (test, again)
    )
    assert here == there
    assert names(hold_out(data, 0.25, seed=1)[1]) != names(test)
    rows = list(range(len(data)))
    random.Random(0).shuffle(rows)
    assert names(hold_out(data.at(rows), 0.25)[1]) == names(test)


def test_hold_out_keeps_its_choice_when_photographs_come(tmp_path):
    root = photos(tmp_path, {"a": 40, "b": 40})
    train, test = (names(part) for part in hold_out(ImageFolder(root), 0.3))
    for number in range(40):
        photo(root / "a" / f"later-{number}.jpg", number)
    photos(root, {"aa": 5})
    later_train, later_test = (names(part) for part in hold_out(ImageFolder(root), 0.3))
    assert train <= later_train and test <= later_test and len(later_test) > len(test)


def test_hold_out_leaves_something_to_learn_from(tmp_path):
    data = ImageFolder(photos(tmp_path, {"a": 2, "b": 5}))
    train, _ = hold_out(data, 0.99)
    assert np.bincount(train.labels).tolist() == [1, 1]
    for wrong in (0, 1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="fraction must be"):
            hold_out(data, wrong)
    with pytest.raises(ValueError, match="no class has enough images"):
        hold_out(ImageFolder(photos(tmp_path / "few", {"a": 1, "b": 1})), 0.5)
    with pytest.raises(ValueError, match="carries no class names"):
        hold_out([(Image.new("RGB", (4, 4)), 0)] * 3, 0.5)


# ---------------------------------------------------------------------- what a folder holds


def test_splits_are_found(tmp_path):
    photos(tmp_path / "train", {"cat": 3, "dog": 2})
    photos(tmp_path / "test", {"cat": 1, "dog": 1})
    photos(tmp_path / "val", {"cat": 4, "dog": 1})
    train, test, found = open_stream_data(tmp_path)
    assert (len(train), len(test)) == (5, 2)
    assert found.counts == {"train": {"cat": 3, "dog": 2}, "test": {"cat": 1, "dog": 1}}
    why = "the split 'val', neither learned from nor tested on, 5 images"
    assert found.left_out == [(str(tmp_path / "val"), why)]
    assert len(open_stream_data(tmp_path, "val", "test")[0]) == 5
    with pytest.raises(ValueError, match=r"test_fraction is 0\.2, but .* has the test split 'test'"):
        open_stream_data(tmp_path, test_fraction=0.2)
    with pytest.raises(FileNotFoundError, match=r"no split 'tests'; its folders are \['test', 'train', 'val'\]"):
        open_stream_data(tmp_path, test_split="tests")
    with pytest.raises(FileNotFoundError, match=r"no split 'training'.*--train-split"):
        open_stream_data(tmp_path, train_split="training")


def test_a_folder_of_classes_is_all_there_to_learn_from(tmp_path):
    photos(tmp_path, {"cat": 30, "dog": 30})
    train, test, found = open_stream_data(tmp_path)
    assert len(train) == 60 and test is None and found.summary() == "2 classes; images: 60 in train"
    photos(tmp_path / "split" / "train", {"cat": 20, "dog": 20})
    assert open_stream_data(tmp_path / "split")[1] is None
    shutil.rmtree(tmp_path / "split")
    train, test, found = open_stream_data(tmp_path, test_fraction=0.3)
    assert len(train) + len(test) == 60 and found.counts["test"] == {
        "cat": int((test.labels == 0).sum()),
        "dog": int((test.labels == 1).sum()),
    }


def test_a_class_may_be_called_like_a_split(tmp_path):
    photos(tmp_path, {"bus": 2, "train": 3})
    assert open_stream_data(tmp_path)[0].class_names == ("bus", "train")
    photo(tmp_path / "plain" / "old" / "x.jpg")  # folders in a class folder do no harm
    assert open_stream_data(tmp_path)[0].class_names == ("bus", "plain", "train")


@pytest.mark.parametrize(
    ("folders", "words"),
    [
        (["train/cat", "extra/x"], "'train', in which there are folders alone, and beside it 'extra'"),
        (["Train/cat", "Test/cat"], r"no split 'train'; its folders are \['Test', 'Train'\].*--train-split"),
        (["test/cat", "val/cat"], r"no split 'train'.*if 'test' is a split"),
        (["train/cat", "test/dog"], "class 'dog' has test images and no training image"),
    ],
)
def test_folders_that_could_mean_two_things_are_refused(tmp_path, folders, words):
    for folder in folders:
        photo(tmp_path / folder / "1.jpg")
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        open_stream_data(tmp_path)


def test_a_class_without_test_images_is_learned_all_the_same(tmp_path):
    photos(tmp_path / "train", {"ant": 2, "cat": 3, "dog": 2})
    photos(tmp_path / "test", {"ant": 1, "dog": 2})
    train, test, found = open_stream_data(tmp_path)
    assert test.class_names == train.class_names and test.labels.tolist() == [0, 2, 2]
    assert [test[index]["label"] for index in range(3)] == [0, 2, 2]
    assert "cat             3       0" in found.format()


def test_unreadable_images_are_one_error_or_left_out(tmp_path):
    photos(tmp_path / "train", {"cat": 4, "dog": 4})
    photos(tmp_path / "test", {"cat": 2, "dog": 2})
    bad = [tmp_path / "train" / "cat" / "1.jpg", tmp_path / "test" / "dog" / "0.jpg"]
    for path in bad:
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError) as error:
        open_stream_data(tmp_path)
    message = str(error.value)
    assert message.startswith("2 of the images") and "--skip-unreadable" in message
    assert all(str(path) in message for path in bad)
    train, test, found = open_stream_data(tmp_path, skip_unreadable=True)
    assert (len(train), len(test), len(found.unreadable)) == (7, 3, 2)
    assert not {path.as_posix() for path in bad} & (names(train) | names(test))
    assert [train[index]["label"] for index in range(7)] == [0, 0, 0, 1, 1, 1, 1]


def test_drawn_images_are_so_many_a_class_and_nested(tmp_path):
    photos_by_class = ImageFolder(photos(tmp_path, {"a": 9, "b": 12}), None)
    few, more = (draw_per_class(photos_by_class, count, seed=3) for count in (1, 3))
    assert np.bincount(few.labels).tolist() == [1] * len(few.class_names)
    assert set(few.indices) <= set(more.indices) and more.class_names == photos_by_class.class_names
    assert not np.array_equal(draw_per_class(photos_by_class, 1, seed=4).indices, few.indices)
    assert len(draw_per_class(photos_by_class, 10**6)) == len(photos_by_class)
    with pytest.raises(ValueError, match="count"):
        draw_per_class(photos_by_class, 0)


def test_classes_of_unequal_numbers_are_drawn_by_the_seed(tmp_path):
    data = ImageFolder(photos(tmp_path, dict.fromkeys("abcdef", 13)), None)

    def counts(wanted, seed=0):
        return np.bincount(draw_per_class(data, wanted, seed).labels).tolist()

    assert sorted(counts([2, 9])) == [2, 2, 2, 9, 9, 9] and sorted(counts("longtail:12")) == [2, 2, 3, 4, 6, 12]
    assert len({tuple(counts([2, 9], seed)) for seed in range(5)}) > 1, "a seed says which classes have few images"
    assert set(draw_per_class(data, [2, 9]).indices) <= set(draw_per_class(data, 9).indices)


def test_images_are_held_back_twice_independently(tmp_path):
    """Half of them for tests, then half of the others to choose settings: the second half is no leftover."""
    data = ImageFolder(photos(tmp_path, {"a": 200, "b": 200}), None)
    rest, _ = hold_out(data, 0.5)
    left, chosen = hold_out(rest, 0.5, purpose="validation")
    assert abs(len(chosen) / len(rest) - 0.5) < 0.15 and not names(left) & names(chosen)
    drawn = draw_per_class(rest, 50)
    assert abs(len(names(drawn) & names(chosen)) / 100 - 0.5) < 0.2
