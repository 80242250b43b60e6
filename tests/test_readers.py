"""The readers of images, what they refuse, and the fingerprint of a dataset."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import resource
import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, ExifTags, Image

from dulbe_peft.data.fingerprint import fingerprint
from dulbe_peft.data.gallery import Gallery
from dulbe_peft.data.inventory import inspect_images
from dulbe_peft.data.readers import HubImages, ImageFolder, NpzImages, decode_image, load_data, to_rgb
from dulbe_peft.data.samples import read_sample
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


def npz_arrays() -> dict[str, Any]:
    files = [encoded(50 * index, "JPEG") for index in range(5)]
    return {
        "blob": np.frombuffer(b"".join(files), np.uint8),
        "offsets": np.cumsum([0] + [len(file) for file in files]),
        "labels": np.array([0, 1, 1, 0, 1], np.int16),
        "split": np.array([0, 0, 1, 1, 0], np.uint8),
        "names": np.array(["house finch", "robin"]),
    }


@pytest.fixture
def npz(tmp_path: Path) -> Path:
    path = tmp_path / "images.npz"
    np.savez(path, **npz_arrays())
    return path


def red(sample: dict[str, Any]) -> int:
    assert sample["image"].mode == "RGB"
    return int(np.asarray(sample["image"])[0, 0, 0])


def first_sample(reader: Any) -> tuple[int, int]:
    return red(reader[0]), reader[0]["label"]


def test_image_folder_is_sorted_and_labelled(folder):
    data = ImageFolder(folder, "train")
    assert data.class_names == ("Ant eater", "zebra")
    assert data.labels.dtype == np.int64 and data.labels.tolist() == [0, 0, 1, 1] and len(data) == 4
    assert [Path(data.item_name(index)).name for index in range(4)] == ["1.webp", "2.bmp", "a.jpeg", "b.PNG"]
    assert [sample["label"] for sample in (data[index] for index in range(4))] == [0, 0, 1, 1]
    assert (red(data[1]), red(data[3]), red(data[-1])) == (40, 20, 20)
    assert ImageFolder(folder / "train").labels.tolist() == data.labels.tolist()
    with pytest.raises(IndexError):
        data[4]


def test_image_folder_reads_folders_in_class_folders(folder):
    write(folder / "train" / "zebra" / "2025" / "june" / "z.JFIF", encoded(50, "JPEG"))
    write(folder / "train" / "zebra" / "2025" / "a.gif", encoded(60, "GIF"))
    write(folder / "train" / "zebra" / "0.tif", encoded(70, "TIFF"))
    (folder / "train" / "zebra" / "2025" / "later").mkdir()
    data = ImageFolder(folder, "train")
    below = ["0.tif", "2025/a.gif", "2025/june/z.JFIF", "a.jpeg", "b.PNG"]
    assert [data.relative_name(index) for index in range(2, 7)] == [f"zebra/{name}" for name in below]
    assert data.labels.tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert np.allclose([red(data[index]) for index in range(2, 7)], [70, 60, 50, 10, 20], atol=4)
    root = folder / "train"
    assert sorted(data.left_out) == [
        (str(root / ".cache"), "hidden"),
        (str(root / "Ant eater" / "._1.webp"), "hidden"),
        (str(root / "Ant eater" / "notes.txt"), "files ending in .txt are not read"),
        (str(root / "zebra" / "2025" / "later"), "an empty folder"),
    ]


def test_image_folder_reads_a_folder_once_however_often_links_lead_to_it(folder, tmp_path):
    write(tmp_path / "more" / "c.png", encoded(80))
    (folder / "train" / "zebra" / "more").symlink_to(tmp_path / "more")
    (folder / "train" / "zebra" / "again").symlink_to(folder / "train" / "zebra")
    data = ImageFolder(folder, "train")
    assert len(data) == 5 and red(data[4]) == 80
    again = str(folder / "train" / "zebra" / "again")
    assert (again, "a link to a folder that is read already") in data.left_out


def test_image_folder_leaves_out_what_is_no_file(folder):
    os.mkfifo(folder / "train" / "zebra" / "pipe.png")
    (folder / "train" / "empty").mkdir()
    data = ImageFolder(folder, "train")
    assert data.class_names == ("Ant eater", "zebra") and len(data) == 4
    whys = dict(data.left_out)
    assert whys[str(folder / "train" / "zebra" / "pipe.png")] == "neither a file nor a folder"
    assert whys[str(folder / "train" / "empty")] == "an empty folder"


def test_image_folder_follows_links_and_reports_dangling_ones(folder, tmp_path):
    link = folder / "train" / "zebra" / "c.png"
    link.symlink_to(folder / "test" / "zebra" / "b.PNG")
    assert red(ImageFolder(folder, "train")[-1]) == 20
    link.unlink()
    link.symlink_to(tmp_path / "gone.png")
    with pytest.raises(ValueError, match=r"image 4 \(.*c\.png is a link to .*gone\.png, which does not exist"):
        ImageFolder(folder, "train")[4]


def test_image_folder_says_what_is_missing(folder):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        ImageFolder(folder / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no split 'val'; its folders are \['test', 'train'\]"):
        ImageFolder(folder, "val")
    with pytest.raises(ValueError, match="'test' may be a split"):
        ImageFolder(folder)
    with pytest.raises(ValueError, match="zebra has no folder"):
        ImageFolder(folder / "train" / "zebra")
    write(folder / "train" / "raw" / "1.heic", b"")
    with pytest.raises(ValueError, match=r"class folder .*raw has no \.jpg.* \(files ending in \.heic are not read\)"):
        ImageFolder(folder, "train")


@pytest.mark.parametrize(
    "damage", [lambda content: content[: len(content) // 2], lambda content: b"", lambda _: b"text"]
)
def test_a_damaged_image_is_named(folder, npz, damage):
    path = folder / "train" / "zebra" / "b.PNG"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"image 3 \(.*b\.PNG\) cannot be read"):
        ImageFolder(folder, "train")[3]


def test_a_damaged_image_in_an_npz_is_named(tmp_path):
    arrays = npz_arrays()
    blob = arrays["blob"].copy()
    blob[arrays["offsets"][4] :] = 0
    np.savez(tmp_path / "x.npz", **{**arrays, "blob": blob})
    with pytest.raises(ValueError, match=r"image 2 \(.*x\.npz\[4\]\) cannot be read"):
        NpzImages(tmp_path / "x.npz", "train")[2]


@pytest.mark.filterwarnings("error")
def test_every_mode_becomes_rgb(tmp_path):
    def through_file(image: Image.Image, suffix: str = "png", **options: Any) -> list[int]:
        path = tmp_path / f"image.{suffix}"
        image.save(path, **options)
        decoded = decode_image(path, 0, "x")
        assert decoded.mode == "RGB"
        return np.asarray(decoded)[0, 0].tolist()

    assert through_file(Image.new("L", (2, 2), 70)) == [70, 70, 70]
    assert through_file(Image.new("LA", (2, 2), (70, 0))) == [70, 70, 70]
    assert through_file(Image.new("RGBA", (2, 2), (1, 2, 3, 0))) == [1, 2, 3]
    assert through_file(Image.new("1", (2, 2), 1)) == [255, 255, 255]
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, 9, 8, 7])
    assert through_file(palette) == [9, 8, 7]
    assert through_file(palette, transparency=bytes([0, 128])) == [9, 8, 7]
    assert np.allclose(through_file(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "jpg"), [255, 0, 0], atol=6)
    assert through_file(Image.fromarray(np.full((2, 2), 65535 // 2, np.uint16))) == [127, 127, 127]
    with pytest.raises(ValueError, match="mode 'F' have no fixed range"):
        through_file(Image.new("F", (2, 2)), "tiff")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_splits(tmp_path, save):
    save(tmp_path / "x.npz", **npz_arrays())
    train, test = (NpzImages(tmp_path / "x.npz", split) for split in ("train", "test"))
    assert train.class_names == ("house finch", "robin")
    assert (train.labels.tolist(), test.labels.tolist()) == ([0, 1, 1], [1, 0])
    assert np.allclose([red(train[index]) for index in range(3)], [0, 50, 200], atol=3)
    assert np.allclose([red(test[index]) for index in range(2)], [100, 150], atol=3)
    assert [train[index]["label"] for index in range(3)] == [0, 1, 1]
    assert [train.item_name(2), test.item_name(-1)] == [f"{tmp_path / 'x.npz'}[{index}]" for index in (4, 3)]


def test_npz_maps_its_images_instead_of_reading_them(npz):
    assert isinstance(NpzImages(npz, "train")._blob, np.memmap)


def change(key: str, value: Any) -> Any:
    return lambda arrays: arrays.update({key: value(arrays[key])})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda arrays: arrays.pop("split"), "'split' is missing"),
        (change("blob", lambda a: a.astype(np.uint16)), "blob has type uint16"),
        (change("blob", lambda a: a.astype(object)), "no .npz file of images"),
        (change("blob", lambda a: a[:-1]), "but blob has"),
        (change("offsets", lambda a: a[:-1]), "lengths 5, 5 and 5"),
        (change("offsets", lambda a: np.append(a[:-2], [a[-1], a[-1]])), "image 4 has 0 bytes"),
        (change("offsets", lambda a: a[::-1].copy()), "offsets must increase"),
        (change("offsets", lambda a: a - 1), "offsets run from -1"),
        (change("offsets", lambda a: a.astype(float)), "offsets has shape"),
        (change("labels", lambda a: a + 1), r"labels run from 1 to 2; they must lie in 0\.\.1"),
        (change("labels", lambda a: a.astype(bool)), "labels has shape .* bool"),
        (change("split", lambda a: a * 0), "no image in the split 'test'"),
        (change("split", lambda a: a * 2), r"split holds \[0, 2\]"),
        (change("names", lambda a: np.array(["robin", "robin"])), "both 'robin'"),
        (change("names", lambda a: a.astype(object)), "no .npz file of images"),
    ],
)
def test_a_malformed_npz_is_refused(tmp_path, damage, message):
    arrays = npz_arrays()
    damage(arrays)
    np.savez(tmp_path / "x.npz", **arrays)
    with pytest.raises(ValueError, match=message):
        NpzImages(tmp_path / "x.npz", "test")


def test_a_file_that_is_no_npz_is_refused(tmp_path, npz):
    for content in (b"", b"text", npz.read_bytes()[:-40]):
        (tmp_path / "x.npz").write_bytes(content)
        with pytest.raises(ValueError, match=r"x\.npz is no \.npz file of images"):
            NpzImages(tmp_path / "x.npz", "train")
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("blob.npy", b"text")
    with pytest.raises(ValueError, match="missing"):
        NpzImages(tmp_path / "x.npz", "train")
    with pytest.raises(ValueError, match="split is 'val'.*train, test"):
        NpzImages(npz, "val")
    with pytest.raises(FileNotFoundError, match="gone"):
        NpzImages(tmp_path / "gone.npz", "train")


def damaged(content: bytes, draw: np.random.Generator) -> bytes:
    """Some bytes changed, cut off or repeated, half of the time near the structure of the archive."""
    data = bytearray(content)
    for _ in range(int(draw.integers(1, 4))):
        near = [content.find(b"PK", int(draw.integers(len(content)))), content.find(b"NUMPY")]
        place = int(draw.integers(len(data))) if draw.random() < 0.5 else max(0, near[0], near[1]) % len(data)
        place = min(len(data) - 1, place + int(draw.integers(0, 60)))
        match int(draw.integers(5)):
            case 0:
                data[place] ^= 1 << int(draw.integers(8))
            case 1:
                data[place : place + 8] = draw.bytes(8)
            case 2:
                data[place : place + 4] = b"\xff" * 4
            case 3:
                del data[place : place + int(draw.integers(1, 50))]
            case _:
                data[place:place] = data[: int(draw.integers(1, 50))]
        if not data:
            return b""
    return bytes(data)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_whichever_bytes_of_an_npz_are_damaged_the_error_names_the_file(tmp_path, save):
    path, draw = tmp_path / "x.npz", np.random.default_rng(0)
    save(path, **npz_arrays())
    content, refused = path.read_bytes(), 0
    for _ in range(200):
        path.write_bytes(damaged(content, draw))
        try:
            for split in ("train", "test"):
                data = NpzImages(path, split)
                for index in range(len(data)):
                    assert data[index]["image"].size and data.item_name(index)
        except ValueError as error:
            refused += 1
            assert str(path) in str(error)
    assert refused > 100


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    ("key", "header"),
    [
        ("blob", "{'descr': '|u1', 'fortran_order': False, 'shape': (1099511627776,), }"),
        ("labels", "{'descr': '<i8', 'fortran_order': False, 'shape': (1099511627776,), }"),
        ("names", "{'descr': '<U0', 'fortran_order': False, 'shape': (1099511627776,), }"),
        ("names", "{'descr': '<U99999999', 'fortran_order': False, 'shape': (99999,), }"),
        ("split", "{'descr': '<i8', 'fortran_order': False, 'shape': (" + "1, " * 3000 + "), }"),
        ("split", "(" * 9000),
    ],
)
def test_an_npz_takes_no_memory_by_what_it_claims(tmp_path, key, header, compression):
    path = tmp_path / "x.npz"
    np.savez(path, **npz_arrays())
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    text = header.encode().ljust(16374) + b"\n"
    members[f"{key}.npy"] = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + b"\0" * 64
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with memory_limit(2**33), pytest.raises(ValueError, match=r"x\.npz is no \.npz file of images"):
        NpzImages(path, "train")


@contextmanager
def memory_limit(size: int) -> Iterator[None]:
    """No more than `size` bytes of addresses beside those in use."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_compressed_array_may_not_be_a_thousand_times_as_large_as_the_file(tmp_path):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, **{**npz_arrays(), "blob": np.zeros(2**26, np.uint8)})
    assert path.stat().st_size < 2**18
    with pytest.raises(ValueError, match=r"x\.npz.*blob claims \d+ bytes, more than a file of \d+ bytes can hold"):
        NpzImages(path, "train")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("key", ["blob", "labels"])
