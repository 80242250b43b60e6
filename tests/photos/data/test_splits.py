"""Test the inventory of a data set, holding out images, and recognizing the layout of a folder."""

import os
import random
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image
from small_runs import opened

from dulbe_peft.data.folders import ImageFolder, folder_content, holds_image
from dulbe_peft.data.names import check_class_names, class_key
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.data.looking import inspect_images
from dulbe_peft.photos.data.source import DataSource
from dulbe_peft.photos.data.splits import draw_per_class, hold_out
from dulbe_peft.streams.tasks import class_incremental_tasks


def photos(root: Path, counts: dict[str, int]) -> Path:
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            Image.new("RGB", (6, 5), (number % 256, 0, 90)).save(root / name / f"{number}.jpg")
    return root


def names(dataset) -> set[str]:
    return {Path(dataset.item_name(index)).as_posix() for index in range(len(dataset))}


def counts_of(dataset) -> list[int]:
    return np.bincount(dataset.labels, minlength=len(dataset.class_names)).tolist()


def test_inventory_counts_images_and_lists_bad_files(tmp_path):
    train = photos(tmp_path / "train", {"cat": 3, "dog": 2})
    for odd in ("cat/notes.txt", "cat/raw.CR2", "cat/.hidden.jpg", "readme.md", "dog/0.jpg"):
        (train / odd).write_text("no image")
    (train / "fox").mkdir()
    data = ImageFolder(tmp_path, "train")
    inventory, task = inspect_images(data), class_incremental_tasks(data, increment=1)[1]
    assert [image.place for image, _ in inspect_images(task.train).unreadable] == [0]
    assert inspect_images([(Image.new("RGB", (4, 4)), 1)]).counts == {"images": {"0": 0, "1": 1}}
    assert inventory.counts == {"train": {"cat": 3, "dog": 2}}
    bad = str(train / "dog" / "0.jpg")
    assert [image[:3] for image, _ in inventory.unreadable] == [("train", 3, bad)]
    assert sorted(inventory.left_out) == sorted(data.left_out)
    assert "a file ending in .md is not read" in inventory.format()
    assert inventory.summary() == "2 classes; images: 5 in train; left out: 5; cannot be read: 1"
    table = ["class       train", "cat             3", "dog             2", "2 classes       5"]
    assert inventory.format().splitlines()[:4] == table
    assert f"  {bad}: it is none of the formats JPEG, PNG" in inventory.format()


def test_hold_out_follows_content_and_ignores_names_order_and_other_images(tmp_path):
    data = ImageFolder(photos(tmp_path / "one", {"a": 60, "b": 60, "c": 1, "d": 2}))
    train, test = hold_out(data, 0.25)
    assert names(train) | names(test) == names(data) and not names(train) & names(test)
    a, b, c, d = counts_of(test)
    assert 6 <= a <= 26 and 6 <= b <= 26 and (c, d) == (0, 1)
    assert all(test[index]["label"] == test.labels[index] for index in range(len(test)))
    copies = data.at([0, 0, 0, 0, 59, 59])
    for kept, held in (hold_out(copies, 0.4, seed) for seed in range(9)):
        assert not set(kept.contents()) & set(held.contents()), "copies stay together"
    for file in photos(tmp_path / "two", {"d": 2, "c": 1, "b": 60, "a": 60}).glob("*/*"):
        file.rename(file.with_name(f"renamed-{99 - int(file.stem)}.jpg"))
    assert sorted(hold_out(ImageFolder(tmp_path / "two"), 0.25)[1].contents()) == sorted(test.contents())
    assert names(hold_out(data, 0.25, seed=1)[1]) != names(test)
    rows = random.Random(0).sample(range(len(data)), len(data))
    assert names(hold_out(data.at(rows), 0.25)[1]) == names(test)
    photos(tmp_path / "one", {"a": 90, "aa": 5})
    more_train, more_test = hold_out(ImageFolder(tmp_path / "one"), 0.25)
    assert names(train) <= names(more_train) and names(test) < names(more_test)


def test_hold_out_keeps_a_training_image_per_class(tmp_path):
    data = ImageFolder(photos(tmp_path, {"a": 2, "b": 5}))
    assert counts_of(hold_out(data, 0.99)[0]) == [1, 1]
    few = ImageFolder(photos(tmp_path / "few", {"a": 1, "b": 1}))
    for images, fraction, words in (
        *((data, wrong, "fraction must be") for wrong in (0, 1, 1.5, float("nan"))),
        (few, 0.5, "no class has enough images"),
        ([(Image.new("RGB", (4, 4)), 0)] * 3, 0.5, "has no class names"),
    ):
        with pytest.raises(ValueError, match=words):
            hold_out(images, fraction)


