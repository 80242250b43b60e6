"""Test predictions for unlabelled images: accepted inputs, returned values, unreadable images and errors."""

from __future__ import annotations

import copy
import csv
import io
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import learner_of
from torch.nn import functional as F

from dulbe_peft import ClassIncrementalLearner
from dulbe_peft.classifiers import LdaClassifier, PrototypeClassifier
from dulbe_peft.data.folders import ImageFolder
from dulbe_peft.photos.commands.main import main


@pytest.fixture(scope="module")
def world(base, digit_folders, tmp_path_factory):
    """Return a saved learner of six digits, and the folders of its images."""
    root = digit_folders(6, 10, 4)
    learner = learner_of(base, "frozen", ("ranpac:features=200", "bridge"), prompt_template="a photo of the digit {}.")
    test = ImageFolder(root, "test")
    learner.learn_task(ImageFolder(root, "train"))
    folder = tmp_path_factory.mktemp("saved") / "learner"
    learner.save_pretrained(folder)
    files = [test.item_name(index) for index in range(len(test))]
    features = learner.image_embeds(test)
    return SimpleNamespace(learner=learner, root=root, test=test, files=files, features=features, folder=str(folder))


def test_predictions_do_not_depend_on_how_images_are_passed(world):
    predict, images = world.learner.predict, [world.test[index]["image"] for index in range(len(world.test))]
    pixels = torch.stack([world.learner.encoder.images(world.test)[i][0] for i in range(len(images))])
    expected = predict(images)
    assert len(set(expected)) > 3
    for given in (world.test, world.files, str(world.root / "test"), world.root / "test", pixels, list(pixels)):
        assert predict(given) == expected
    assert predict([world.root / "test", images[0]]) == [*expected, expected[0]]
    assert [predict(images[0]), predict(world.files[0]), predict(pixels[0])] == [expected[0]] * 3
    assert predict((images[0], images[1])) == expected[:2] == predict([(images[0], 3), (images[1], 4)])
    assert predict([]) == [] and world.learner.predictions([]) == []


def test_top_k_returns_best_classes_with_probabilities(world):
    predict = world.learner.predict
    probabilities = world.learner.classifier.probabilities(world.features).double()
    rows = predict(world.test, top_k=3, return_scores=True)
    for row, expected in zip(rows, probabilities, strict=True):
        order = sorted(range(6), key=lambda label: -expected[label])[:3]
        assert [name for name, _ in row] == [world.learner.class_names[label] for label in order]
        assert [p for _, p in row] == pytest.approx([expected[label].item() for label in order], abs=1e-6)
    assert predict(world.test, top_k=3) == [[name for name, _ in row] for row in rows]
    assert predict(world.test, return_scores=True) == [row[0] for row in rows]
    assert len(predict(world.test, top_k=99)[0]) == 6
    for wrong, words in (
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_k": 2, "coverage": 0.7}, "pass only one"),
    ):
        with pytest.raises(ValueError, match=words):
            predict(world.test, **wrong)


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_are_skipped_by_predictions(world, tmp_path, workers):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "bad.jpg").write_bytes(b"no image")
    shutil.copy(world.files[0], tmp_path / "deep" / "good.png")
    learner = ClassIncrementalLearner.from_pretrained(
        world.folder, machine={"device": "cpu", "num_workers": workers, "progress": False}
    )
    rows = {row.image: row for row in learner.predictions([tmp_path, tmp_path / "gone.png"])}
    read, bad, gone = (rows.pop(str(tmp_path / name)) for name in ("deep/good.png", "deep/er/bad.jpg", "gone.png"))
    assert not rows and read.error is None and read.classes == (world.learner.predict(world.files[0]),)
    assert "it is none of the formats JPEG" in bad.error and "No such file" in gone.error
    with pytest.raises(ValueError, match=r"bad\.jpg\) cannot be read: it is none of"):
        learner.predict(tmp_path)


@pytest.fixture(scope="module")
def noise():
    return [Image.fromarray(np.random.default_rng(i).integers(0, 256, (8, 8, 3), dtype=np.uint8)) for i in range(20)]


def test_one_image_gives_one_answer_and_several_give_a_list(world, tmp_path):
    learner, file = world.learner, world.files[0]
    image = Image.open(file)
    shutil.copy(file, tmp_path / "photo.png")
    (name,) = learner.predict([file])
    assert isinstance(name, str)
    content = io.BytesIO(Path(file).read_bytes())
    for one in (str(file), Path(file), image, {"image": image, "label": 0}, (image, 0), content):
        assert learner.predict(one) == name
    (scored,), ((novel,), (novelty,)) = (
        learner.predict([image], return_scores=True),
        learner.predict([image], return_novelty=True),
    )
    assert learner.predict(image, return_scores=True) == scored and scored[0] == name == novel
    assert learner.predict(image, top_k=2) == learner.predict([image], top_k=2)[0]
    assert learner.predict(image, return_novelty=True) == (name, novelty)
    assert learner.predict(image, coverage=0.7) == learner.predict([image], coverage=0.7)[0]
    for several in (tmp_path, [image], (image,), world.test.at([0])):
        assert isinstance(learner.predict(several), list) and len(learner.predict(several)) == 1