@pytest.mark.parametrize("more", [-1, 1])
def test_an_npz_array_has_as_many_bytes_as_its_shape_says(tmp_path, save, key, more):
    path = tmp_path / "x.npz"
    arrays = npz_arrays()
    save(path, **arrays)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    length = len(arrays[key])
    old, new = (f"'shape': ({count},)".encode() for count in (length, length + more))
    assert len(old) == len(new) and old in members[f"{key}.npy"]
    members[f"{key}.npy"] = members[f"{key}.npy"].replace(old, new)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(ValueError, match=rf"x\.npz.*{key} claims the shape \({length + more},\)"):
        NpzImages(path, "train")


def test_npz_offsets_that_wrap_around_are_refused(tmp_path):
    wild = np.array([0, 2**62, -(2**63) + 2**62, -(2**62), 0, 40], dtype=np.int64)
    np.savez(tmp_path / "x.npz", **{**npz_arrays(), "offsets": wild})
    with pytest.raises(ValueError, match="offsets run from"):
        NpzImages(tmp_path / "x.npz", "train")


@pytest.mark.slow
def test_readers_go_to_worker_processes(folder, npz):
    readers = [ImageFolder(folder, "train"), NpzImages(npz, "test")]
    for reader in readers:
        assert first_sample(pickle.loads(pickle.dumps(reader))) == first_sample(reader)
    size = NpzImages(npz, "test")._blob.nbytes
    assert len(pickle.dumps(readers[1])) < size  # the images stay behind
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(first_sample, readers) == [first_sample(reader) for reader in readers]


