"""Threads read images ahead of the model: the same values in order, few at a time, and none after an error."""

import copy
import os
import pickle
import shutil
import threading
import time

import numpy as np
import pytest
import torch
from lives import images_of, tiny_learner
from PIL import Image

from dulbe_peft.data.images import labelled_images
from dulbe_peft.data.readers import load_data
from dulbe_peft.data.store import FeatureStore
from dulbe_peft.encoders import pixels as reading
from dulbe_peft.encoders.pixels import PixelDataset, read_batches, reading_threads
from dulbe_peft.photos.data.looking import undecodable

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("written")
    for number in range(40):
        random = np.random.default_rng(number)
        place = root / "train" / "ab"[number % 2] / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(place)
    return root


@pytest.fixture
def folder(written, tmp_path):
    return shutil.copytree(written, tmp_path, dirs_exist_ok=True)


@pytest.fixture
def four_threads(monkeypatch):
    monkeypatch.setattr(reading, "reading_threads", lambda device: 4)


def frozen(**fields):
    return tiny_learner("frozen", ("lda",), **fields)


def rows_of(learner, images, size=3):
    pixels = learner.encoder.images(images)
    batches = [list(range(len(images)))[start : start + size] for start in range(0, len(images), size)]
    return pixels, read_batches(pixels, batches, learner.args, CPU, "read")


def test_threads_give_the_same_batches_as_the_main_thread(folder, four_threads):
    images = load_data(folder)
    (_, ahead), (_, alone) = (rows_of(frozen(num_workers=workers), images) for workers in ("auto", 0))
    count = 0
    for (pixels, *rest), (expected, *others) in zip(ahead, alone, strict=True):
        assert torch.equal(pixels, expected) and pixels.dtype == expected.dtype
        assert [list(map(str, values)) for values in rest] == [list(map(str, values)) for values in others]
        count += len(pixels)
    assert count == 40


def test_threads_read_at_once_but_at_most_two_batches_ahead(folder, four_threads, monkeypatch):
    images, together, started = load_data(folder), threading.Barrier(4), []
    real = type(images).read

    def read(self, index, side):
        started.append(threading.current_thread())
        if len(started) <= 4:
            together.wait(10)  # raises an error unless four threads read at the same time
        return real(self, index, side)

    monkeypatch.setattr(type(images), "read", read)
    yielded = 0
    for batch in rows_of(frozen(), images)[1]:
        yielded += len(batch[0])
        time.sleep(0.01)
        assert len(started) <= yielded + 2 * 3
    assert len(started) == 40 and threading.main_thread() not in started


def test_error_names_the_file_and_nothing_more_is_read(folder, four_threads, monkeypatch):
    (folder / "train" / "a" / "4.png").write_bytes(b"no image")
    images, read = load_data(folder), []
    real = type(images).read
    monkeypatch.setattr(type(images), "read", lambda self, index, side: read.append(index) or real(self, index, side))
    learner = frozen()
    with pytest.raises(ValueError, match=r"image \d+ \(.*4\.png\) cannot be read: it is none of the formats"):
        list(rows_of(learner, images)[1])
    done = len(read)
    assert done < 40 and not [t for t in threading.enumerate() if t.name.startswith("read")]
    features, unreadable = learner.encoder.readable_embeds(learner.encoder.images(images), "read")
    (bad,) = unreadable
    assert "4.png" in images.item_name(bad) and features[bad].eq(0).all() and features.ne(0).any(1).sum() == 39


def test_interrupt_ends_the_threads_and_keeps_what_was_encoded(folder, four_threads, tmp_path, monkeypatch):
    learner, images = frozen(), load_data(folder)
    learner.encoder.store = FeatureStore(tmp_path / "store.sqlite")
    encoded, real = [], learner.encoder._encoded

    def interrupted(*given):
        if encoded:
            raise KeyboardInterrupt
        encoded.append(len(given[0]))
        return real(*given)

    monkeypatch.setattr(learner.encoder, "_encoded", interrupted)
    with pytest.raises(KeyboardInterrupt):
        learner.image_embeds(images)
    assert learner.encoder.store.facts()[0] == encoded[0] == 8
    assert not [t for t in threading.enumerate() if t.name.startswith("read")]
    monkeypatch.setattr(learner.encoder, "_encoded", real)
    expected = frozen(num_workers=0).image_embeds(images)
    torch.testing.assert_close(learner.image_embeds(images), expected, atol=1e-6, rtol=0)  # other rows of a product


def test_data_set_of_the_user_is_read_by_the_main_thread(four_threads):
    class Own(list):
        def __getitem__(self, index):
            assert threading.current_thread() is threading.main_thread()
            return super().__getitem__(index)

    images = Own(images_of(0, 1))
    assert len(frozen().image_embeds(images)) == len(images)


@pytest.mark.slow
def test_task_is_trained_on_the_same_pixels_in_the_same_order(folder, four_threads, monkeypatch):
    def seen(**fields):
        learner, pixels = tiny_learner(classifiers=("lda",), **fields), []
        real = learner.encoder.training_batches
        learner.encoder.training_batches = lambda *given: (
            pixels.append(batch[0].clone()) or batch for batch in real(*given)
        )
        learner.learn_task(load_data(folder), ["a", "b"])
        return torch.cat(pixels)

    expected = seen(num_workers=0, pixel_cache_mb=0)
    assert len(expected) == 80
    assert torch.equal(seen(pixel_cache_mb=0), expected)
    assert torch.equal(seen(), expected)