def test_rejected_images_get_no_class(world, noise):
    threshold = world.learner.classifier.rejection_threshold(0.3)
    scored = world.learner.predict(noise, return_scores=True)
    answers = world.learner.predict(noise, reject=0.3)
    assert answers == [name if p >= threshold else None for name, p in scored] and None in answers
    assert world.learner.predict(noise, top_k=2, reject=0.3)[answers.index(None)] == []


def test_return_novelty_returns_predictions_and_novelties(world, noise):
    learner = copy.copy(world.learner)
    lda = LdaClassifier(embed_dim=learner.encoder.embed_dim)
    learner.use_state(replace(learner.state, classifiers={"lda": lda}))
    lda.add_classes(learner.class_names, world.features, world.test.labels)
    answers, novelties = learner.predict(noise, top_k=2, return_novelty=True)
    assert answers == learner.predict(noise, top_k=2)
    assert novelties == pytest.approx(lda.novelty(learner.image_embeds(noise)).tolist(), rel=1e-4)
    assert min(novelties) > lda.novelty(world.features).max()
    refused = lda.refused(world.features, 0.1).tolist()
    assert [answer is None for answer in learner.predict(world.test, reject=0.1)] == refused
    assert learner.predict(noise, reject=0.1) == [None] * len(noise)


def test_coverage_returns_the_prediction_sets(world):
    sets = world.learner.classifier.prediction_sets(world.features, 0.7)
    answers = world.learner.predict(world.test, coverage=0.7, return_scores=True)
    for row, members in zip(answers, sets, strict=True):
        assert {name for name, _ in row} == {world.learner.class_names[label] for label in members.nonzero()[:, 0]}
        assert [p for _, p in row] == sorted([p for _, p in row], reverse=True)
    assert world.learner.predict(world.test, coverage=0.7) == [[name for name, _ in row] for row in answers]


def test_predict_command_writes_paths_classes_and_probabilities(world, tmp_path, capsys):
    folder, table, file = str(world.root / "test"), tmp_path / "a.csv", tmp_path / "a.json"
    argv = ["predict", world.folder, folder, "--top-k", "2", "--device", "cpu", "--num-workers", "0"]
    assert main([*argv, "--csv", str(table), "--json", str(file)]) == 0
    expected, novelties = world.learner.predict(folder, top_k=2, return_scores=True, return_novelty=True)
    rows, written = list(csv.DictReader(io.StringIO(table.read_text()))), json.loads(file.read_text())
    second = ["predicted_2", "probability_2"]
    assert list(rows[0]) == ["path", "predicted", "probability", "novelty", *second] and len(rows) == len(expected)
    for place, end in enumerate(("", "_2")):
        assert [row[f"predicted{end}"] for row in rows] == [answers[place][0] for answers in expected]
        found = [float(row[f"probability{end}"]) for row in rows]
        assert found == pytest.approx([answers[place][1] for answers in expected], abs=1e-5)
    assert [float(row["novelty"]) for row in rows] == pytest.approx(novelties, abs=1e-5)
    assert [row["classes"][0]["class"] for row in written] == [answers[0][0] for answers in expected]
    assert {row["path"] for row in rows} == {row["path"] for row in written} == set(world.files)
    capsys.readouterr()
    assert main(argv) == 0
    first = capsys.readouterr().out.splitlines()[0].split("\t")
    assert first[0] == written[0]["path"] and first[1] == f"{expected[0][0][0]} {100 * expected[0][0][1]:.2f} %"


