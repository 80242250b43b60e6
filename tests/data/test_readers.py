"""Test the readers of images, the conversion of users' data sets, and the fingerprint of a data set."""

import io
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, ExifTags, Image
from small_runs import opened

from dulbe_peft.data.folders import UNFIT, ImageFolder, folder_content
from dulbe_peft.data.hub import hub_images
from dulbe_peft.data.images import labelled_images
from dulbe_peft.data.readers import load_data
from dulbe_peft.data.unlabelled import unlabelled_images
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.data.looking import inspect_images
from dulbe_peft.streams.tasks import class_incremental_tasks


def encoded(value: int, file_format: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 3), (value, 0, 255 - value)).save(buffer, file_format)
    return buffer.getvalue()


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    for split in ("train", "test"):
        write(root / split / "zebra" / "b.PNG", encoded(20))
        write(root / split / "zebra" / "a.jpeg", encoded(10, "JPEG"))
        write(root / split / "Ant eater" / "1.webp", encoded(30, "WEBP"))
        write(root / split / "Ant eater" / "2.bmp", encoded(40, "BMP"))
        write(root / split / "Ant eater" / "notes.txt", b"no image")
        write(root / split / "Ant eater" / "._1.webp", b"resource fork")
        write(root / split / ".cache" / "c.png", b"hidden")
    return root


def red(sample: dict[str, Any]) -> int:
    assert sample["image"].mode == "RGB"
    return int(np.asarray(sample["image"])[0, 0, 0])


def test_image_folder_reads_nested_folders_and_reports_skipped_files(folder, tmp_path):
    zebra = folder / "train" / "zebra"
    write(zebra / "2025" / "june" / "z.JFIF", encoded(50, "JPEG"))
    write(zebra / "2025" / "a.gif", encoded(60, "GIF"))
    write(zebra / "0.tif", encoded(70, "TIFF"))
    write(tmp_path / "more" / "c.png", encoded(80))
    (zebra / "2025" / "later").mkdir()
    (zebra / "more").symlink_to(tmp_path / "more")
    (zebra / "again").symlink_to(zebra)
    (folder / "train" / "empty").mkdir()
    os.mkfifo(zebra / "pipe.png")
    (zebra / "z.png").symlink_to(tmp_path / "gone.png")
    with open(os.fsencode(zebra) + b"/\xff.png", "wb") as file:
        file.write(encoded(90))
    for link in (folder / "far", folder / "train" / "far", folder / "train" / "far.png"):
        link.symlink_to("x" * 300)  # the target's name is too long for any file
    data = ImageFolder(folder, "train")
    below = ["0.tif", "2025/a.gif", "2025/june/z.JFIF", "a.jpeg", "b.PNG", "more/c.png", "z.png"]
    assert [data.item_name(index) for index in range(2, 9)] == [str(zebra / name) for name in below]
    assert data.labels.tolist() == [0, 0] + [1] * 7 and data.class_names == ("Ant eater", "zebra")
    assert np.allclose([red(data[index]) for index in range(2, 8)], [70, 60, 50, 10, 20, 80], atol=4)
    with pytest.raises(ValueError, match=r"image 8 \(.*z\.png is a link to .*gone\.png, which does not exist"):
        data[8]
    root = folder / "train"
    assert {
        (str(root / ".cache"), "hidden"),
        (str(root / "Ant eater" / "._1.webp"), "hidden"),
        (str(root / "Ant eater" / "notes.txt"), "a file ending in .txt is not read"),
        (str(root / "empty"), "an empty folder"),
        (str(zebra / "2025" / "later"), "an empty folder"),
        (str(zebra / "again"), "a link to a folder that has already been read"),
        (str(zebra / "pipe.png"), "neither a file nor a folder"),
        (str(root / "far.png"), "not in a class folder"),
        (str(zebra / "\udcff.png"), "the name is not UTF-8"),
    } <= set(data.left_out)
    assert "\udcff.png" in folder_content(zebra)[0], "prediction accepts any file name"


def test_image_folder_error_says_what_is_missing(folder):
    write(folder / "raw" / "psd" / "1.psd", b"")
    for root, split, words in (
        (folder / "nowhere", None, "nowhere is not a folder of images"),
        (folder, "val", r"no split 'val'; its folders are \['raw', 'test', 'train'\]"),
        (folder, None, "if 'test' is a split, pass its name"),
        (folder / "train" / "zebra", None, "zebra has no folder.* without classes, use predict, suggest or serve"),
        (folder, "raw", r"class folder .*psd has no \.jpg.* \(drawings and documents are not read"),
    ):
        with pytest.raises((FileNotFoundError, ValueError), match=words):
            ImageFolder(root, split)


