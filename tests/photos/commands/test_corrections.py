"""Test the commands that correct a learner: `merge`, `rename` and `forget`."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from lives import content
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from small_runs import call, some

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.data.digits import DIGITS
from dulbe_peft.data.folders import ImageFolder
from dulbe_peft.photos.report import write_report

FIXED = "bayes:kappa=4,rho=10,lda,bridge,prototype"  # settings that a run selects would depend on the old name


@pytest.fixture(scope="module")
def photos(digit_folders):
    return digit_folders(5, 5, 2)


@pytest.fixture(scope="module")
def run(tiny_model):
    def run(data, output):
        assert call("run", "--model", tiny_model, "--classifiers", FIXED, "--data", data, "--output", output) == 0
        return output

    return run


@pytest.fixture(scope="module")
def june(photos, run, tmp_path_factory):
    root = tmp_path_factory.mktemp("june")
    data = some(photos, root / "photos", DIGITS[:4])
    return run(data, root / "run")


def loaded(folder):
    return ClassIncrementalLearner.from_pretrained(folder, machine={"device": "cpu", "progress": False})


def assert_alike(actual, expected, photos, names=("bayes", "lda", "prototype")):
    """Assert that two learners give equal scores and know the same images; the classes' order may differ."""
    assert sorted(actual.class_names) == sorted(expected.class_names)
    order = [actual.class_names.index(name) for name in expected.class_names]
    features = expected.image_embeds(ImageFolder(photos, "test"))
    for name in names:
        a, b = actual.classifiers[name], expected.classifiers[name]
        assert a.counts[order].tolist() == b.counts.tolist()
        torch.testing.assert_close(a(features)[:, order], b(features), rtol=1e-4, atol=1e-3)
    for kind in ("learned", "tested"):
        known = [getattr(learner.state.known, kind) for learner in (actual, expected)]
        assert {n: sorted(of) for n, of in known[0].items()} == {n: sorted(of) for n, of in known[1].items()}


