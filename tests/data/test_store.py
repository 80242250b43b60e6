"""The feature store: each content is encoded once, and no failure of the store changes a prediction."""

import hashlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from lives import images_of, learned, tiny_learner
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from safetensors.torch import load_file, save_file
from small_runs import learner_of

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.data import store as stores
from dulbe_peft.data.folders import ImageFolder
from dulbe_peft.data.glance import Glance, Header
from dulbe_peft.data.images import LabelledImages, labelled_images
from dulbe_peft.data.store import EncoderKey, FeatureStore, store_path
from dulbe_peft.encoders.encoder import CPU_BATCH
from dulbe_peft.photos.commands.main import main

MACHINE = ["--device", "cpu", "--no-progress"]
RUN = ["run", "--model", "demo", "--classifiers", "lda,prototype", *MACHINE]
KEY = EncoderKey("encoder", "float32", "torch")


@pytest.fixture(scope="module")
def photos(digit_folders):
    return digit_folders(5, 8, 3)


@pytest.fixture(scope="module")
def plain(photos, tmp_path_factory):
    """Return the folder of a run that used no store."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(stores.VARIABLE, str(folder.with_name("store")))
        call(*RUN, "--data", photos, "--output", folder, "--no-store")
        assert not store_path().exists(), "--no-store writes no store"
    return folder


def call(*words, expected=0):
    assert main([str(word) for word in words]) == expected


def content_of(folder):
    """Return the files of a run, except those that depend on when and where it ran."""
    left_out = ("timings.json", "sources.json", ".dulbe_peft.lock")
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name not in left_out)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def grey_images(folder):
    """Write four images of a class that no data set has."""
    folder.mkdir(parents=True)
    for number in range(4):
        Image.fromarray(np.full((8, 8), 20 + 60 * number, dtype=np.uint8)).save(folder / f"{number}.png")


def some_features(count=40, width=16):
    rng = np.random.default_rng(0)
    return [rng.bytes(32) for _ in range(count)], rng.normal(size=(count, width)).astype(np.float32)


# ---------------------------------------------------------------------- content


def test_content_depends_on_bytes_and_not_on_name_folder_or_order(photos, tmp_path):
    folder = ImageFolder(photos, "train")
    shutil.copytree(photos / "train", tmp_path / "copy")
    first = tmp_path / "copy" / "one"
    first.rename(tmp_path / "copy" / "uno")
    os.link(tmp_path / "copy" / "uno" / "0.png", tmp_path / "copy" / "uno" / "zz.png")
    copy = ImageFolder(tmp_path / "copy")
    assert set(folder.contents()) == set(copy.contents()) and len(set(copy.contents())) == 40
    assert len(copy) == 41 and None not in copy.contents()
    file = tmp_path / "copy" / "uno" / "1.png"
    before = copy.contents()
    tagged = PngInfo()
    tagged.add_text("keyword", "one")
    Image.open(file).save(file, pnginfo=tagged)
    assert sum(a != b for a, b in zip(before, copy.contents())) == 1, "an edited file is read again"


def test_images_in_memory_are_identified_by_pixels_size_and_type():
    values = np.arange(48, dtype=np.uint8)
    grey, tall = Image.fromarray(values.reshape(4, 12)), Image.fromarray(values.reshape(12, 4))
    tensor = torch.arange(48.0).reshape(3, 4, 4)
    images = [grey, tall, grey.copy(), grey.convert("RGB"), grey.rotate(180)]
    images += [tensor, tensor.double(), tensor.reshape(3, 2, 8)]
    actual = labelled_images([(image, 0) for image in images]).contents()
    assert actual[0] == actual[2] == actual[3], "the model sees the same pixels"
    assert len(set(actual)) == 6 and None not in actual
    one = torch.ones(3, 2, 2, dtype=torch.float64)
    near, half = one + 1e-12, one.to(torch.bfloat16)
    assert len(set(labelled_images([(image, 0) for image in (one, near, half)]).contents())) == 3
    sideways = grey.copy()
    sideways.getexif()[0x0112] = 3
    turned = labelled_images([(sideways, 0), (grey.rotate(180), 0)]).contents()
    assert turned[0] == turned[1] != actual[0]


def test_file_that_changes_while_it_is_read_is_an_error(photos, tmp_path, base, monkeypatch):
    shutil.copytree(photos / "train", tmp_path / "photos")
    images, read = ImageFolder(tmp_path / "photos"), LabelledImages.read

    def edited(self, index, side=0):
        if index == 3:
            file = Path(self.item_name(index))
            Image.fromarray(255 - np.asarray(Image.open(file))).save(file)
        return read(self, index, side)

    learner = learner_of(base, "frozen")
    learner.use_store(FeatureStore(tmp_path / "store.sqlite"))
    learner.image_embeds(images.at([0]))
    learner.use_store(FeatureStore(tmp_path / "store.sqlite"))  # it has features, so files are looked up in it first
    monkeypatch.setattr(LabelledImages, "read", edited)
    with pytest.raises(ValueError, match=r"3\.png changed while it was being read: start again"):
        learner.image_embeds(images)


def test_learning_an_image_whose_content_is_unknown_is_an_error(photos, base, monkeypatch):
    """The content may be unreadable for a moment, as with too many open files. The image could then count twice."""
    learner = learner_of(base, "frozen")
    monkeypatch.setattr("dulbe_peft.data.images._entry_of", lambda _: 1 / 0)
    with pytest.raises(ValueError, match=r"0\.png can no longer be read"):
        learner.learn_task(ImageFolder(photos, "train"))
    assert not learner.tasks


# ---------------------------------------------------------------------- bits


@pytest.mark.parametrize("threads", [1, 2])
def test_features_do_not_depend_on_what_else_is_in_the_batch(base, photos, threads):
    """This holds on any CPU, even if its kernels round the last rows of a product differently."""
    learner, images = learner_of(base, "frozen"), ImageFolder(photos, "train")
    torch.set_num_threads(threads)
    whole = learner.image_embeds(images)
    for size in (1, CPU_BATCH - 1, 13):
        rows = list(range(40 - size, 40))[::-1]  # every image has another position
        assert torch.equal(learner.image_embeds(images.at(rows)), whole[rows]), rows


@pytest.mark.parametrize("alike", [True, False])
def test_cpu_encodes_full_batches_or_single_images(base, photos, monkeypatch, alike):
    """Images are encoded singly if their position in a batch changes features, or for a few predictions."""
    learner, sizes = learner_of(base, "frozen"), list[int]()
    encode = learner.encoder.image_embeds

    def recorded(pixels):
        sizes.append(len(pixels))
        features = encode(pixels)
        return features if alike else features + torch.arange(len(features))[:, None] * 2.0**-24

    known = {("torch", torch.get_num_threads(), learner.encoder._shapes): True} if alike else {}
    monkeypatch.setattr(learner.encoder, "image_embeds", recorded)
    monkeypatch.setattr(learner.encoder, "_positions_equal", known)
    images = ImageFolder(photos, "train")
    assert len(learner.image_embeds(images.at(range(37)))) == 37
    assert sizes == ([CPU_BATCH] * 5 if alike else [CPU_BATCH] + [1] * 37)
    sizes.clear()
    learner.learn_task(images.select(["zero", "one"]))
    sizes.clear()
    learner.predict(images.at(range(3)))
    assert sizes == [1] * 3


def test_positions_are_compared_again_when_the_history_has_grown(monkeypatch):
    """A loaded learner compares them with its own history, and must encode in the same way."""
    learner, sizes, images = tiny_learner(), list[int](), [pixels for pixels, _ in images_of(*range(9))]
    encode = learner.encoder.image_embeds

    def recorded(pixels, queries=None):
        sizes.append(len(pixels))
        features, alike = encode(pixels, queries), learner.model.history_rank > 3
        return (
            features[:1].expand_as(features) if alike else features + torch.arange(len(features))[:, None] * 2.0**-24
        )

    monkeypatch.setattr(learner.encoder, "image_embeds", recorded)
    for index, expected in enumerate(([1] * 9, [CPU_BATCH] * 2)):
        learned(learner, 1, index)
        assert learner.model.history_rank == 3 * (index + 1)
        learner.image_embeds(images)
        assert sizes[-len(expected) :] == expected


def test_positions_are_compared_with_an_image_that_does_not_depend_on_the_batch(monkeypatch):
    """Otherwise, a loaded learner, which encodes other images first, could come to another answer."""
    learner, compared = tiny_learner(), list[torch.Tensor]()
    encode = learner.encoder.image_embeds
    monkeypatch.setattr(learner.encoder, "image_embeds", lambda *given: compared.append(given[0]) or encode(*given))
    for seed in range(2):
        learner.encoder._positions_equal.clear()
        learner.image_embeds([pixels for pixels, _ in images_of(*range(CPU_BATCH), seed=seed)])
    (one, first, other, second) = compared
    assert torch.equal(one, other) and not torch.equal(first, second)


def test_positions_are_compared_again_when_another_adapter_acts():
    learner = learned(tiny_learner(), 1)
    found = [learner.encoder._shapes]
    with learner.model.disable_adapter():
        found.append(learner.encoder._shapes)
    with learner.model.held_weights():
        found.append(learner.encoder._shapes)
    learner.model.merge_adapter()
    found.append(learner.encoder._shapes)
    learner.model.unmerge_adapter()
    learner.model.add_adapter("other", learner.model.peft_config["default"])
    for name in ("default", "other"):
        learner.model.set_adapter(name)
        found.append(learner.encoder._shapes)
    assert len(set(found)) == len(found)


# ---------------------------------------------------------------------- the file


def test_store_returns_equal_bits_for_the_same_key_only(tmp_path, capsys):
    contents, features = some_features()
    store = FeatureStore(tmp_path / "new folder" / "f.sqlite")
    store.put(KEY, contents, features)
    store.put(KEY, [None, contents[0]], features[:2] * 0 + features[0])
    actual = FeatureStore(store.path).get(KEY, [*contents, None, b"unknown"])
    assert len(actual) == 40 and store.facts()[0] == 40
    assert all(np.array_equal(actual[content], row) for content, row in zip(contents, features))
    others = [KEY._replace(fingerprint="other"), KEY._replace(precision="bfloat16"), KEY._replace(view="view")]
    assert not any(store.get(key, contents) for key in others)
    # like two machines that do not see each other's locks
    with closing(sqlite3.connect(store.path)) as database, database:
        database.execute("UPDATE features SET way = ?", (others[0].way,))
    assert not store.get(others[0], contents) and "40 damaged features" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("embedding", None),
        ("embedding", 7),
        ("embedding", 0.5),
        ("embedding", "text"),
        ("embedding", b""),
        ("embedding", b"abc"),
        ("checksum", None),
        ("checksum", "text"),
        ("checksum", b"\xff"),
    ],
)
def test_damaged_rows_are_ignored_and_reported_once(tmp_path, capsys, column, value):
    contents, features = some_features()
    store = FeatureStore(tmp_path / "f.sqlite")
    store.put(KEY, contents, features)
    with closing(sqlite3.connect(store.path)) as database, database:
        database.execute(f"UPDATE features SET {column} = ? WHERE content = ?", (value, contents[3]))
        database.execute(f"UPDATE features SET {column} = CAST(x'ff' AS TEXT) WHERE content = ?", (contents[4],))
    for _ in range(2):
        assert store.get(KEY, contents).keys() == {*contents} - {*contents[3:5]}
    message = f"dulbe-peft: {store.path} contains 2 damaged features; their images are encoded again\n"
    assert capsys.readouterr().err == message
    store.put(KEY, contents[3:5], features[3:5])
    assert len(store.get(KEY, contents)) == 40 and not store.private


def test_private_store_is_deleted_with_its_owner():
    contents, features = some_features()
    store = FeatureStore()
    store.put(KEY, contents, features)
    folder = store.path.parent
    assert len(store.get(KEY, contents)) == 40 and folder.is_dir()
    del store
    assert not folder.exists()


def spoil(kind, path):
    if kind == "text":
        path.write_text("somebody's notes" * 100)
    elif kind == "foreign":
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("CREATE TABLE features (mine)")
    elif kind == "future":
        FeatureStore(path).put(KEY, *some_features(1))
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("PRAGMA user_version = 99")
    elif kind == "folder":
        path.mkdir()
    elif kind == "cut":
        FeatureStore(path).put(KEY, *some_features(400))
        path.write_bytes(path.read_bytes()[:20000])


@pytest.mark.plain("cut")
@pytest.mark.parametrize("kind", ["text", "foreign", "future", "folder", "cut", "network"])
def test_unusable_store_gives_one_warning_and_is_left_unchanged(
    kind, photos, plain, tmp_path, monkeypatch, capsys, reads
):
    path = Path(os.environ[stores.VARIABLE])
    if kind == "network":
        monkeypatch.setattr(stores, "_mounts", lambda: [["server:/home", "/", "nfs4", "rw,local_lock=all"]])
    spoil(kind, path)
    before = path.read_bytes() if path.is_file() else None
    capsys.readouterr()
    call(*RUN, "--data", photos, "--output", tmp_path / "out")
    warnings = [line for line in capsys.readouterr().err.splitlines() if "feature store" in line]
    assert len(warnings) == 1 and f"{path} is not used" in warnings[0] and stores.VARIABLE in warnings[0]
    assert (path.read_bytes() if path.is_file() else None) == before
    assert set(reads.values()) == {1} and len(reads) == 55
    assert content_of(tmp_path / "out") == content_of(plain)


FILL = """
import os, sys
from pathlib import Path
import numpy as np
from dulbe_peft.data.store import EncoderKey, FeatureStore
rng = np.random.default_rng(0)
contents, features = [rng.bytes(32) for _ in range(200)], rng.normal(size=(200, 16)).astype(np.float32)
seed = next((seed for seed in range(10) if os.fork() == 0), None)
if seed is None:
    sys.exit(any(os.wait()[1] for _ in range(10)))