def test_load_data_chooses_by_the_path(folder, npz, tmp_path):
    assert isinstance(load_data(folder, split="test"), ImageFolder)
    assert load_data(str(folder / "train"), split=None).class_names == ("Ant eater", "zebra")
    assert load_data(npz).split == "train"
    with pytest.raises(ValueError, match="needs a split, one of train, test"):
        load_data(npz, split=None)
    with pytest.raises(FileNotFoundError, match='written "hf:user/birds"'):
        load_data("user/birds")
    write(tmp_path / "x.tar", b"")
    with pytest.raises(ValueError, match=r"x\.tar is neither a folder nor an \.npz file"):
        load_data(tmp_path / "x.tar")


def hub_dataset(datasets: Any, label_type: Any = None) -> Any:
    label_type = label_type or datasets.ClassLabel(names=["finch", "robin"])
    features = datasets.Features({"img": datasets.Image(), "fine": label_type, "extra": datasets.Value("string")})
    images = [{"bytes": content, "path": None} for content in (encoded(5), encoded(6), b"damaged")]
    columns = {"img": images, "fine": [1, 0, 1], "extra": ["x", "y", "z"]}
    return datasets.Dataset.from_dict(columns, features=features)


def test_load_data_reads_saved_hugging_face_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    columns = {"image_column": "img", "label_column": "fine"}
    datasets.DatasetDict(train=hub_dataset(datasets)).save_to_disk(tmp_path / "dict")
    hub_dataset(datasets).save_to_disk(tmp_path / "single")
    for path in (tmp_path / "dict", tmp_path / "single"):
        data = load_data(path, **columns)
        assert isinstance(data, HubImages) and data.class_names == ("finch", "robin")
        assert data.labels.tolist() == [1, 0, 1] and (red(data[1]), data[1]["label"]) == (6, 0)
        with pytest.raises(ValueError, match=rf"image 2 \({path}\[2\]\) cannot be read"):
            data[2]
    with pytest.raises(FileNotFoundError, match=r"no split 'test'; its splits are \['train'\]"):
        load_data(tmp_path / "dict", split="test", **columns)
    with pytest.raises(ValueError, match=r"no column 'image'; its columns are \['img', 'fine', 'extra'\]"):
        load_data(tmp_path / "dict")
    with pytest.raises(ValueError, match="'fine' .* no class names"):
        HubImages(hub_dataset(datasets, datasets.Value("int64")), "x", **columns)