@pytest.mark.slow
def test_renamed_class_equals_one_learned_under_the_new_name(photos, june, run, tmp_path, capsys):
    before = content(june)
    assert loaded(june).classifiers["bayes"].settings()["kappa"] == 4, "the given setting is kept"
    assert call("rename", june, "two", " swan ", "--output", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "two is now swan" in printed and content(june) == before
    command = f"dulbe-peft evaluate {tmp_path / 'out'} --data {june.parent / 'photos'}"
    assert f"earlier results no longer hold; test the corrected learner: {command}" in printed
    expected = run(some(photos, tmp_path / "anew", DIGITS[:4], called={"two": "swan"}), tmp_path / "run")
    assert_alike(loaded(tmp_path / "out"), loaded(expected), photos)
    page = write_report(tmp_path / "out").read_text(encoding="utf-8")
    assert "no test images" not in page and command in page, "the folder of the month"
    assert "two was renamed to swan" in page and "has not been tested since the correction" in page
    # June's test images are still in a folder with the old name, and are found by their content.
    july = some(photos, tmp_path / "july", ["four", "two"], 0, 3)
    shutil.rmtree(july / "test" / "two")
    (july / "train" / "two" / "0.png").write_bytes((photos / "train" / "four" / "4.png").read_bytes())
    capsys.readouterr()
    assert call("learn", tmp_path / "out", "--data", july, "--output", tmp_path / "later") == 0
    captured = capsys.readouterr()
    assert "not used again" not in captured.err and "'two' is learned as a new class" in captured.out
    assert "once called 'two' is now 'swan'" in captured.out
    results = json.loads((tmp_path / "later" / "results.json").read_text())
    assert results["class_names"][0] == ["one", "three", "swan", "zero"]
    assert None not in results["classifiers"]["lda"]["matrix"][-1]


def test_joined_classes_equal_one_class_learned_from_both(photos, june, run, tmp_path, capsys):
    assert call("rename", june, "two", "three", "--output", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "dropped: bridge: the 'bridge' classifier cannot be merged" in printed and "3 classes" in printed
    anew = some(photos, tmp_path / "anew", ["zero", "one", "three"])
    for split in ("train", "test"):
        for file in (photos / split / "two").iterdir():
            shutil.copy(file, anew / split / "three" / f"two-{file.name}")
    joined = loaded(tmp_path / "out")
    assert_alike(joined, loaded(run(anew, tmp_path / "run")), photos)
    assert list(joined.classifiers) == ["bayes", "lda", "prototype"]
    assert "two was merged into three" in write_report(tmp_path / "out").read_text()


@pytest.mark.slow
def test_photographs_are_forgotten_by_their_content(photos, june, run, tmp_path, capsys):
    wrong = tmp_path / "elsewhere.jpg"
    shutil.copy(photos / "train" / "one" / "3.png", wrong)
    both = ["--image", wrong, photos / "train" / "two" / "0.png"]
    assert call("forget", june, *both, "--output", tmp_path / "out") == 0
    assert "dropped: bridge" in capsys.readouterr().out
    anew = some(photos, tmp_path / "anew", DIGITS[:4])
    (anew / "train" / "one" / "3.png").unlink()
    (anew / "train" / "two" / "0.png").unlink()
    assert_alike(loaded(tmp_path / "out"), loaded(run(anew, tmp_path / "run")), photos)
    assert "2 images were forgotten" in write_report(tmp_path / "out").read_text(encoding="utf-8")
    capsys.readouterr()
    # The forgotten images can be learned again, and the others are not counted twice.
    assert call("learn", tmp_path / "out", "--data", june.parent / "photos", "--output", tmp_path / "back") == 0
    assert "18 learned before" in capsys.readouterr().out
    assert_alike(loaded(tmp_path / "back"), loaded(june), photos)
    for words, why in (
        (["--image", photos / "train" / "four" / "0.png"], "has not been learned, so it cannot be forgotten"),
        ([], "nothing to forget"),
    ):
        assert call("forget", june, *words, "--output", tmp_path / "none") == 2
        assert why in capsys.readouterr().err and not (tmp_path / "none").exists()


@pytest.mark.slow
def test_merge_equals_learning_the_images_of_both(photos, june, run, tmp_path, capsys):
    berlin = run(some(photos, tmp_path / "a", DIGITS[:3], 0, 3), tmp_path / "berlin")
    data = some(photos, tmp_path / "b", DIGITS[2:4], 3)
    shutil.copy(next((photos / "test" / "one").iterdir()), data / "train" / "three" / "seen.png")
    paris = run(data, tmp_path / "paris")
    capsys.readouterr()
    before = content(berlin), content(paris)
    assert call("merge", berlin, paris, "--output", tmp_path / "both") == 0
    printed = capsys.readouterr().out
    assert "dropped: bridge: the 'bridge' classifier cannot be merged" in printed
    assert "1 test image of one learner was learned by the other" in printed
    assert f"4 classes, of which {paris} added 1" in printed and (content(berlin), content(paris)) == before
    merged = loaded(tmp_path / "both")
    expected = loaded(berlin)
    images = ImageFolder(tmp_path / "b", "train")
    expected.state.classifiers.pop("bridge")
    expected.update_classes(images.select(["two"]))
    expected.learn_task(images.select(["three"]))
    assert merged.tasks == expected.tasks and merged.state.updates[-1].images == {"two": 2}
    features = expected.image_embeds(ImageFolder(photos, "test"))
    for name, classifier in expected.classifiers.items():
        torch.testing.assert_close(merged.classifiers[name](features), classifier(features), rtol=1e-4, atol=1e-3)
    july = some(photos, tmp_path / "july", ["four"])
    assert call("learn", tmp_path / "both", "--data", july, "--output", tmp_path / "later") == 0
    only = loaded(paris)
    for name in ("bayes", "lda", "prototype"):
        only.state.classifiers.pop(name)
    only.save_pretrained(tmp_path / "only")
    capsys.readouterr()
    for other, why in (("both", "have learned the same "), ("only", f"only {berlin} has it")):
        assert call("merge", berlin, tmp_path / other, "--output", tmp_path / "no") == 2
        captured = capsys.readouterr()
        assert why in captured.err and not captured.out, "a refused merge drops no classifier"
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize("how", ["bfloat16", "float32 by onnx"])
def test_images_learned_in_another_precision_are_not_forgotten(photos, june, tmp_path, how):
    learner, file = loaded(june), photos / "train" / "one" / "0.png"
    assert learner.state.known.ways == {("float32", 1)}
    learner.state.classifiers.pop("bridge")
    learner.use_state(replace(learner.state, known=replace(learner.state.known, ways=frozenset({(how, 1)}))))
    learner.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match=f"learned in {how}, and float32 would remove different features"):
        loaded(tmp_path / "saved").forget_images(file)


@pytest.mark.plain("three")
@pytest.mark.parametrize(("label", "again"), [("two", True), ("three", False), ("two", False)])
def test_keyword_in_a_learned_photograph_does_not_make_it_new(photos, run, tmp_path, capsys, label, again):
    june = run(some(photos, tmp_path / "june", DIGITS[:4]), tmp_path / "june-run")  # fills the store of this test
    july = some(photos, tmp_path / "july", ["four"])
    file = next((photos / "train" / "two").iterdir())
    (july / "train" / label).mkdir()
    tag = PngInfo()  # a program writes a tag into the file without changing the pixels
    tag.add_text("comment", "a tag")
    with Image.open(file) as image:
        image.save(july / "train" / label / "tagged.png", pnginfo=tag)
    assert call("learn", june, "--data", july, "--output", tmp_path / "out", *["--again"] * again) == 0
    said = capsys.readouterr().out
    counts = loaded(tmp_path / "out").state.image_counts()
    assert [counts[name] for name in ("two", "three", "four")] == [5 + again, 5 + (label == "three"), 5]
    if label == "three":
        assert "and of another class: both count" in said and "tagged.png, learned as 'two' before" in said
    else:
        assert ("count twice: 1 image that the model sees like a learned image in another file" in said) == (not again)


def test_forget_says_which_photograph_left_which_class(photos, run, tmp_path, capsys):
    june = run(some(photos, tmp_path / "june", DIGITS[:3]), tmp_path / "june-run")
    file = next((photos / "train" / "two").iterdir())
    assert call("forget", june, "--image", file, "--output", tmp_path / "out") == 0
    assert f"forgotten: {file}, of the class 'two'" in capsys.readouterr().out