def test_test_and_validation_images_are_held_out_independently(tmp_path):
    """Hold out half of the images for testing, then half of the rest for validation: the draws are independent."""
    rest, _ = hold_out(ImageFolder(photos(tmp_path, {"a": 200, "b": 200}), None), 0.5)
    left, chosen = hold_out(rest, 0.5, purpose="validation")
    assert abs(len(chosen) / len(rest) - 0.5) < 0.15 and not names(left) & names(chosen)
    assert abs(len(names(draw_per_class(rest, 50)) & names(chosen)) / 100 - 0.5) < 0.2


def test_draw_per_class_keeps_count_images_and_draws_are_nested(tmp_path):
    data = ImageFolder(photos(tmp_path, dict.fromkeys("abcdef", 13)), None)
    few, more = (draw_per_class(data, count, seed=3) for count in (1, 3))
    assert counts_of(few) == [1] * 6 and set(few.indices) <= set(more.indices) and more.class_names == data.class_names
    assert not np.array_equal(draw_per_class(data, 1, seed=4).indices, few.indices)
    assert len(draw_per_class(data, 10**6)) == len(data)
    with pytest.raises(ValueError, match="count"):
        draw_per_class(data, 0)
    several = [counts_of(draw_per_class(data, [2, 9], seed)) for seed in range(5)]
    assert sorted(several[0]) == [2, 2, 2, 9, 9, 9] and len(set(map(tuple, several))) > 1, "the seed decides which"
    assert sorted(counts_of(draw_per_class(data, "longtail:12"))) == [2, 2, 3, 4, 6, 12]
    assert set(draw_per_class(data, [2, 9]).indices) <= set(draw_per_class(data, 9).indices)


def test_splits_of_a_folder_are_found(tmp_path, monkeypatch):
    for split, counts in (("train", {"ant": 1, "cat": 3}), ("test", {"cat": 2}), ("val", {"cat": 4, "dog": 1})):
        photos(tmp_path / split, counts)
    train, test, inventory = opened(tmp_path)
    assert test.class_names == train.class_names and test[1]["label"] == 1, "labels number the training classes"
    assert inventory.counts == {"train": {"ant": 1, "cat": 3}, "test": {"ant": 0, "cat": 2}}
    assert "cat             3       2" in inventory.format()
    why = "the split 'val', which is neither trained nor tested on, 5 images"
    assert inventory.left_out == [(str(tmp_path / "val"), why)]
    walked = Mock(side_effect=os.walk)
    monkeypatch.setattr(os, "walk", walked)
    DataSource(tmp_path).check()
    assert not walked.called, "the check before the images are opened reads only the names of folders"
    assert len(opened(tmp_path, "val", "test")[0]) == 5
    for settings, words in (
        ({"test_fraction": 0.2}, r"test_fraction is 0\.2, but .* has the test split 'test': use only one"),
        ({"test_split": "train"}, "training images cannot be the test images"),
        ({"test_split": "tests"}, r"no split 'tests'; its folders are \['test', 'train', 'val'\]"),
        ({"train_split": "training"}, r"no split 'training'.*--train-split"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            opened(tmp_path, **settings)


def test_holds_image_stops_at_the_first_image(tmp_path, monkeypatch):
    root = tmp_path / "heap"
    for name in ("notes.txt", ".hidden.jpg", ".hidden/1.jpg", "empty/more/list.csv", "folder.jpg/"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).mkdir() if name.endswith("/") else (root / name).touch()
    (root / "round").symlink_to(root)
    assert not folder_content(root)[0] and not holds_image(root)
    (root / "gone.jpg").symlink_to(root / "nowhere")
    assert folder_content(root)[0] == ["gone.jpg"] and holds_image(root)
    photos(root, {"cat": 3, "dog": 3})
    entered = list[str]()
    walk = os.walk
    monkeypatch.setattr(
        os, "walk", lambda *given, **how: (entered.append(row[0]) or row for row in walk(*given, **how))
    )
    assert holds_image(root) and entered == [str(root)]


def test_all_images_are_for_training_in_a_folder_of_classes(tmp_path):
    photos(tmp_path, {"cat": 30, "dog": 30})
    train, test, inventory = opened(tmp_path)
    assert len(train) == 60 and test is None and inventory.summary() == "2 classes; images: 60 in train"
    photos(tmp_path / "split" / "train", {"cat": 20, "dog": 20})
    assert opened(tmp_path / "split")[1] is None
    shutil.rmtree(tmp_path / "split")
    train, test, inventory = opened(tmp_path, test_fraction=0.3)
    assert len(train) + len(test) == 60 and list(inventory.counts["test"].values()) == counts_of(test)


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (["bus", "train"], ("bus", "train")),  # a class whose name is that of a split
        (["bus", "train", "plain/old"], ("bus", "plain", "train")),
        (["train", "train/bus", "train/car"], ("bus", "car")),  # an image beside the classes
        (["train", "train/bus", "train/car", "val/bus"], ("bus", "car")),
        (["train/cat", "extra/x"], "'train', which contains only folders, and 'extra'"),
        (["Train/cat", "Test/cat"], r"no split 'train'; its folders are \['Test', 'Train'\].*--train-split"),
        (["test/cat", "val/cat"], r"no split 'train'.*if 'test' is a split"),
        (["train/cat", "test/dog"], "class 'dog' has test images and no training image"),
    ],
)
def test_ambiguous_folders_are_resolved_or_refused(tmp_path, folders, expected):
    photos(tmp_path, dict.fromkeys(folders, 1))
    if isinstance(expected, tuple):
        assert opened(tmp_path)[0].class_names == expected
        return
    with pytest.raises((ValueError, FileNotFoundError), match=expected):
        opened(tmp_path)


