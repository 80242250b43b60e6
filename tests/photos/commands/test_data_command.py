"""Test what `check` and `run` report about the data, and what unreadable files do to a stream."""

import html
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from lives import content
from PIL import ExifTags, Image, ImageEnhance
from sklearn.model_selection import StratifiedKFold, cross_val_predict

from dulbe_peft.data import images
from dulbe_peft.data.folders import ImageFolder
from dulbe_peft.data.readers import load_data
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.photos import doubtful_labels as doubtful
from dulbe_peft.photos.commands.check import STRIPS, VIEWED, VIEWS, _expected, _reliability
from dulbe_peft.photos.commands.main import main
from dulbe_peft.photos.data.inventory import Inventory
from dulbe_peft.photos.data.looking import NEAR, SIDE, find_duplicates, look_at
from dulbe_peft.photos.doubtful_labels import (
    ENOUGH,
    TRIALS,
    Trial,
    _swapped,
    doubtful_labels,
    items_of,
    misnamed_classes,
    try_swapped_labels,
)
from dulbe_peft.photos.report.html import write_page
from dulbe_peft.sklearn import FeatureClassifier
from dulbe_peft.utils.files import read_csv

QUICK = ["--epochs", "1", "--residual-rank", "2", "--support-rank", "8", "--device", "cpu", "--no-progress"]
FROZEN = ["--strategy", "frozen", "--classifiers", "prototype"]
PLAIN = "bayes:features=0"


@pytest.fixture
def plain(monkeypatch):
    """Judge labels without random features, which take most of the time and change nothing that a command says."""
    whole = doubtful._classifier

    def made(*given):
        classifier = whole(*given)
        assert classifier.classifier == "bayes"
        return classifier.set_params(classifier=PLAIN)

    monkeypatch.setattr(doubtful, "_classifier", made)


@pytest.fixture
def photos(digit_folders, tmp_path):
    """Copy a folder of four digits with five training and three test images each, which tests may damage."""
    return shutil.copytree(digit_folders(4, 5, 3), tmp_path / "photos")


def run(photos, *more: str) -> int:
    return main(["run", "--model", str(demo_model_folder()), "--data", str(photos), *QUICK, *more])