def test_predict_command_continues_after_unreadable_images(world, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.png").write_bytes(b"no")
    argv = [
        "predict",
        "--device",
        "cpu",
        world.folder,
        *(str(tmp_path / name) for name in ("empty", "bad.png", "gone")),
    ]
    assert main([*argv, world.files[0]]) == 1, "a file is missing"
    printed = capsys.readouterr()
    assert printed.out.startswith(world.files[0]) and printed.out.count("\n") == 1
    assert f"{tmp_path / 'empty'} cannot be read: the folder contains no image" in printed.err
    assert "bad.png cannot be read" in printed.err and "1 image, 3 could not be read" in printed.err
    assert main(argv) == 2


def test_predict_command_reads_paths_from_standard_input(world, tmp_path, capsys, monkeypatch):
    """Names may be invalid UTF-8 or look like a formula. Image data in place of paths is an error."""
    odd, formula = os.fsencode(tmp_path) + b"/\xff\xe9.png", b"=1+1.png"
    monkeypatch.chdir(tmp_path)
    for name in (odd, formula):
        shutil.copy(world.files[0], os.fsdecode(name))
    argv = ["predict", world.folder, "-", "--device", "cpu", "--csv", "a.csv", "--json", "a.json"]
    for data, status in ((odd + b"\r\n" + formula + b"\n", 0), (Path(world.files[0]).read_bytes(), 2)):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))
        assert main(argv) == status
        assert ("a zero byte, which paths cannot have" in capsys.readouterr().err) == (status == 2)
    table, written = Path("a.csv").read_bytes(), json.loads(os.fsdecode(Path("a.json").read_bytes()))
    assert odd in table and b"\n'=1+1.png," in table
    assert [row["path"] for row in written] == [os.fsdecode(odd), "=1+1.png"]
    assert [row["classes"][0]["class"] for row in written] == 2 * [world.learner.predict(world.files[0])]


CLASSES, WIDTH = 1000, 32


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (PrototypeClassifier, lambda means: {"sums": means}),
        (LdaClassifier, lambda means: {"sums": means, "scatter": torch.eye(WIDTH), "freedom": torch.tensor(WIDTH)}),
    ],
)
def test_best_classes_are_found_by_inner_products_as_the_docs_say(kind, state):
    classifier = kind(WIDTH)
    means, counts = F.normalize(torch.randn(CLASSES, WIDTH), dim=1), torch.ones(CLASSES, dtype=torch.int64)
    classifier.install({"counts": counts} | state(means))
    classifier._class_names = [str(number) for number in range(CLASSES)]
    features = F.normalize(torch.randn(20, WIDTH), dim=1)
    tensors = classifier.formula()[1]
    rows = torch.cat([tensors["weight"], tensors["bias"][:, None]], dim=1)
    found = (torch.cat([features, torch.ones(len(features), 1)], dim=1) @ rows.T).topk(5)
    expected = classifier(features).topk(5)
    assert torch.equal(found.indices, expected.indices)
    torch.testing.assert_close(found.values, expected.values, rtol=1e-4, atol=1e-4)


def test_probabilities_that_nothing_calibrated_come_with_a_warning(base, digit_folders, tmp_path, recwarn, capsys):
    root = digit_folders(3, 2, 1)
    images, learner = ImageFolder(root, "train"), learner_of(base, "frozen", ("lda",))
    labels = list(images.labels)
    learner.learn_task(images.at([labels.index(label) for label in range(3)]))
    recwarn.clear()
    learner.predict(images)
    assert not recwarn.list, "class names alone need no probability"
    words = "no image could be left out to calibrate the probabilities of the 'lda' classifier, so they can be far off"
    with pytest.warns(UserWarning, match=words):
        learner.predict(images, return_scores=True)
    learner.save_pretrained(tmp_path / "one")
    assert main(["predict", str(tmp_path / "one"), str(root / "test"), "--no-progress", "--num-workers", "0"]) == 0
    assert words in capsys.readouterr().err
    recwarn.clear()
    learner.update_classes(images.at([labels.index(0) + 1]))
    learner.predict(images, return_scores=True)
    assert learner.classifier.calibrated and not recwarn.list


@pytest.mark.slow
def test_trained_model_warns_that_rates_are_not_guaranteed(base, digit_folders, recwarn):
    """The thresholds would come from images that the model was trained on; plain predictions need no threshold."""
    root = digit_folders(2, 30, 2)
    for strategy in ("frozen", "dulbe"):
        fields = {"prompt_template": "a photo of the digit {}.", "batch_size": 30}
        learner = learner_of(base, strategy, ("lda",), **fields)
        learner.learn_task(ImageFolder(root, "train"))
        recwarn.clear()
        learner.predict(ImageFolder(root, "test"))
        assert not recwarn.list
        learner.predict(ImageFolder(root, "test"), return_scores=True)
        said = [str(warning.message) for warning in recwarn.list]
        assert said == ([] if strategy == "frozen" else [learner.state.doubt]), "only trained models are in doubt"
        recwarn.clear()
        for options in ({"reject": 0.2}, {"coverage": 0.8}):
            if strategy == "frozen":
                learner.predict(ImageFolder(root, "test"), **options)
                continue
            with pytest.warns(UserWarning, match="are not guaranteed"):
                learner.predict(ImageFolder(root, "test"), **options)
        assert not recwarn.list