def test_load_data_chooses_the_reader_by_the_path(folder, tmp_path, monkeypatch):
    assert isinstance(load_data(folder, split="test"), ImageFolder)
    assert load_data(str(folder / "train"), split=None).class_names == ("Ant eater", "zebra")
    assert load_data("demo-digits", "test").class_names[3] == "three"
    write(tmp_path / "x.tar", b"")
    write(tmp_path / "saved" / "state.json", b"{}")
    write(tmp_path / "parquet" / "train.parquet", b"")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for path, words in (
        ("user/birds", 'write "hf:user/birds"'),
        ("labels.csv", "^labels.csv does not exist$"),
        (tmp_path / "x.tar", "file: it is an archive: unpack"),
        *((at, r'pip install "\.\[datasets\]"') for at in ("hf:x", tmp_path / "saved", tmp_path / "parquet")),
    ):
        with pytest.raises((FileNotFoundError, ValueError, ImportError), match=words):
            load_data(path)


@pytest.fixture
def datasets(tmp_path, monkeypatch) -> Any:
    library = pytest.importorskip("datasets")
    library.disable_progress_bars()
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return library


def birds(datasets: Any, contents: list[bytes], image: str = "image", label: str = "label") -> Any:
    features = datasets.Features({image: datasets.Image(), label: datasets.ClassLabel(names=["finch", "robin"])})
    rows = [{"bytes": content, "path": None} for content in contents]
    return datasets.Dataset.from_dict({image: rows, label: [1, 0, 1][: len(rows)]}, features=features)