order = np.random.default_rng(seed).permutation(200)
store, key = FeatureStore(Path(sys.argv[1])), EncoderKey("encoder", "float32", "torch")
for part in np.array_split(order, 25):
    store.put(key, [contents[i] for i in part], features[part])
"""


@pytest.mark.slow
def test_ten_processes_write_to_one_store(tmp_path):
    path = tmp_path / "f.sqlite"
    done = subprocess.run([sys.executable, "-c", FILL, path], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    contents, features = some_features(200)
    store = FeatureStore(path)
    actual = store.get(KEY, contents)
    assert store.facts()[0] == 200 and all(np.array_equal(actual[c], row) for c, row in zip(contents, features))


# ---------------------------------------------------------------------- commands


@pytest.mark.slow
def test_all_commands_together_encode_each_image_once(photos, tmp_path, reads, capsys, monkeypatch):
    for name, few in {"TRIALS": 1, "FOLDS": 2}.items():
        monkeypatch.setattr(f"dulbe_peft.photos.doubtful_labels.{name}", few)
    call(*RUN, "--data", photos, "--increment", 2, "--output", tmp_path / "out")
    assert set(reads.values()) == {1} and len(reads) == 55, "zero-shot, training and tests share one pass"
    july = tmp_path / "july"
    shutil.copytree(photos, july / "photos")
    grey_images(july / "photos" / "train" / "six")
    call("learn", tmp_path / "out", "--data", july / "photos", "--output", july / "run", *MACHINE)
    call("evaluate", tmp_path / "out", "--data", photos, *MACHINE)
    call("features", "--model", "demo", "--data", july / "photos", *MACHINE)
    call("check", july / "photos", "--check-labels", "--model", "demo", "--device", "cpu")
    call("predict", tmp_path / "out", july / "photos", "--csv", tmp_path / "answers.csv", "--num-workers", 0, *MACHINE)
    assert set(reads.values()) == {1} and len(reads) == 59
    call("env")
    assert f"feature store: {store_path()}, 59 features" in capsys.readouterr().out
    call("forget", july / "run", "six", "--output", july / "less", *MACHINE)
    assert f"may still be in {store_path()}" in capsys.readouterr().out


def test_second_run_equals_the_first_in_any_order_and_after_damage(photos, plain, tmp_path, reads, capsys):
    rows = sorted(path for path in (photos / "test").rglob("*.png"))
    for start in (11, 0):  # in another order, in parts, with incomplete batches
        words = [*rows[start:], *rows[:start]][:11]
        call("predict", plain, *words, "--csv", tmp_path / f"{start}.csv", "--num-workers", 0, *MACHINE)
    reads.clear()
    call(*RUN, "--data", photos, "--output", tmp_path / "two")
    assert len(reads) == 40, "the store has the test images"
    with closing(sqlite3.connect(store_path())) as database, database:
        (content, embedding) = database.execute("SELECT content, embedding FROM features").fetchone()
        other = bytes([embedding[0] ^ 1]) + embedding[1:]
        database.execute("UPDATE features SET embedding = ? WHERE content = ?", (other, content))
    reads.clear()
    capsys.readouterr()
    call(*RUN, "--data", photos, "--output", tmp_path / "three")
    assert dict(reads) == {content: 1} and "1 damaged features" in capsys.readouterr().err
    assert content_of(plain) == content_of(tmp_path / "two") == content_of(tmp_path / "three")


def test_features_of_a_few_predictions_are_not_stored(photos, plain):
    few = sorted((photos / "test" / "one").iterdir())
    call("predict", plain, *few, "--num-workers", 0, *MACHINE)
    assert FeatureStore(store_path()).facts() == (0, 0)


@pytest.mark.slow
def test_other_weights_layers_or_resize_encode_again(photos, tmp_path, base, reads):
    """Even one changed weight, or another activation with the same weights, makes another encoder."""
    clip, processor = base
    clip.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    run = ["run", "--classifiers", "prototype", *MACHINE, "--data", photos, "--model"]
    call(*run, "demo", "--output", tmp_path / "one")
    call(*run, tmp_path / "model", "--output", tmp_path / "same weights elsewhere")
    assert set(reads.values()) == {1}
    call(*run, "demo", "--image-resize", "squash", "--output", tmp_path / "squash")
    assert set(reads.values()) == {2}
    weights = load_file(tmp_path / "model" / "model.safetensors")
    name = next(name for name in weights if name.endswith("vision_model.encoder.layers.0.mlp.fc1.weight"))
    weights[name].view(-1)[1] += 1e-3  # a single value
    save_file(weights, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    call(*run, tmp_path / "model", "--output", tmp_path / "other")
    assert set(reads.values()) == {3}
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    vision = config["vision_config"]
    vision["hidden_act"] = {"quick_gelu": "gelu", "gelu": "quick_gelu"}[vision["hidden_act"]]
    file.write_text(json.dumps(config))
    call(*run, tmp_path / "model", "--output", tmp_path / "other layers")
    assert set(reads.values()) == {4}
    call(*run, "demo", "--output", tmp_path / "again")
    assert set(reads.values()) == {4}


def test_augmented_views_are_stored_under_their_own_keys(photos, tmp_path, reads):
    words = [*RUN, "--data", photos, "--augment", "crop+flip", "--copies", 2]
    call(*words, "--output", tmp_path / "one")
    assert sum(reads.values()) == 40 * 3 + 15
    call(*words, "--output", tmp_path / "two")
    assert sum(reads.values()) == 40 * 3 + 15
    assert content_of(tmp_path / "one") == content_of(tmp_path / "two")


# ---------------------------------------------------------------------- images that a learner knows


@pytest.mark.slow
def test_no_photograph_counts_twice(photos, tmp_path, capsys):
    june, july = tmp_path / "june", tmp_path / "july"
    shutil.copytree(photos, june)
    shutil.rmtree(june / "train" / "zero")
    shutil.rmtree(june / "test" / "zero")
    call(*RUN, "--data", june, "--output", tmp_path / "out")
    for name in ("one", "zero"):
        shutil.copytree(photos / "train" / name, july / "train" / name)
    for source, target in (("0.png", "copy.png"), ("1.png", "again.png")):
        shutil.copy(july / "train" / "one" / source, july / "train" / "one" / target)
    (july / "train" / "one" / "link.png").symlink_to(photos / "train" / "one" / "2.png")
    shutil.copy(photos / "train" / "zero" / "0.png", july / "train" / "zero" / "copy.png")
    shutil.copy(photos / "test" / "one" / "8.png", july / "train" / "one" / "tested.png")
    shutil.copy(photos / "train" / "two" / "0.png", july / "train" / "zero" / "two.png")
    (july / "train" / "renamed").mkdir()  # a class with known images only
    shutil.copy(photos / "train" / "two" / "1.png", july / "train" / "renamed")
    capsys.readouterr()
    call("learn", tmp_path / "out", "--data", july, "--output", tmp_path / "learned", *MACHINE)
    printed = capsys.readouterr().out
    assert "11 learned before" in printed and "1 in the data twice" in printed
    assert "2 images moved to another class, such as " in printed and "1.png from 'two' to 'renamed'" in printed
    assert "new: renamed, zero" in printed
    assert "left out, because the learner is tested on them: 1 image, such as " in printed
    assert "tested.png (--again)" in printed
    learner = ClassIncrementalLearner.from_pretrained(tmp_path / "learned")
    counts = dict(zip(learner.class_names, learner.classifiers["lda"].counts.tolist(), strict=True))
    assert counts == {"one": 8, "three": 8, "two": 6, "four": 8, "zero": 9, "renamed": 1}
    call("learn", tmp_path / "learned", "--data", july, "--output", tmp_path / "no", *MACHINE, expected=2)
    assert "has learned all of its images" in capsys.readouterr().err
    call("learn", tmp_path / "learned", "--data", july, "--output", tmp_path / "again", "--again", *MACHINE)
    again = ClassIncrementalLearner.from_pretrained(tmp_path / "again")
    assert again.classifiers["lda"].counts.sum() == 40 + 23


@pytest.mark.slow
def test_old_test_images_are_found_without_the_old_training_images(photos, tmp_path, capsys):
    june = tmp_path / "june"
    shutil.copytree(photos, june)
    call(*RUN, "--data", june, "--output", tmp_path / "out")
    shutil.rmtree(june / "train")
    (june / "test" / "one" / "8.png").rename(june / "test" / "one" / "renamed.png")
    grey_images(tmp_path / "july" / "train" / "grey")
    capsys.readouterr()
    call("learn", tmp_path / "out", "--data", tmp_path / "july", "--output", tmp_path / "learned", *MACHINE)
    assert "not used again" not in capsys.readouterr().err
    actual = json.loads((tmp_path / "learned" / "results.json").read_text())
    assert actual["classifiers"]["lda"]["matrix"][1][0] is not None


def test_held_out_test_images_are_found_again_by_content(photos, tmp_path, capsys):
    data = tmp_path / "photos"
    shutil.copytree(photos / "train", data)
    call(*RUN, "--data", data, "--test-fraction", 0.3, "--output", tmp_path / "out")
    learner = ClassIncrementalLearner.from_pretrained(tmp_path / "out")
    learned = set(learner.state.known.class_of())
    assert len(learned) + sum(map(len, learner.state.known.tested.values())) == 40
    for file in sorted(data.rglob("*.png")):  # as if a user deleted the learned images
        if hashlib.sha256(file.read_bytes()).digest() in learned:
            file.unlink()
    grey_images(tmp_path / "july" / "grey")
    capsys.readouterr()
    call("learn", tmp_path / "out", "--data", tmp_path / "july", "--output", tmp_path / "learned", *MACHINE)
    assert "not used again" not in capsys.readouterr().err


def test_store_keeps_small_pictures_unless_they_are_switched_off(photos, base, tmp_path, monkeypatch):
    for number, expected in enumerate((True, False)):
        monkeypatch.setenv("DULBE_PEFT_STORE_PICTURES", "1" if expected else "0")
        store, images = FeatureStore(tmp_path / f"{number}.sqlite"), ImageFolder(photos, "train")
        learner = learner_of(base, "frozen")
        learner.use_store(store)
        learner.image_embeds(images)
        (content,) = images.at([0]).contents()
        later = ImageFolder(photos, "train")
        kept = FeatureStore(store.path).glance(content)
        assert (kept is not None) == expected
        if kept is not None:
            assert kept == images.glance(0) and later.glance(0).header == kept.header
            with closing(sqlite3.connect(store.path)) as database:
                database.execute("UPDATE glances SET record = x'00'")
                database.commit()
            assert FeatureStore(store.path).glance(content) is None, "a damaged row is not used"


def test_prune_removes_what_was_not_used_lately_and_nothing_else(tmp_path, monkeypatch, capsys):
    contents, features = some_features(3000)
    path, key, old = tmp_path / "s" / "features.sqlite", EncoderKey("a", "float32", "torch"), time.time()
    monkeypatch.setenv(stores.VARIABLE, str(path))
    call("features", "--prune", 0)
    assert "0 features and 0 pictures removed, 0.0 MB freed" in capsys.readouterr().err and not path.parent.exists()
    glance = Glance(Header((8, 8), 1, None), bytes(256), bytes(5000))
    first = FeatureStore(path)
    first.put(key, contents, features)
    first.put_glances(dict.fromkeys(contents, glance))
    monkeypatch.setattr(stores.time, "time", lambda: old + 40 * stores.DAY)
    second = FeatureStore(path)
    assert len(second.get(key, contents[:1000])) == 1000
    call("features", "--prune", 40)
    assert "0 features and 0 pictures removed" in capsys.readouterr().err, "all were used 40 days ago"
    size = path.stat().st_size
    call("features", "--prune", 30)
    freed = (size - path.stat().st_size) / 1e6
    said = f"{path}: 2000 features and 2000 pictures removed, {freed:.1f} MB freed"
    assert said in capsys.readouterr().err and freed > 10
    assert second.get(key, contents).keys() == set(contents[:1000]) and second.glance(contents[0]) == glance
    assert second.glance(contents[-1]) is None
    second.put(key, contents, features)  # an open store goes on
    assert np.array_equal(second.get(key, contents)[contents[-1]], features[-1])
    call("features", "--prune", 0)
    assert second.get(key, contents) == {} and second.facts()[0] == 0 and path.stat().st_size < 2**17


@pytest.mark.parametrize("first", ["prune", "get"])
def test_what_an_older_file_contains_counts_as_used_when_uses_are_first_recorded(tmp_path, first):
    contents, features = some_features()
    store, key = FeatureStore(tmp_path / "f.sqlite"), EncoderKey("a", "float32", "torch")
    store.put(key, contents, features)
    store.put(EncoderKey("b", "float32", "torch"), contents, features)
    store.put_glances({b"only a picture" + bytes(18): Glance(Header((8, 8), 1, None), bytes(256), b"")})
    with closing(sqlite3.connect(store.path)) as database:
        database.execute("DROP TABLE used")
    store = FeatureStore(store.path)
    if first == "get":
        store.get(key, contents[:1])
    assert store.prune(9)[:2] == (0, 0) and len(store.get(key, contents)) == len(contents)


def test_pictures_of_images_without_features_are_kept_as_long_as_features(tmp_path, monkeypatch):
    """Strategies that train keep pictures only."""
    store, old = FeatureStore(tmp_path / "f.sqlite"), time.time()
    store.put_glances({bytes(32): Glance(Header((8, 8), 1, None), bytes(256), b"")})
    assert store.prune(9).pictures == 0
    monkeypatch.setattr(stores.time, "time", lambda: old + 11 * stores.DAY)
    assert store.prune(9).pictures == 1


def test_prune_beside_another_process_loses_nothing_new(tmp_path):
    """A reader holds the file, so that it cannot shrink; then a writer does, and pruning waits for it."""
    contents, features = some_features()
    store, key = FeatureStore(tmp_path / "f.sqlite"), EncoderKey("a", "float32", "torch")
    store.put(key, contents[:20], features[:20])
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        other.execute("INSERT INTO features SELECT way, ?, embedding, checksum FROM features LIMIT 1", [contents[20]])
        other.execute("INSERT INTO used VALUES (?, 99999)", [contents[20]])
        timer = threading.Timer(0.3, lambda: None)
        timer.start()
        pruning = threading.Thread(target=store.prune, args=[9])
        pruning.start()
        timer.join()
        assert pruning.is_alive()
        other.execute("COMMIT")
        pruning.join()
        assert other.execute("SELECT count(*) FROM features").fetchone() == (21,)


def test_prune_of_a_file_that_is_no_store_is_an_error(tmp_path, monkeypatch, capsys):
    path = tmp_path / "mine.sqlite"
    monkeypatch.setenv(stores.VARIABLE, str(path))
    path.write_bytes(b"something else" * 99)
    call("features", "--prune", "0", expected=2)
    assert f"the feature store {path} cannot be pruned" in capsys.readouterr().err
    assert path.read_bytes() == b"something else" * 99
    call("features", "--prune", "-1", expected=2)
    for words in (["--prune", "0", "--data", tmp_path], ["--no-store", "--prune=0"], [tmp_path, "--prune", "0"]):
        call("features", *words, expected=2)
        assert "--prune DAYS stands alone" in capsys.readouterr().err


def test_a_store_that_can_only_be_read_is_still_used(tmp_path, monkeypatch, capsys):
    contents, features = some_features()
    store, key = FeatureStore(tmp_path / "f.sqlite"), EncoderKey("a", "float32", "torch")
    store.put(key, contents, features)
    other = FeatureStore(store.path)
    monkeypatch.setattr(FeatureStore, "_mark", lambda *_: (_ for _ in ()).throw(sqlite3.OperationalError("readonly")))
    assert len(other.get(key, contents)) == len(contents) and not other.private
    assert not capsys.readouterr().err