@pytest.mark.parametrize(
    ("cores", "torch_threads", "device", "processes", "expected"),
    [
        (2, 2, "cpu", 1, 1),
        (2, 1, "cpu", 1, 1),
        (1, 1, "cpu", 1, 1),
        (8, 8, "cpu", 1, 4),
        (8, 1, "cpu", 1, 7),
        (64, 32, "cpu", 1, 16),
        (16, 16, "cuda", 1, 15),
        (64, 32, "cuda", 8, 7),
        (2, 2, "cuda", 4, 1),
    ],
)
def test_number_of_threads_follows_the_cores(monkeypatch, cores, torch_threads, device, processes, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: torch_threads)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    assert reading_threads(torch.device(device)) == expected


def trained(**fields):
    return tiny_learner("dulbe", ("lda",), **fields)


def test_kept_pixel_values_are_those_of_the_file_and_of_the_same_processing(folder, monkeypatch):
    learner, images = trained(), load_data(folder)
    assert undecodable(images, learner.encoder.kept_images(images).read) == {}
    part = images.at([5, 3])
    pixels, fresh = learner.encoder.images(part), learner.encoder.images(load_data(folder).at([5, 3]))
    assert pixels.is_cached and not fresh.is_cached
    with monkeypatch.context() as patched:
        patched.setattr(type(images), "read", lambda *_: pytest.fail("it is read again"))
        kept = [pixels.read(row) for row in range(2)]
    for (content, values), (expected, others) in zip(kept, (fresh.read(0), fresh.read(1)), strict=True):
        assert content == expected and torch.equal(values, others)
    view = pixels.view("flip", 1)
    assert any(not torch.equal(view.view("flip", seed).read(0)[1], kept[0][1]) for seed in range(9))
    processor = copy.deepcopy(learner.processor)
    processor.image_processor.image_mean = [0.1, 0.2, 0.3]
    other = PixelDataset(part, processor, pixels.image_shape)
    assert not other.is_cached and not torch.equal(other.read(0)[1], kept[0][1]), "another processing"
    path = folder / "train" / images.item_name(int(part.indices[1]))
    Image.new("RGB", (40, 30), "red").save(path)
    content, values = learner.encoder.images(part).read(1)
    assert content != kept[1][0] and not torch.equal(values, kept[1][1]), "the file has changed"


def test_all_kept_pixel_values_fit_into_the_limit(folder, monkeypatch):
    learner = trained(pixel_cache_mb=1)
    first, second = load_data(folder), load_data(folder)
    size = learner.encoder.images(first).bytes
    monkeypatch.setattr(reading, "_memories", type(reading._memories)())

    def kept(images, most):
        return learner.encoder.images(images).keep_all(most)

    assert not kept(first, 40 * size - 1) and kept(first, 40 * size) and kept(first.at([1]), 40 * size)
    assert not kept(second, 80 * size - 1) and kept(second, 80 * size)
    learner.encoder.images(first).read(0)
    assert first.pixels.rows.keys() == {0}
    learner.encoder.images(load_data(folder), keep=True)  # as for training, with a limit of 1 MiB
    room = 2**20 - 40 * size
    assert sum(images.pixels.bytes for images in (first, second)) <= room
    assert learner.encoder.images(first).read(0)[1].shape == learner.encoder.images(second).read(0)[1].shape
    assert len(pickle.dumps(second)) < 40 * size and not pickle.loads(pickle.dumps(second)).pixels.bytes
    assert not kept(labelled_images([(image, 0) for image in range(3)]), 2**30), "not files"


@pytest.mark.parametrize("fields", [{"pixel_cache_mb": 0}, {"num_workers": 1}, {"teacher": "online"}])
def test_nothing_is_kept_if_it_may_not_be(folder, fields):
    images = load_data(folder)
    assert trained(**fields).encoder.kept_images(images) is None and not images.pixels.bytes


def test_unreadable_files_are_found_while_the_others_are_kept(folder):
    (folder / "train" / "a" / "4.png").write_bytes(b"no image")
    images = load_data(folder)
    ((index, reason),) = undecodable(images, trained().encoder.kept_images(images).read).items()
    assert images.item_name(index).endswith("4.png") and reason and len(images.pixels.rows) == 39


def test_bar_moves_with_each_photograph_before_the_first_batch_is_whole(folder, monkeypatch):
    moved = []

    class Bar:
        def __init__(self, total, **shown):
            assert total == 40

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return None

        def update(self, number=1):
            moved.append(number)

    monkeypatch.setattr(reading, "tqdm", Bar)
    for workers in ("auto", 0):
        batches = rows_of(frozen(num_workers=workers), load_data(folder), size=8)[1]
        next(batches)
        assert moved == [1] * 8 * (workers == "auto")
        assert len(list(batches)) == 4 and sum(moved) == 40
        moved.clear()