def test_hugging_face_datasets_are_decoded_with_our_formats_and_turned_upright(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
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
    assert to_rgb(read_sample(plain, 0)[0]).size == (4, 8) and read_sample(plain, 0)[1] == 0
    tasks = class_incremental_tasks(plain, increment=2)
    for refused in (lambda: read_sample(plain, 1), lambda: tasks[0].train[1], lambda: Gallery(plain)[1]):
        with pytest.raises((ValueError, OSError), match="cannot identify image file"):
            refused()
    assert inspect_images(plain).positions == {"images": [1, 2]}
    assert read_sample(plain.with_transform(lambda batch: {"image": ["x"], "label": [7]}), 0) == ("x", 7)
    data = HubImages(plain, "birds")
    assert data[0]["image"].size == (4, 8)
    with pytest.raises(ValueError, match=r"image 1 \(birds\[1\]\) cannot be read: it is none of the formats"):
        data[1]
    assert not started
    with pytest.raises(ValueError, match=r"image 2 \(birds\[2\]\) has no bytes and no file on this machine"):
        data[2]
    with pytest.raises(ValueError, match="column 'label' of birds holds ClassLabel values, and no images"):
        HubImages(data.dataset.add_column("other", [1, 2, 3]), "birds", image_column="label")


def test_load_data_asks_the_hub_by_name(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name: str, split: str) -> Any:
        asked.append((name, split))
        return hub_dataset(datasets)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    data = load_data("hf:user/birds", "test", image_column="img", label_column="fine")
    assert asked == [("user/birds", "test")]
    assert data.item_name(1) == "hf:user/birds[1]"


def test_without_the_datasets_package_the_error_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    write(tmp_path / "saved" / "state.json", b"{}")
    for place in ("hf:user/birds", tmp_path / "saved"):
        with pytest.raises(ImportError, match=r'pip install "dulbe_peft\[datasets\]"'):
            load_data(place)


def test_fingerprint_follows_the_content_and_not_the_place(folder, tmp_path):
    original = fingerprint(ImageFolder(folder, "train"))
    assert len(original) == 64 and original == fingerprint(ImageFolder(folder, "train"))
    shutil.copytree(folder, tmp_path / "copy")
    copy = tmp_path / "copy" / "train"
    assert fingerprint(ImageFolder(copy)) == original
    seen = {original}

    def changed() -> None:
        digest = fingerprint(ImageFolder(copy))
        assert digest not in seen
        seen.add(digest)

    os.rename(copy / "zebra" / "b.PNG", copy / "zebra" / "c.png")
    changed()
    with open(copy / "zebra" / "c.png", "ab") as file:
        file.write(b"more")
    changed()
    os.rename(copy / "zebra", copy / "zebu")
    changed()
    write(copy / "zebu" / "d.png", encoded(1))
    changed()


def test_fingerprint_of_npz_and_tasks(npz, tmp_path):
    def task_prints(path: Path) -> list[str]:
        return [fingerprint(task.train) for task in class_incremental_tasks(NpzImages(path, "train"), increment=1)]

    whole = fingerprint(NpzImages(npz, "train"))
    assert whole != fingerprint(NpzImages(npz, "test"))
    assert task_prints(npz) == task_prints(npz) and len({whole, *task_prints(npz)}) == 3
    for key, value in (
        ("labels", np.array([0, 1, 1, 0, 0])),
        ("names", np.array(["house finch", "Robin"])),
        ("offsets", npz_arrays()["offsets"] - np.array([0, 0, 0, 0, 1, 0])),
    ):
        np.savez(tmp_path / "x.npz", **{**npz_arrays(), key: value})
        assert fingerprint(NpzImages(tmp_path / "x.npz", "train")) != whole, key
    np.savez(tmp_path / "x.npz", **npz_arrays())
    assert fingerprint(NpzImages(tmp_path / "x.npz", "train")) == whole


def test_fingerprint_of_plain_datasets():
    image = np.zeros((4, 4, 3), dtype=np.uint8)
    rows = [(Image.fromarray(image), 0), (Image.fromarray(image + 1), 1)]
    original = fingerprint(rows)
    assert original == fingerprint([(picture.copy(), label) for picture, label in rows])
    assert fingerprint([(rows[0][0], 1), rows[1]]) != original
    assert fingerprint([rows[0], (Image.fromarray(image + 2), 1)]) != original
    assert fingerprint([(torch.zeros(3, 2, 2), 0)]) != fingerprint([(torch.zeros(3, 2, 2) + 1e-6, 0)])


def test_fingerprint_of_images_that_differ_each_time_or_cannot_be_read():
    class Augmented:
        labels = [0, 1]

        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.rand(3, 2, 2), index

    assert fingerprint(Augmented(), look=False) == fingerprint(Augmented(), look=False)
    assert fingerprint(Augmented()) != fingerprint(Augmented())
    assert fingerprint([(None, 0)]) == fingerprint([(object(), 0)])


@pytest.mark.skipif("DULBE_DATA" not in os.environ, reason="DULBE_DATA names no folder with miniimagenet75.npz")
def test_photographs():
    path = Path(os.environ["DULBE_DATA"]) / "miniimagenet75.npz"
    train, test = load_data(path, "train"), load_data(path, "test")
    assert (len(train), len(test), len(train.class_names)) == (7500, 3000, 75)
    tasks = class_incremental_tasks(train, test, increment=15, seed=1993)
    assert [(len(task.train), len(task.test), len(task.class_names)) for task in tasks] == [(1500, 600, 15)] * 5
    sample = tasks[4].test[-1]
    assert sample["image"].size == (64, 64) and 0 <= sample["label"] < 15