def test_unreadable_images_raise_one_error_or_are_left_out(tmp_path):
    photos(tmp_path / "train", {"cat": 4, "dog": 4})
    photos(tmp_path / "test", {"cat": 2, "dog": 2})
    bad = [tmp_path / "train" / "cat" / "1.jpg", tmp_path / "test" / "dog" / "0.jpg"]
    for path in bad:
        path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ValueError, match="^2 of the images") as error:
        opened(tmp_path)
    assert all(word in str(error.value) for word in ("--strict", *map(str, bad)))
    train, test, inventory = opened(tmp_path, strict=False)
    assert (len(train), len(test), len(inventory.unreadable)) == (7, 3, 2)
    assert not {path.as_posix() for path in bad} & (names(train) | names(test))
    assert [train[index]["label"] for index in range(7)] == [0, 0, 0, 1, 1, 1, 1]
    for path in (tmp_path / "train" / "dog").iterdir():
        path.write_bytes(b"x")
    with pytest.raises(ValueError, match=r"no image of the class 'dog' can be read, such as .*0\.jpg: it is none of"):
        opened(tmp_path, strict=False)


def test_many_blank_or_repeated_images_are_reported(tmp_path, capsys):
    """Images are flat, nearly black (12 bits stored in 16) or repeated; `check --csv` lists each of them."""
    noise = np.random.default_rng(0)
    for number in range(6):
        for name in ("flat", "dark", "same", "good"):
            (tmp_path / name).mkdir(exist_ok=True)
            picture = Image.new("L", (20, 20), 40 * number)
            if name == "dark":
                picture = Image.fromarray(noise.integers(0, 4096, (20, 20), dtype=np.uint16))
            elif name != "flat":
                seed = np.random.default_rng(7 if name == "same" else number)
                picture = Image.fromarray(seed.integers(0, 256, (20, 20), dtype=np.uint8))
            picture.save(tmp_path / name / f"{number}.png")
            with open(tmp_path / name / f"{number}.png", "ab") as file:
                file.write(b"x" * number)  # a different file with the same pixels
    printed = "\n".join(opened(tmp_path)[2].problems())
    # One of the six flat images is black, and counts as dark.
    assert "24 of the images were examined; 5 images are of one flat colour (transparent" in printed
    assert (
        "7 images are nearly black, as 12-bit pixels" in printed
        and "5 images are the same picture as another" in printed
    )
    assert main(["check", str(tmp_path), "--csv", str(tmp_path.parent / "inventory.csv")]) == 0
    assert "5 images are of one flat colour (transparent pixels are read as white), such as" in capsys.readouterr().out
    rows = (tmp_path.parent / "inventory.csv").read_text().splitlines()
    assert sum(',blank,"nearly black' in row for row in rows) == 7
    shutil.rmtree(tmp_path / "flat"), shutil.rmtree(tmp_path / "dark"), shutil.rmtree(tmp_path / "same")
    assert not opened(tmp_path)[2].blank


