"""Large JPEG files are decoded smaller, unless `whole_images` is set: never both for one learner."""

import shlex
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from lives import tiny_learner
from PIL import Image
from small_runs import call

from dulbe_peft import ClassIncrementalLearner, LearnerArguments, Task
from dulbe_peft.data.readers import load_data
from dulbe_peft.data.store import FeatureStore
from dulbe_peft.encoders import pixels
from dulbe_peft.encoders.pixels import PixelDataset, jpeg_side
from dulbe_peft.photos.commands.main import main
from dulbe_peft.streams.run import run_stream

LARGE, SMALL = (800, 640), (160, 120)
CLASSES = ["a", "b"]


@pytest.fixture(scope="module", autouse=True)
def fewer_pixels_are_enough():
    """Let small photographs be decoded smaller, because large ones take long."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pixels, "LEAST_SIDE", 320)
        yield


def write(folder, size, count=4):
    """Write JPEG photographs of two classes; noise makes the scale of decoding change the features."""
    for number in range(2 * count):
        random = np.random.default_rng(number)
        coarse = random.integers(0, 256, (4, 5, 3), dtype=np.uint8) // (1 + number % 2)
        pixels = np.asarray(Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)).astype(int)
        noisy = pixels + random.integers(-60, 61, pixels.shape)
        place = folder / "train" / CLASSES[number % 2] / f"{number}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(place, quality=80)
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    return write(tmp_path_factory.mktemp("large"), LARGE)


def learner(whole, **fields):
    return tiny_learner("frozen", ("lda",), whole_images=whole, **fields)


def learned(whole, data):
    made = learner(whole)
    made.learn_task(load_data(data), CLASSES)
    return made


def test_small_photographs_have_the_same_features_either_way(tmp_path):
    images = load_data(write(tmp_path, SMALL))
    assert torch.equal(learner(False).image_embeds(images), learner(True).image_embeds(images))


@pytest.mark.slow
def test_large_photographs_have_nearly_the_same_features(large):
    scaled, whole = (learner(value).image_embeds(load_data(large)) for value in (False, True))
    assert not torch.equal(scaled, whole) and (scaled * whole).sum(dim=1).min() > 0.999


def test_whole_images_are_read_as_pillow_decodes_them(large):
    made = learner(True)
    pixels, files = made.encoder.images(load_data(large)), sorted(large.rglob("*.jpg"))
    by_name = {pixels.images.item_name(index): pixels[index][0] for index in range(len(pixels))}
    for file in files:
        with Image.open(file) as image:
            values = made.encoder.processor.image_processor(images=image.convert("RGB"), return_tensors="pt")
        assert torch.equal(by_name[str(file)], values["pixel_values"][0])


def test_decoded_images_are_used_as_they_are(large):
    with Image.open(next(large.rglob("*.jpg"))) as image:
        opened = learner(False).image_embeds(image)
        assert torch.equal(opened, learner(True).image_embeds(image)) and image.size == LARGE


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"do_resize": True, "size": {"shortest_edge": 224}}, 1344),
        ({"do_resize": True, "size": {"height": 384, "width": 384}}, 2304),
        ({"do_resize": True, "size": {"shortest_edge": 16}}, 320),
        ({"do_resize": False, "size": {"shortest_edge": 224}}, 0),
        ({"do_resize": True, "size": {"shortest_edge": 224, "longest_edge": 448}}, 0),
        ({"do_resize": True, "size": {"max_height": 224, "max_width": 224}}, 0),
        ({"size": {"shortest_edge": 224}}, 0),
        ({}, 0),
    ],
)
def test_only_processors_that_fix_the_size_allow_a_smaller_scale(settings, expected):
    class Processor:
        def to_dict(self):
            return settings

    class Both:
        image_processor = Processor()

    model = tiny_learner("frozen", ("lda",)).clip
    assert jpeg_side(Both(), model, False) == expected and jpeg_side(Both(), model, True) == 0


@pytest.mark.slow
def test_store_keeps_both_kinds_of_features_apart(large, tmp_path):
    images, store = load_data(large), FeatureStore(tmp_path / "store.sqlite")
    alone, found = {}, {}
    for whole in (False, True):
        alone[whole] = learner(whole).image_embeds(images)
        made = learner(whole)
        made.use_store(store)
        made.image_embeds(images)
        found[whole] = made
    assert store.facts()[0] == 2 * len(images) and found[False].encoder.key != found[True].encoder.key
    for whole, made in found.items():
        assert torch.equal(made.image_embeds(load_data(large)), alone[whole])


@pytest.mark.plain("True")
@pytest.mark.parametrize("whole", [False, True])
def test_saved_learner_reads_as_it_learned(whole, large, tmp_path):
    learned(whole, large).save_pretrained(tmp_path / "saved")
    load = partial(ClassIncrementalLearner.from_pretrained, tmp_path / "saved")
    loaded = load(base_model=learner(whole).clip)
    assert loaded.args.whole_images is whole
    assert torch.equal(loaded.image_embeds(load_data(large)), learner(whole).image_embeds(load_data(large)))
    with pytest.raises(ValueError, match=f"has learned with whole_images={whole}: pass the same"):
        load(base_model=learner(whole).clip, args=LearnerArguments(whole_images=not whole))


def test_run_is_continued_with_the_same_reading_of_images_only(large, tmp_path):
    task = Task(load_data(large), None, tuple(CLASSES))
    run_stream(learner(True), [task], tmp_path / "run")
    with pytest.raises(ValueError, match="whole_images was True and is now False"):
        run_stream(learner(False), [task], tmp_path / "run")
    run_stream(learner(True), [task], tmp_path / "run")


def test_settings_that_read_otherwise_are_refused_once_something_was_learned(large):
    made = learner(False)
    made.change_settings(LearnerArguments(whole_images=True))
    made.learn_task(load_data(large), CLASSES)
    with pytest.raises(ValueError, match="has learned with whole_images=True"):
        made.change_settings(LearnerArguments())


@pytest.mark.plain("squash")
@pytest.mark.parametrize("resize", ["processor", "squash"])
def test_saved_learner_resizes_as_it_learned(resize, large, tmp_path):
    made = learner(False, image_resize=resize)
    made.learn_task(load_data(large), CLASSES)
    made.save_pretrained(tmp_path / "saved")
    load = partial(ClassIncrementalLearner.from_pretrained, tmp_path / "saved")
    expected = made.image_embeds(load_data(large))
    for given in (None, replace(made.args, image_resize="processor"), made.args):
        loaded = load(base_model=learner(False).clip, args=given)
        assert torch.equal(loaded.image_embeds(load_data(large)), expected)
        loaded.change_settings(given or LearnerArguments())
        loaded.save_pretrained(tmp_path / "again")
        again = ClassIncrementalLearner.from_pretrained(
            tmp_path / "again", base_model=learner(False).clip, args=made.args
        )
        assert again.args.image_resize == resize
    with pytest.raises(ValueError, match=f"image_resize is 'crop', but the learner in .* has learned with '{resize}'"):
        load(base_model=learner(False).clip, args=replace(made.args, image_resize="crop"))
    with pytest.raises(ValueError, match="image_resize is 'crop', but this learner was made with"):
        made.change_settings(replace(made.args, image_resize="crop"))


def test_learners_that_read_differently_are_not_merged(large, tmp_path):
    theirs = learner(True)
    theirs.learn_task(load_data(write(tmp_path, (64, 48), 2)), CLASSES)
    with pytest.raises(ValueError, match="different models or settings: jpeg_side differ"):
        learned(False, large).merge(theirs)


@pytest.fixture(scope="module")
def run(large, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "scaled"
    assert call("run", "--model", "demo", "--data", large, "--output", out, "--classifiers", "lda") == 0
    return out


@pytest.mark.parametrize("words", ["suggest {run} {data}", "features {run} --data {data} --split ''"])
def test_flag_that_does_not_fit_the_learner_is_refused(words, run, large, capsys):
    given = shlex.split(words.format(run=run, data=large / "train"))
    assert call(*given, "--whole-images") == 2
    error = capsys.readouterr().err
    assert "--whole-images does not fit" in error and "has learned with --no-whole-images" in error
    call(*given, "--no-whole-images")
    assert "does not fit" not in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--whole-images", "--no-whole-images"])
def test_table_is_learned_as_it_was_made(flag, large, tmp_path, capsys):
    pytest.importorskip("pyarrow")
    table, model = tmp_path / "table.parquet", ["--model", "demo"]
    assert call("features", *model, "--data", large, "--output", table, flag) == 0
    learn = ["run", "--data", table, "--classifiers", "lda", "--output"]
    assert call(*learn, tmp_path / "out") == 0
    loaded = ClassIncrementalLearner.from_pretrained(tmp_path / "out")
    assert loaded.args.whole_images is (flag == "--whole-images")
    other = "--no-whole-images" if flag == "--whole-images" else "--whole-images"
    assert call(*learn, tmp_path / "other", *model, other) == 2
    how = "without" if flag == "--whole-images" else "with"
    assert f"make it again by dulbe-peft features {how} --whole-images" in capsys.readouterr().err
    found = loaded.predict(str(large / "train"), top_k=2, return_scores=True)
    assert call("run", *model, "--data", large, "--output", tmp_path / "files", "--classifiers", "lda", flag) == 0
    files = ClassIncrementalLearner.from_pretrained(tmp_path / "files")
    assert files.predict(str(large / "train"), top_k=2, return_scores=True) == found


@pytest.mark.slow
def test_check_looks_at_labels_with_whole_images(large, monkeypatch):
    for name, few in {"TRIALS": 1, "FOLDS": 2}.items():
        monkeypatch.setattr(f"dulbe_peft.photos.doubtful_labels.{name}", few)
    sides, real = [], PixelDataset.read
    monkeypatch.setattr(PixelDataset, "read", lambda self, index: sides.append(self.side) or real(self, index))
    for flags, expected in ([], 320), (["--whole-images"], 0):
        sides.clear()
        words = ["check", large, "--check-labels", "--model", "demo", "--device", "cpu", "--no-store", *flags]
        assert main([str(word) for word in words]) == 0
        assert {*sides} == {expected}