@pytest.mark.parametrize(
    "files", [["train.parquet"], ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]]
)
def test_parquet_layouts_of_the_hub_are_read(datasets, tmp_path, files):
    root = tmp_path / "birds"
    (root / "data").mkdir(parents=True)
    for number, file in enumerate(files):
        birds(datasets, [encoded(40 + number), encoded(50 + number)]).to_parquet(root / file)
    birds(datasets, [encoded(60), b"damaged"]).to_parquet((root / files[0]).with_name("test.parquet"))
    (root / "odd.parquet").write_bytes(b"")
    before = sorted(root.rglob("*"))
    train, test = load_data(root, "train"), load_data(root, "test")
    assert train.class_names == test.class_names == ("finch", "robin")
    assert train.labels.tolist() == [1, 0] * len(files) and [s["label"] for s in train] == train.labels.tolist()
    assert [red(sample) for sample in train] == [40, 50, 41, 51][: len(train)]
    for call, words in (
        (lambda: test[1], rf"image 1 \({root}\[1\]\) cannot be read: it is none of the formats"),
        (lambda: opened(root), r"1 of the images in .*birds cannot be read:\n  .*birds\[1\]: it is none"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            call()
    parts = opened(root, strict=False)
    assert [len(part) for part in parts[:2]] == [len(train), 1] and red(parts[1][0]) == 60
    assert sorted(root.rglob("*")) == before  # nothing is written beside the data


def test_datasets_saved_to_disk_are_read_with_their_splits(datasets, tmp_path):
    columns = {"image_column": "img", "label_column": "fine"}
    data = birds(datasets, [encoded(5), encoded(6), b"damaged"], "img", "fine")
    datasets.DatasetDict(train=data).save_to_disk(tmp_path / "dict")
    data.save_to_disk(tmp_path / "single")
    for path in (tmp_path / "dict", tmp_path / "single"):
        loaded = load_data(path, **columns)
        assert loaded.class_names == ("finch", "robin")
        assert loaded.labels.tolist() == [1, 0, 1] and (red(loaded[1]), loaded[1]["label"]) == (6, 0)
    unnamed = data.cast_column("fine", datasets.Value("float32"))
    for call, words in (
        (lambda: load_data(tmp_path / "dict", "test", **columns), r"no split 'test'; its splits are \['train'\]"),
        (lambda: load_data(tmp_path / "dict"), r"no column 'image'; its columns are \['img', 'fine'\]"),
        (lambda: hub_images(unnamed, "x", "img", "fine"), "'fine' of x has float values: expected class names"),
        (lambda: hub_images(data, "x", "fine", "fine"), "column 'fine' of x has ClassLabel values: expected images"),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=words):
            call()
    valid = birds(datasets, [encoded(5), encoded(6)])
    datasets.DatasetDict(train=valid, test=valid, val=valid).save_to_disk(tmp_path / "three")
    valid.save_to_disk(tmp_path / "one")
    train, test, inventory = opened(tmp_path / "three")
    assert len(train) == len(test) == 2 and inventory.left_out[0][0].endswith("three[val]")
    train, test, _ = opened(tmp_path / "one")
    assert len(train) == 2 and test is None


@pytest.mark.parametrize("values", [["robin", "finch"], [10, 2], [7, -1]])
@pytest.mark.parametrize("file", ["train.parquet", "default/train/0000.parquet", "0000.parquet"])
def test_text_and_number_labels_become_class_names(datasets, tmp_path, values, file):
    """Numbers are sorted as numbers. A file whose name shows no split belongs to none."""
    root = tmp_path / "birds"
    (root / file).parent.mkdir(parents=True)
    kind = datasets.Value("string" if values[0] == "robin" else "int64")
    features = datasets.Features({"image": datasets.Image(), "label": kind})
    rows = [{"bytes": encoded(40 + place), "path": None} for place in range(2)]
    datasets.Dataset.from_dict({"image": rows, "label": values}, features=features).to_parquet(root / file)
    train, test, _ = opened(root if "train" in file else root / file)
    assert train.class_names == tuple(map(str, sorted(values))) and test is None
    assert [train.class_names[sample["label"]] for sample in train] == list(map(str, values))
    assert [red(sample) for sample in train] == [40, 41]


def test_unlabelled_test_images_and_classes_without_images_are_left_out(datasets, tmp_path):
    kind = datasets.ClassLabel(names=["unused", "finch", "robin"])
    for split, labels in (("train", [1, 2]), ("test", [-1, -1])):
        rows = [{"bytes": encoded(40 + place), "path": None} for place in range(2)]
        features = datasets.Features({"image": datasets.Image(), "label": kind})
        datasets.Dataset.from_dict({"image": rows, "label": labels}, features=features).to_parquet(
            tmp_path / f"{split}.parquet"
        )
    train, test, inventory = opened(tmp_path)
    assert train.class_names == ("finch", "robin") and train.labels.tolist() == [0, 1] and test is None
    assert "all of its labels are -1: images without labels cannot be tested on" in inventory.left_out[0][1]
    assert inventory.notes == ["left out: 1 class without images, such as 'unused'"]


def test_error_for_a_webdataset_says_how_to_convert_it(tmp_path):
    write(tmp_path / "000.tar", b"")
    with pytest.raises(ValueError, match=r"load_dataset\(.webdataset., .*save_to_disk"):
        load_data(tmp_path)


def test_dataset_images_are_upright_and_never_start_ghostscript(datasets, monkeypatch):
    started: list[int] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: started.append(1))
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    lying = io.BytesIO()
    Image.new("RGB", (8, 4)).save(lying, "JPEG", exif=exif)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    contents = [lying.getvalue(), b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n"]
    rows = [{"bytes": content, "path": None} for content in contents] + [{"bytes": None, "path": "http://x/y.jpg"}]
    plain = datasets.Dataset.from_dict({"image": rows, "label": [0, 1, 1]}, features=features)
    (task,) = class_incremental_tasks(plain, increment=2)
    for images in (task.train, unlabelled_images(plain), hub_images(plain, "birds")):
        assert images[0]["image"].size == (4, 8)
        with pytest.raises(ValueError, match="image 1 .* cannot be read: it is none of the formats"):
            images[1]
        with pytest.raises(ValueError, match="image 2 .* cannot be read: it has no bytes and no file on this machine"):
            images[2]
    assert [image.place for image, _ in inspect_images(plain).unreadable] == [1, 2] and not started
    with pytest.raises(ValueError, match=r"columns \['image', 'fine'\]"):
        labelled_images(plain.rename_column("label", "fine"))
    other = labelled_images(plain.with_transform(lambda batch: {"image": ["x"], "label": [0]}))
    assert other[0] == {"image": "x", "label": 0}


def test_load_data_requests_a_hub_dataset_by_name(datasets, monkeypatch):
    requests = []

    def load_dataset(name: str, split: str) -> Any:
        requests.append((name, split))
        return birds(datasets, [encoded(5), encoded(6)], "img", "fine")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets, "get_dataset_split_names", lambda name: ["train", "test"])
    data = load_data("hf:user/birds", "test", image_column="img", label_column="fine")
    assert requests == [("user/birds", "test")] and data.item_name(1) == "hf:user/birds[1]"
    with pytest.raises(FileNotFoundError, match=r"no split None; its splits are \['train', 'test'\]"):
        load_data("hf:user/birds", None)


class Listed:
    """A data set with a list of labels `targets`, which the labels of its items may contradict."""

    def __init__(self, targets: list[Any], item_labels: list[Any]) -> None:
        self.targets, self.item_labels = targets, item_labels

    def __len__(self) -> int:
        return len(self.item_labels)

    def __getitem__(self, index: int) -> tuple[Image.Image, Any]:
        return Image.new("RGB", (8, 8)), self.item_labels[index]

    def item_name(self, index: int) -> str:
        return f"photo-{index}.jpg"


def test_items_that_contradict_the_list_of_labels_are_refused():
    images = labelled_images(Listed([0, 1, 0], [0, 1, 1]))
    assert images[1]["label"] == 1 and images.item_name(2) == "photo-2.jpg"
    for part, index in ((images, 2), (images.at([2, 1]), 0), (images.at([2], np.array([5])), 0)):
        with pytest.raises(ValueError, match="its label is 1, .* list of labels has 0"):
            part[index]
    half = torch.tensor(1, dtype=torch.bfloat16)
    for data, words in (
        (Listed([half], [0]), "dataset.targets must hold ints: .*BFloat16"),
        ([(Image.new("RGB", (8, 8)), half)], "the label of sample 0 must hold ints: .*BFloat16"),
    ):
        with pytest.raises(TypeError, match=words):
            labelled_images(data)


def test_overridden_getitem_of_a_subclass_is_used(folder):
    class Grey(ImageFolder):
        def __getitem__(self, index):
            sample = super().__getitem__(index)
            return {**sample, "image": sample["image"].convert("L")}

    images = labelled_images(Grey(folder, "train"))
    assert len(set(images[0]["image"].getpixel((0, 0)))) == 1 and images.class_names == ("Ant eater", "zebra")
    assert len(set(ImageFolder(folder, "train")[0]["image"].getpixel((0, 0)))) > 1


def test_fingerprint_depends_on_content_and_not_on_paths(folder, tmp_path):
    original = ImageFolder(folder, "train").fingerprint()
    copy = shutil.copytree(folder / "train", tmp_path / "copy")
    assert len(original) == 64 and ImageFolder(copy).fingerprint() == original
    zebra, seen = copy / "zebra", {original}
    (zebra / "b.PNG").rename(zebra / "c.png")
    assert ImageFolder(copy).fingerprint() == original
    (zebra / "c.png").rename(zebra / "b.PNG")
    for number, change in enumerate(
        (
            lambda: write(zebra / "b.PNG", (zebra / "b.PNG").read_bytes() + b"more"),
            lambda: write(zebra / "d.png", encoded(1)),
            lambda: zebra.rename(copy / "zebu"),
        ),
        2,
    ):
        change()
        seen.add(ImageFolder(copy).fingerprint())
        assert len(seen) == number
    tasks = class_incremental_tasks(ImageFolder(copy), increment=1)
    assert len({task.train.fingerprint() for task in tasks} | seen) == 6


def test_fingerprint_of_a_list_depends_on_pixels_and_labels():
    image = np.zeros((4, 4, 3), dtype=np.uint8)
    rows = [(Image.fromarray(image), 0), (Image.fromarray(image + 1), 1)]
    original = labelled_images(rows).fingerprint()
    assert original == labelled_images([(picture.copy(), label) for picture, label in rows]).fingerprint()
    assert labelled_images([(rows[0][0], 1), rows[1]]).fingerprint() != original
    assert labelled_images([rows[0], (Image.fromarray(image + 2), 1)]).fingerprint() != original


def test_folder_whose_name_has_a_newline_is_left_out_and_check_shows_the_rest(folder, capsys):
    write(folder / "train" / "tw\no" / "x.png", encoded(10))
    data = ImageFolder(folder, "train")
    assert data.class_names == ("Ant eater", "zebra")
    assert (str(folder / "train" / "tw\no" / "x.png"), UNFIT) in data.left_out
    assert main(["check", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "zebra" in said and f"{UNFIT}, such as {folder / 'train'}/tw\\no/x.png" in said