LAYOUTS = {
    "one level too high": (["data set/train/cat", "data set/test/cat"], "data set contains only folders .*pass"),
    "a folder that holds the classes": (
        ["Dataset/cat", "Dataset/dog", "Examples"],
        "Dataset contains only folders .*dog",
    ),
    "one folder of folders": (
        ["animals/cat", "animals/dog"],
        "animals contains only folders .*if these are the classes",
    ),
    "splits by other names": (
        ["seg_train/cat", "seg_train/dog", "seg_test/cat"],
        "--train-split seg_train --test-split seg_test",
    ),
    "a heap": (["images"], "'images', do not look like classes by their names"),
    "heaps for splits": (["train", "test"], "train has no folder; one folder per class is needed"),
    "tests without labels": (
        ["train/cat", "train/dog", "test"],
        ("train: cat dog", "has no class folder: images without labels cannot be tested on, 4 images"),
    ),
    "valid for test": (
        ["train/cat", "train/dog", "valid/cat"],
        ("train: cat dog", "valid: cat", "the test split is 'valid'"),
    ),
    "folders of a system": (
        ["cat", "dog", "@eaDir", "dog/@eaDir", "lost+found", "#recycle", "$RECYCLE.BIN", "__MACOSX/cat"],
        ("train: cat dog", *(["of the operating system"] * 6)),
    ),
    "beside the splits": (["train/cat", "test/cat", "@eaDir"], ("train: cat", "test: cat", "of the operating system")),
    "the outer folders": (["old/cat", "old/dog", "new/cat"], ("train: new old", "the classes are the outer folders")),
    "one outer folder": (
        ["cat", "dog/old", "dog/new"],
        ("train: cat dog", "the class 'dog' is the outer folder; the"),
    ),
    "a class called test": (["cat", "test"], ("train: cat test", "'test' is read as a class; if it is a split")),
    "a class of steam trains": (["steam train", "bus"], ("train: bus steam train",)),
    "months in a class": (["cat/june", "cat/july", "dog"], ("train: cat dog",)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_common_layouts_are_read_or_refused_with_advice(tmp_path, name):
    """Each layout is read as intended, and guesses are reported; or an error names the right folder or flag."""
    folders, expected = LAYOUTS[name]
    photos(tmp_path, dict.fromkeys(folders, 4))
    if isinstance(expected, str):
        for opens in (opened, lambda path: DataSource(path).check()):
            with pytest.raises((ValueError, FileNotFoundError), match=expected):
                opens(tmp_path)
        return
    DataSource(tmp_path).check()
    inventory = opened(tmp_path)[2]
    counts = {split: [name for name, count in of.items() if count] for split, of in inventory.counts.items()}
    lines = [f"{split}: {' '.join(names)}" for split, names in counts.items()]
    lines += [f"{Path(path).name}: {why}" for path, why in inventory.left_out] + inventory.notes
    for words in set(expected):
        assert sum(words in line for line in lines) == expected.count(words), lines


def test_notes_say_what_becomes_of_inner_folders(tmp_path):
    photos(tmp_path, dict.fromkeys(["cat/item0", "cat/item1", "dog/item0", "dog/item1"], 2))
    notes = {
        group: DataSource(str(tmp_path), group=group).open().inventory.notes for group in (None, "folder", "(item.)")
    }
    assert ["if a folder shows one item, use --group folder" in " ".join(of) for of in notes.values()] == [
        True,
        False,
        True,
    ]
    assert "4 groups of images" in notes["folder"][0] and len(notes["folder"]) == 1
    assert "2 groups with images of several classes, such as 'item0'" in notes["(item.)"]


def test_error_names_the_table_beside_images(tmp_path):
    photos(tmp_path, {"images": 2})
    (tmp_path / "labels.csv").write_text("path,label\nimages/0.jpg,cat\n")
    with pytest.raises(ValueError, match=r"pass --labels .*labels\.csv$"):
        opened(tmp_path)


def test_leave_out_and_separate_test_data(tmp_path):
    root = photos(tmp_path / "a", {"train/cat": 4, "train/cat/old": 3, "train/dog": 4, "train/odd": 2, "test/odd": 1})
    with pytest.raises(ValueError, match="no class and no folder of that name"):
        opened(root, leave_out=["cats"])
    photos(root, {"test/cat": 2})
    inventory = opened(root, leave_out=["odd", "cat/old"])[2]
    assert inventory.counts == {"train": {"cat": 4, "dog": 4}, "test": {"cat": 2, "dog": 0}}
    assert sum("left out on request" in why for _, why in inventory.left_out) == 3
    _, test, inventory = opened(root, test_split="none", test_fraction=0.5)
    assert len(test) and not any("test/" in name for name in names(test))
    assert "neither trained nor tested on, 3 images" in inventory.left_out[0][1]
    other = photos(tmp_path / "b", {"cat": 5, "dog": 1})
    for folder in (other, photos(tmp_path / "c", {"train/dog": 1, "test/cat": 5, "test/dog": 1})):
        assert opened(root, test_data=folder)[2].counts["test"] == {"cat": 5, "dog": 1, "odd": 0}
    with pytest.raises(ValueError, match="use only one"):
        opened(root, test_data=other, test_fraction=0.5)


def test_class_spelled_in_two_ways_is_refused(tmp_path):
    photos(tmp_path, {"train/panda": 1, "test/Panda": 1})
    with pytest.raises(
        ValueError, match="'panda' in the training images and 'Panda' in the test images: use one spelling"
    ):
        opened(tmp_path)


SPELLINGS = [
    "Jos\u00e9",
    "JOSE\u0301",
    "jos\u00e9\u200b",
    " jos\u00e9",
    '"Jos\u00e9"',
    "\u2018jos\u00e9\u2019",
    "\uff2aos\u00e9",
]


@pytest.mark.parametrize("other", SPELLINGS)
def test_spellings_of_a_class_name_share_one_key(other):
    """Case, the form of Unicode, blanks, invisible characters and quotation marks do not matter."""
    assert class_key(other) == "jos\u00e9" and class_key("big  \u00a0cat") == "big cat" and class_key("''") == "''"
    assert (
        class_key("red_panda") == class_key("Red-Panda") == "red panda" and class_key("3.0") == class_key("3") == "3"
    )
    assert class_key("-1") == "-1" and class_key("1.5") == "1.5" and class_key("a_") == "a_"
    for names, seen in ((["jos\u00e9 ", other], ()), ([other], ["jos\u00e9 "])):
        with pytest.raises(ValueError, match="names must differ|already seen"):
            check_class_names(names, seen)
    with pytest.raises(ValueError, match="which is reserved for images of no class"):
        check_class_names(["None of these"])


INPUTS = Path(os.environ.get("DULBE_PEFT_INPUTS", Path(__file__).parents[4] / "shared" / "inputs"))
EXPECTED = {  # for each folder of small inputs, the classes that have images or the error's message
    "L-caseclass": "'airplanes' in the training images and 'Airplanes' in the test images: use one spelling",
    "L-eadir2": ["airplanes", "panda", "pizza"],
    "L-flatcsv": "pass --labels .*labels.csv",
    "L-flattest": ["airplanes", "panda", "pizza"],
    "L-meta": ["airplanes", "panda", "pizza"],
    "L-num": ["0", "1", "10", "2"],
    "L-train-valid": ["airplanes", "panda", "pizza"],
    "L-wrapper": "dataset contains only folders .*if these are the splits",
    "alpha2": ["arrow", "heart", "square"],
    "hf-int": ["0", "1", "2"],
    "hf-test-nolabel": ["panda", "pizza", "airplanes"],
    "hf-unused": ["panda", "pizza", "airplanes"],
    "two-label-cols": "has the column 'label' twice",
    "X-iptc": ["airplanes", "panda", "pizza"],
}
READ = ("dup-row", "kaggle-id", "nan", "semicolon", "space-quote-mixed", "space-split", "split-bool", "win-paths")
EXPECTED |= {name: ["airplanes", "panda", "pizza"] for name in READ}


@pytest.mark.skipif(not INPUTS.is_dir(), reason="the folder of small inputs is not here")
@pytest.mark.parametrize("name", EXPECTED)
def test_small_inputs_of_other_programs_are_read(name):
    folder, expected = INPUTS / name, EXPECTED[name]
    table = next((path for path in (folder / "labels.csv", folder / "tags.csv") if path.is_file()), None)
    given = {"vocabulary": str(folder / "words.txt")} if name == "X-iptc" else {}
    data = folder if table is None or name == "L-flatcsv" else table
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            opened(data, **given)
        return
    train, _, inventory = opened(data, **given)
    assert list(train.class_names) == expected and not inventory.blank
    assert sum(inventory.counts["train"].values()) == len(train) >= 8