@pytest.mark.slow
def test_unreadable_images_are_left_out_or_with_strict_stop_a_run(photos, tmp_path, capsys):
    bad, out = photos / "train" / "two" / "1.png", str(tmp_path / "out")
    bad.write_bytes(bad.read_bytes()[:60])
    (photos / "test" / "two" / "notes.txt").write_text("x")
    assert main(["check", str(photos)]) == 2
    assert capsys.readouterr().out.endswith(" --output out-photos\n")
    assert run(photos, "--output", out, "--strict", *FROZEN) == 2
    said = capsys.readouterr().err
    assert said.startswith("dulbe-peft: 1 of the images") and f"{bad}: " in said and "--strict" in said
    assert run(photos, "--output", out, *FROZEN) == 0
    said = capsys.readouterr().out
    assert f"  {bad}: " in said and "a file ending in .txt is not read, such as" in said
    assert said.startswith("4 classes; images: 19 in train, 12 in test; left out: 1; cannot be read: 1\n")
    other = photos / "test" / "two" / "x.png"
    other.write_bytes(bad.read_bytes())
    capsys.readouterr()
    assert main(["evaluate", out, "--data", str(photos), "--device", "cpu", "--strict"]) == 2
    assert str(other) in capsys.readouterr().err
    assert main(["evaluate", out, "--data", str(photos), "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["num_images"] == 12 and str(other) in said.err
    encoded = ["features", out, "--data", str(photos), "--device", "cpu", "--output"]
    assert main([*encoded, str(tmp_path / "none"), "--strict"]) == 2 and not (tmp_path / "none").exists()
    for number, split in enumerate(([], ["--split", "train"])):
        assert main([*encoded, str(tmp_path / f"{number}.parquet"), *split]) == 0
        assert len(load_data(tmp_path / f"{number}.parquet", "train")) == 19


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ("dulbe", ["k_proj  96 -> 96  4 layers  shared 1  residual 2  support <= 8", "statistics: 1.28 MiB"]),
        ("frozen", ["nothing is trained, and no layer is adapted"]),
        ("bofa", ["visual_projection  96 -> 64  1 layer "]),
    ],
)
def test_dry_run_opens_the_data_and_writes_nothing(photos, capsys, strategy, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert run(photos, "--dry-run", "--increment", "2", "--strategy", strategy) == 0
    said = capsys.readouterr().out
    words = [*words, "task 1: 2 classes, 10 training images, 6 test images: one, three", " MiB with 4 classes"]
    assert all(word in said for word in words) and sorted(tmp_path.rglob("*")) == before


def test_unknown_target_modules_stop_a_run_before_training(photos, tmp_path, capsys):
    for names in ("text_projection", "k_porj"):
        flags = ["--output", str(tmp_path / "out"), "--target-modules", names]
        assert run(photos, *flags, "--strategy", "dulbe") == 2
        said = capsys.readouterr().err
        assert names in said and ("text_target_modules" in said) == names.startswith("text")
        assert not (tmp_path / "out").exists()
    assert run(photos, *flags, "--dry-run", *FROZEN) == 0
    assert "--target-modules has no effect" in capsys.readouterr().err


def test_check_finds_duplicates(photos, tmp_path, capsys):
    """There is one file in both splits, one in two classes, and a picture saved again, smaller and brighter."""
    shutil.copy(photos / "train" / "one" / "1.png", photos / "test" / "one" / "copy.png")
    shutil.copy(photos / "train" / "two" / "2.png", photos / "train" / "zero" / "copy\x1b[2J.png")
    noise = np.random.default_rng(0).integers(0, 256, (12, 12), dtype=np.uint8)
    large = Image.fromarray(noise).resize((480, 480), Image.Resampling.BICUBIC)
    large.save(photos / "train" / "three" / "large.png")
    again = ImageEnhance.Brightness(large.resize((200, 200))).enhance(1.05)
    again.save(photos / "test" / "three" / "again.jpg", quality=60)
    (photos / "train" / "rare").mkdir()
    large.rotate(90).save(photos / "train" / "rare" / "1.png")
    (photos / "test" / "one" / "notes.txt").write_text("x")
    (photos / "test" / "one" / "bad\x1b.png").write_bytes(b"x")
    assert main(["check", str(photos), "--page", str(tmp_path / "page.html"), "--csv", str(tmp_path / "t.csv")]) == 2
    header, bad, *rows = read_csv(tmp_path / "t.csv")
    assert header == ["split", "path", "finding", "detail", "proposed_class", "probability"]
    assert bad[3].startswith("it is none of the formats JPEG") and all(row.pop() + row.pop() == "" for row in rows)
    assert bad[:3] == ["test", rf"{photos}/test/one/bad\x1b.png", "unreadable"] and sorted(rows) == [
        ["", f"{photos}/test/one/notes.txt", "left out", "a file ending in .txt is not read"],
        ["test", f"{photos}/test/one/copy.png", "duplicate", f"of train: {photos}/train/one/1.png"],
        ["test", f"{photos}/test/three/again.jpg", "near copy", f"of train: {photos}/train/three/large.png"],
        ["train", rf"{photos}/train/zero/copy\x1b[2J.png", "duplicate", f"of train: {photos}/train/two/2.png"],
    ]
    for name in ("notes.txt", "bad\x1b.png"):
        (photos / "test" / "one" / name).unlink()
    capsys.readouterr()
    assert main(["check", str(photos), "--page", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().out
    assert re.search(r"5 classes +23 +14\n", said) and "fewer than 4 images in train: rare (1)" in said
    for words, first, second in (
        ("the same file in training and test images", "train: ?/train/one/1.png", "test: ?/test/one/copy.png"),
        ("the same file in two classes", "train: ?/train/two/2.png", r"train: ?/train/zero/copy\x1b[2J.png"),
        ("nearly the same picture in training", "train: ?/train/three/large.png", "test: ?/test/three/again.jpg"),
    ):
        pair = f"  {first}  =  {second}".replace("?", str(photos))
        assert re.search(rf"{words}.*: 1 pair\n{re.escape(pair)}\n", said)
    assert "\x1b" not in said and "narrower" not in said, "all digits are small"
    assert said.endswith(f" run --model openai/clip-vit-base-patch16 --data {photos} --output out-photos\n")
    pictures = re.findall(r'<img[^>]* src="([^"]+)"', (tmp_path / "page.html").read_text(encoding="utf-8"))
    assert len(pictures) == 23 + 6 and all(source.startswith("data:image/jpeg;base64,") for source in pictures)
    assert run(photos, "--dry-run", *FROZEN) == 0
    said = capsys.readouterr().out
    assert "so the accuracy is too optimistic: 1 pair" in said and "nearly" not in said  # a run compares only files


def test_duplicates_equal_a_literal_comparison_of_all_pairs(tmp_path):
    """The reference correlates grey thumbnails in float64; the command lists only the first pair of each image."""
    generator = np.random.default_rng(0)
    pictures = [generator.integers(0, 256, (16, 16)).astype(float) for _ in range(4)]
    pictures += [pictures[0] * 0.9 + 9, pictures[0] + generator.normal(0, 5, (16, 16)), *np.full((2, 16, 16), 40.0)]
    pictures[-1] += 1
    (tmp_path / "a").mkdir()
    for number, picture in enumerate(pictures):
        Image.fromarray(picture.clip(0, 255).astype(np.uint8)).save(tmp_path / "a" / f"{number}.png")
    images = ImageFolder(tmp_path)
    rows = [np.asarray(images.image(i).convert("L"), dtype=float).ravel() for i in range(len(images))]
    textured = [i for i, row in enumerate(rows) if row.std() > 1]
    expected = {(i, j) for i in textured for j in textured if i < j and np.corrcoef(rows[i], rows[j])[0, 1] > NEAR}
    found = {
        (row.first.place, row.second.place) for row in find_duplicates({"train": images}, look_at({"train": images}))
    }
    assert SIDE == 16 and found == {(0, 4), (0, 5)} and expected == {(0, 4), (0, 5), (4, 5)}
    assert find_duplicates({"train": images}) == []


def test_unreadable_files_are_reported_with_a_remedy(photos, tmp_path, capsys, monkeypatch):
    (photos / "train" / "one" / "phone.heic").write_bytes(b"x")
    monkeypatch.setattr("dulbe_peft.data.folders.image_suffixes", lambda: (".png",))
    assert main(["check", str(photos)]) == 0
    assert 'need an extra package: pip install ".[heic]" in a clone of dulbe_peft, such as' in capsys.readouterr().out
    (photos / "train" / "one" / "1.png").write_bytes(b"x")
    assert main(["check", str(photos)]) == 2
    assert "cannot be read: 1" in capsys.readouterr().out
    archive = shutil.make_archive(str(tmp_path / "photos"), "zip", photos)
    for command in (["check", archive], ["run", "--model", "demo", "--data", archive, "--output", "o"]):
        assert main(command) == 2 and "it is an archive: unpack it" in capsys.readouterr().err


def clouds(counts):
    generator = np.random.default_rng(0)
    centres, labels = generator.normal(size=(len(counts), 16)), np.repeat(np.arange(len(counts)), counts)
    return (centres[labels] + 0.3 * generator.normal(size=(len(labels), 16))).astype(np.float32), labels


@pytest.mark.slow
def test_doubtful_labels_are_ranked_as_by_cleanlab(plain):
    for counts in ([5, 1, 1], [30, 30]):
        assert doubtful_labels(*clouds(counts), None, 10.0).labels == []
    features, labels = clouds([20] * 4)
    labels[::9] = (labels[::9] + 1) % 4
    found = doubtful_labels(features, labels, None, 10.0).labels
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    made = FeatureClassifier(PLAIN, logit_scale=10.0)
    probabilities = cross_val_predict(made, features, labels, cv=folds, method="predict_proba")
    scores = probabilities[np.arange(len(labels)), labels]  # cleanlab's "self_confidence"
    wrong = [row for row in np.argsort(scores, kind="stable") if probabilities[row].argmax() != labels[row]]
    assert [doubt.image for doubt in found] == wrong and len(wrong) >= 9


@pytest.mark.plain("True")
@pytest.mark.parametrize("similar", [False, True])
def test_first_doubtful_labels_say_how_many_of_them_are_wrong(similar):
    """A tenth of the labels go to one other class each, 0 and 1, 2 and 3, ..., or to any."""
    features, labels = clouds([30] * 6)
    for label in (1, 3, 5):  # the two look alike
        away = features[labels == label - 1].mean(axis=0) - features[labels == label].mean(axis=0)
        features[labels == label] += 0.3 * away
    changed = labels.copy()
    changed[::10] = labels[::10] ^ 1 if similar else (labels[::10] + 1 + np.arange(18) % 5) % 6
    doubts, share = doubtful_labels(features, changed, None, 10.0)
    assert 0 < share[1] < 0.1 < share[2] and 0.04 < share[0] < 0.2
    wrong = sum(bool(changed[doubt.image] != labels[doubt.image]) for doubt in doubts[:10])
    assert wrong / 2 <= sum(doubt.wrong[0] for doubt in doubts[:10]) <= 2 * wrong and wrong >= 8
    assert doubtful_labels(features, labels, None, 10.0).share[:2] == (0, 0)
    for chances, told in (((0.84, 0.3, 0.96), "about 8 (3 to 10)"), ((0.0, 0.0, 0.5), "at most 5")):
        first = [doubt._replace(wrong=chances) for doubt in doubts[:10]]
        assert _expected(first) == [f"of the first 10 images, {told} are expected to have a wrong label"]
    assert doubtful_labels(*clouds([5, 1, 1]), None, 10.0) == ([], None)


def test_names_that_do_not_fit_keep_their_place_beside_a_class_with_one_image():
    features, labels = clouds([1, *([8] * 11)])
    texts = np.stack([features[labels == label].mean(axis=0) for label in range(12)])
    texts[[3, 9]] = texts[[9, 3]]
    assert misnamed_classes(features, labels, texts, 10.0) == ([3, 9], [(3, 9)])
    assert misnamed_classes(features, labels, None, 10.0) == ([], [])


@pytest.mark.slow
def test_swapped_labels_are_found_except_by_a_blind_model(monkeypatch):
    features, labels = clouds([20] * 4)
    given = labels.copy()
    sure = try_swapped_labels(features, labels, None, 10.0)
    assert np.array_equal(labels, given) and sure.swapped >= ENOUGH // 4 and sure.found == sure.swapped
    assert sure.others_doubted == 0 and sure.others == TRIALS * 80 - sure.swapped
    (line,) = _reliability(sure)
    assert line.startswith(f"trial with {sure.swapped} labels swapped on purpose: {sure.swapped} of them (100 %)")
    assert line.endswith("were found, and 0 % of the other labels were doubted, too")
    noise = np.random.default_rng(1).normal(size=features.shape).astype(np.float32)  # of a blind model
    monkeypatch.setattr("dulbe_peft.photos.doubtful_labels.TRIALS", 1)
    blind = try_swapped_labels(noise, labels, None, 10.0)
    assert blind.swapped == sure.swapped // TRIALS
    assert blind.others_doubted / blind.others > 0.5
    line, advice = _reliability(blind)
    assert "this model" in advice and f": {blind.found} of them (" in line
    assert try_swapped_labels(*clouds([5, 1, 1]), None, 10.0) is None and "is not known" in _reliability(None)[0]


@pytest.mark.parametrize("pairs", [1, 3, 100])
def test_swapping_keeps_the_sizes_of_classes(pairs):
    labels = np.repeat([0, 1, 2], [10, 4, 1])
    changed = _swapped(labels, np.random.default_rng(0).permutation(15), pairs)
    assert np.array_equal(np.bincount(changed), np.bincount(labels))
    assert (changed != labels).sum() == min(2 * pairs, 10), "only five images are not of class 0"


@pytest.mark.parametrize(
    ("trial", "advice"),
    [
        (Trial(0, 2, 3, 20), "this model misses many wrong labels, so labels that are not listed may be wrong, too"),
        (Trial(9, 10, 12, 20), "this model doubts many correct labels, so most of its doubts may be unfounded"),
    ],
)
def test_unreliable_doubts_come_with_a_warning(trial, advice):
    assert _reliability(trial)[1:] == [advice]


@pytest.mark.slow
def test_item_with_a_wrong_label_is_found_if_its_views_are_left_out_together():
    """Eight items of each class with five views each; without groups, the views of the wrong item vouch for it."""
    generator = np.random.default_rng(0)
    centres = np.repeat(np.eye(3, 16) * 3, 8, axis=0) + generator.normal(size=(24, 16))
    features = np.repeat(centres, 5, axis=0) + 0.05 * generator.normal(size=(120, 16))
    features = (features / np.linalg.norm(features, axis=1, keepdims=True)).astype(np.float32)
    labels, groups = np.repeat([0, 1, 2], 40), np.repeat(np.arange(24), 5)
    labels[:5] = 1
    wrong = set(range(5))
    assert not wrong & {doubt.image for doubt in doubtful_labels(features, labels, None, 10.0).labels}
    doubts, (_, low, high) = doubtful_labels(features, labels, None, 10.0, groups)
    assert doubts[0].images == (0, 1, 2, 3, 4) and (doubts[0].predicted, doubts[0].alike) == (0, 5)
    assert items_of(labels, groups) == [tuple(range(at, at + 5)) for at in range(0, 120, 5)]
    trial = try_swapped_labels(features, np.repeat([0, 1, 2], 40), None, 10.0, groups)
    assert (trial.swapped, trial.others) == (10, 110), "five trials with two items of 24 each"
    assert 8 <= trial.found <= 10
    assert low <= 1 / 24 <= high < 0.5
    few = np.isin(groups, [*range(8, 11), *range(16, 19)])
    assert doubtful_labels(features[few], labels[few] - 1, None, 10.0, groups[few]).share is None
    alone = np.where(np.arange(120) < 5, 0, np.where(labels == 1, 1, 2))  # a class of one item cannot be left out
    assert (
        not {i for doubt in doubtful_labels(features, alone, None, 10.0, groups).labels for i in doubt.images} & wrong
    )


@pytest.mark.slow
def test_check_lists_items_with_a_wrong_label_first(digit_folders, tmp_path, capsys, monkeypatch, plain):
    monkeypatch.setattr("dulbe_peft.photos.doubtful_labels.TRIALS", 1)
    digits, kinds, table, page = digit_folders(3, 20, 0), tmp_path / "kinds", tmp_path / "t.csv", tmp_path / "p.html"
    for name in ("zero", "one", "two"):
        for number, file in enumerate(sorted(digits.rglob(f"train/{name}/*.png"))):
            kind = "two" if (name, number % 5) == ("one", 3) else name
            folder = kinds / kind / f"MK-{number % 5}-{name}"
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, folder)
    command = ["check", str(kinds), "--check-labels", "--model", str(demo_model_folder()), "--device", "cpu"]
    assert main([*command, "--group", "folder", "--csv", str(table), "--page", str(page)]) == 0
    said = capsys.readouterr().out
    first = said[said.index("look like another class (") :].splitlines()[1]
    assert first.startswith("  two/MK-3-one: 4 of 4 photographs look like 'one', not like 'two' (probability ")
    assert "\n1 of 15 items look like another class\n" in said
    assert " labels of whole items swapped on purpose: " in said
    assert "% of the items' labels look wrong" in said or "too few items to say how many labels are wrong" in said
    rows = [row for row in read_csv(table) if "two/MK-3-one/" in row[1] and row[2] == "looks like another class"]
    assert len(rows) == 4 and {row[4] for row in rows} == {"one"}
    assert "two/MK-3-one" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("every", [2, 5])
def test_check_shows_photographs_of_the_same_minute_first(tmp_path, capsys, every):
    """Of each class, every second or fifth photograph was taken a second after another one."""
    page = tmp_path / "page.html"
    for number in range(40):
        exif, pair = Image.Exif(), number % every == 1
        minute = 10 * (number % 20 - pair)
        exif.get_ifd(ExifTags.IFD.Exif)[ExifTags.Base.DateTimeOriginal] = (
            f"2026:05:0{1 + number // 20} {minute // 60:02d}:{minute % 60:02d}:{int(pair):02d}"
        )
        (tmp_path / "photos" / "ab"[number // 20]).mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 255, (12, 12, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / "ab"[number // 20] / f"{number:02d}.jpg", exif=exif)
    assert main(["check", str(tmp_path / "photos"), "--page", str(page)]) == 0
    said, shown = capsys.readouterr().out, page.read_text(encoding="utf-8")
    words = "40 of 40 photographs were taken within 60 seconds of another one of their class and place; if these show "
    words += "the same items or animals, give their groups (--group-seconds 60 or --group)"
    assert said.startswith(f"{words}\n\nclass ") == (words in shown) == (every == 2)
    if every == 2:
        assert shown[: shown.index("<h2")].count("data:image/jpeg") == 2 * STRIPS, "five pairs"
        assert main(["check", str(tmp_path / "photos"), "--group-seconds", "60"]) == 0
        assert "within 60 seconds" not in capsys.readouterr().out, "their groups are known"


@pytest.mark.slow
def test_check_shows_photographs_that_look_alike_before_any_share(digit_folders, tmp_path, capsys, monkeypatch, plain):
    monkeypatch.setattr("dulbe_peft.photos.doubtful_labels.TRIALS", 1)
    folder, page = tmp_path / "photos", tmp_path / "page.html"
    for file in digit_folders(3, 5, 0).rglob("train/*/*.png"):
        (folder / file.parent.name).mkdir(parents=True, exist_ok=True)
        with Image.open(file) as image:
            for turn in range(4):
                image.rotate(turn).save(folder / file.parent.name / f"{file.stem}-{turn}.png")
    command = ["check", str(folder), "--check-labels", "--model", str(demo_model_folder()), "--device", "cpu"]
    assert main([*command, "--page", str(page)]) == 0
    said, shown = capsys.readouterr().out, html.unescape(page.read_text(encoding="utf-8"))
    assert said.index(VIEWS) < said.index("labels look wrong (")
    first = shown[: shown.index("<h2")]
    assert f"{VIEWS[0].upper()}{VIEWS[1:]}" in first and first.count("data:image/jpeg") == 3 * VIEWED
    assert main([*command, "--group", "/([0-9]+)-", "--page", str(page), "--overwrite"]) == 0
    assert VIEWS not in capsys.readouterr().out


def test_check_lists_and_shows_doubtful_labels(digit_folders, tmp_path, capsys, monkeypatch, plain):
    monkeypatch.setattr("dulbe_peft.photos.doubtful_labels.TRIALS", 1)
    doubted = shutil.copytree(digit_folders(4, 12, 4), tmp_path / "photos")
    for words in (["--check-labels"], ["--model", "demo"]):
        assert main(["check", str(doubted), *words]) == 2
        assert "need each other" in capsys.readouterr().err
    for source, target in (("train/two/1.png", "train/one/x.png"), ("test/three/14.png", "test/zero/y\x1b.png")):
        (doubted / source).rename(doubted / target)
    page, table = tmp_path / "page.html", tmp_path / "t.csv"
    command = ["check", str(doubted), "--check-labels", "--model", str(demo_model_folder()), "--device", "cpu"]
    assert main([*command, "--page", str(page), "--csv", str(table)]) == 0
    assert {tuple(row[:3]) for row in read_csv(table)} >= {
        ("train", f"{doubted}/train/one/x.png", "looks like another class"),
        ("test", rf"{doubted}/test/zero/y\x1b.png", "looks like another class"),
    }
    said = capsys.readouterr().out
    lines = said[said.index("look like another class (") :].partition("\nabout ")[0].splitlines()[1:]
    assert 2 <= len(lines) <= 10
    assert re.search(r"\nabout [0-9.]+ % of the labels look wrong \([0-9.]+ to [0-9.]+ %\)\n", said)
    assert f"\nof the first {len(lines)} images, about " in said
    proposed = {Path(path).name: (name, float(share)) for _, path, _, _, name, share in read_csv(table)[1:] if name}
    assert proposed["x.png"][0] == "two" and proposed[r"y\x1b.png"][0] == "three"
    assert all(share >= 0.25 for _, share in proposed.values()), "it is the largest of four"
    first = lines[0] + lines[1]
    assert re.search(r"train/one/x\.png: looks like 'two', not like 'one' \(probability [0-9.]+%\)", first)
    assert r"test/zero/y\x1b.png: looks like 'three', not like 'zero'" in first
    text = page.read_text(encoding="utf-8")
    part = text[text.index("Labels to check") : text.index("The classes")]
    assert part.count("data:image/jpeg") == len(lines) and "one/x.png" in part
    trial = re.search(r"trial with (\d+) labels swapped on purpose: (\d+) of them \(", said)
    assert 0 < int(trial[2]) <= int(trial[1]) and trial[0].capitalize() in part


@pytest.mark.slow
def test_check_asks_about_folders_that_are_exchanged(digit_folders, tmp_path, capsys, monkeypatch, plain):
    monkeypatch.setattr("dulbe_peft.photos.doubtful_labels.TRIALS", 1)
    folder, page = shutil.copytree(digit_folders(10, 6, 2), tmp_path / "photos"), tmp_path / "page.html"
    for split in ("train", "test"):
        for old, new in (("one", "other"), ("two", "one"), ("other", "two")):
            (folder / split / old).rename(folder / split / new)
    command = ["check", str(folder), "--check-labels", "--model", str(demo_model_folder()), "--device", "cpu"]
    assert main([*command, "--page", str(page)]) == 0
    said = "'one' and 'two' look exchanged: are the images of each in the folder of the other?"
    assert f"\n{said}" in capsys.readouterr().out
    assert f"<p>{said[0].upper()}{said[1:]}" in html.unescape(page.read_text(encoding="utf-8"))


def test_page_shows_file_names_that_are_not_utf8(tmp_path):
    empty = dict.fromkeys(("alike", "views", "problems", "strips", "pairs", "doubtful", "reliability"), ())
    write_page(tmp_path / "page.html", "check.html", {"name": "\udcff.png", "inventory": Inventory({}), **empty})
    assert "\\udcff.png" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_move_to_moves_only_files_with_findings(photos, tmp_path, capsys):
    shutil.copy(photos / "train" / "one" / "0.png", photos / "test" / "one" / "copy.png")
    for path in photos.rglob("*.png"):
        with Image.open(path) as image:
            image.resize((80, 80)).save(path)
    Image.new("RGB", (20, 90), "red").save(photos / "train" / "zero" / "tiny.png")
    bad, odd, table = photos / "train" / "two" / "bad.png", tmp_path / "odd", tmp_path / "t.csv"
    bad.write_bytes(b"no image")
    bad.with_name("notes.txt").write_text("mine")
    before = content(photos)
    suspects = {"unreadable": "train/two/bad.png", "duplicate": "test/one/copy.png", "tiny": "train/zero/tiny.png"}
    assert main(["check", str(photos), "--csv", str(table), "--move-to", str(odd)]) == 2
    rows = [row for row in read_csv(table)[1:] if row[2] != "left out"]
    assert {(row[1], row[2]) for row in rows} >= {(str(photos / p), f) for f, p in suspects.items()}
    moved = dict(read_csv(odd / "moved.csv")[1:])
    assert moved.keys() == {row[1] for row in rows}
    assert {str(photos / p): str(odd / f / p) for f, p in suspects.items()}.items() <= moved.items()
    said = capsys.readouterr().out
    assert f"moved to {odd}: {len(moved)} files; moved.csv" in said and "narrower than 64 pixels: 1 image" in said
    for name, file in before.items():
        place = str(photos / name)
        assert Path(moved.get(place, place)).read_bytes() == file and Path(place).exists() == (place not in moved)
    bad.write_bytes(b"no image")
    (photos / "test" / "one" / "link.png").symlink_to("../../train/one/0.png")
    again = tmp_path / "again"
    for place, words in (
        (odd, "from an earlier call"),
        (photos / "odd", "never changed"),
        (again, "a symbolic link"),
    ):
        assert main(["check", str(photos), "--move-to", str(place)]) == 2
        assert words in capsys.readouterr().err and bad.exists()
    assert not again.exists()


@pytest.fixture
def counted_reads(monkeypatch):
    """Count how often each file is read as a whole, and how often it is decoded, by name."""
    read, decoded = Counter(), Counter()
    real = images.stored_bytes, images.decode_file
    monkeypatch.setattr(images, "stored_bytes", lambda file: read.update([str(file)]) or real[0](file))
    monkeypatch.setattr(images, "decode_file", lambda file, *more: decoded.update([str(file)]) or real[1](file, *more))
    return read, decoded


def test_run_reads_and_decodes_every_image_once(photos, tmp_path, counted_reads):
    """Unreadable files are found while the images are encoded, and the features are kept in the store."""
    (photos / "train" / "two" / "bad.png").write_bytes(b"x")
    shutil.copy(photos / "train" / "two" / "1.png", photos / "test" / "two" / "copy.png")
    files = {str(path) for path in photos.rglob("*.png")}
    assert run(photos, "--output", str(tmp_path / "out"), *FROZEN) == 0
    assert (tmp_path / "out" / "pictures" / "classes-01.jpg").is_file()
    read, decoded = counted_reads
    assert read == decoded == dict.fromkeys(files, 1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["dulbe", "lora"])
def test_trained_run_and_learn_and_evaluate_decode_every_image_once(
    photos, tmp_path, counted_reads, strategy, tiny_model
):
    """They keep the pixel values of the first look, unless there is too little memory. The results are the same."""
    test, train = ([str(path) for path in (photos / split).rglob("*.png")] for split in ("test", "train"))
    decoded, more = counted_reads[1], ["--strategy", strategy, "--epochs", "2", "--classifiers", "prototype"]
    more += ["--model", str(tiny_model)]
    out, small = tmp_path / "out", tmp_path / "small"
    for _ in range(2):  # again after `check`
        assert run(photos, "--output", str(out), "--overwrite", *more) == 0
        assert decoded == dict.fromkeys([*test, *train], 1)
        assert main(["check", str(photos)]) == 0
        decoded.clear()
    assert main(["evaluate", str(out), "--data", str(photos), "--device", "cpu"]) == 0
    assert decoded == dict.fromkeys(test, 1)
    later = shutil.copytree(photos / "train" / "two", tmp_path / "later" / "new")
    for number, path in enumerate(later.glob("*.png")):
        Image.new("L", (30, 30), 9 * number).save(path)
    decoded.clear()
    given = ["--data", str(later.parent), "--output", str(tmp_path / "more"), "--device", "cpu"]
    assert main(["learn", str(out), *given]) == 0
    assert {name: decoded[name] for name in decoded if name not in test} == dict.fromkeys(
        map(str, later.glob("*.png")), 1
    )
    decoded.clear()
    assert run(photos, "--output", str(small), "--pixel-cache-mb", "0", *more) == 0
    assert min(decoded.values()) > 1
    first, last = (json.loads((folder / "results.json").read_text()) for folder in (out, small))
    assert first["tasks"] == last["tasks"]  # the same losses


def test_learn_decodes_only_new_images_and_check_all_images_once(photos, tmp_path, counted_reads, capsys):
    out, later = str(tmp_path / "out"), shutil.copytree(photos / "train" / "two", tmp_path / "later" / "two")
    assert run(photos, "--output", out, *FROZEN) == 0
    for counts in counted_reads:
        counts.clear()
    assert main(["check", str(photos), "--page", str(tmp_path / "check.html")]) == 0
    assert counted_reads[1] == dict.fromkeys(map(str, photos.rglob("*.png")), 1)
    for number, path in enumerate(later.glob("*.png")):
        Image.new("L", (30, 30), 9 * number).save(path)
    for counts in counted_reads:
        counts.clear()
    assert (
        main(["learn", out, "--data", str(tmp_path / "later"), "--output", str(tmp_path / "more"), "--device", "cpu"])
        == 0
    )
    assert counted_reads[1] == dict.fromkeys(map(str, later.glob("*.png")), 1), capsys.readouterr().err
