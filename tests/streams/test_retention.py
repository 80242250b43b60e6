"""The accuracy on classes that a learner never learned, at every scale of its update."""

import json
from types import SimpleNamespace

import pytest
import torch
from small_runs import learner_of, tasks_of
from torch.nn import functional as F

from dulbe_peft.encoders.loading import load_dual_encoder, pixel_values, tokenize
from dulbe_peft.encoders.registry import demo_model_folder
from dulbe_peft.metrics import evaluation
from dulbe_peft.photos.commands.main import main
from dulbe_peft.streams.retention import zero_shot_retention


def make_learner(strategy="dulbe"):
    return learner_of(load_dual_encoder(demo_model_folder()), strategy, None, learning_rate=0.05)


@pytest.fixture(scope="module")
def trained(digit_folders, tmp_path_factory):
    """A learner of two digits, a stream of four digits in two tasks, and the folders of the images and the learner."""
    images, output = digit_folders(4, 6, 3), tmp_path_factory.mktemp("retention")
    learner, tasks = make_learner(), tasks_of(images)
    learner.learn_task(tasks[0].train, tasks[0].class_names)
    learner.save_pretrained(output / "learner")
    return learner, tasks, images, output / "learner"


def literal_accuracy(model, learner, images, names):
    """Return the accuracy of choosing the nearest prompt, computed image by image."""
    with torch.no_grad():
        tokens = tokenize(learner.processor, [f"a photo of a {name}." for name in names], learner.clip)
        text = F.normalize(model.get_text_features(**tokens).pooler_output, dim=1)
        correct = []
        for item in (images[index] for index in range(len(images))):
            pixels = pixel_values(learner.processor, item["image"])[None]
            feature = F.normalize(model.get_image_features(pixel_values=pixels).pooler_output, dim=1)[0]
            correct.append(names[int((text @ feature).argmax())] == names[item["label"]])
    return sum(correct) / len(correct)


def test_retention_equals_model_with_hand_blended_weights(trained):
    learner, (first, second), *_ = trained
    result = zero_shot_retention(learner, second.test, scales=[0.3], learned=[(first.test, first.class_names)])
    assert [row["scale"] for row in result["scales"]] == [0, 0.3, 1]
    assert (result["before"], result["after"]) == (result["scales"][0]["unlearned"], result["scales"][2]["unlearned"])
    assert len({row["learned"] for row in result["scales"]}) > 1, "the scale makes no difference here"
    whole = learner.model.base_model.model
    for row in result["scales"]:
        blend, _ = load_dual_encoder(demo_model_folder())
        with torch.no_grad():
            for name, module in whole.named_modules():
                if hasattr(module, "get_delta_weight"):
                    blend.get_submodule(name).weight += row["scale"] * module.get_delta_weight("default")
        for task, key in ((second, "unlearned"), (first, "learned")):
            expected = literal_accuracy(blend, learner, task.test, task.class_names)
            assert row[key] == pytest.approx(expected), (row, key)


@pytest.mark.parametrize("most", [1, 2**22])
def test_seen_accuracies_equal_plain_loops(monkeypatch, most):
    generator = torch.Generator().manual_seed(0)

    def integers(*shape):  # make all products exact, so that ties are ties on every machine
        return torch.randint(-4, 5, shape, generator=generator).float()

    sizes, text = (2, 3, 0, 4), integers(9, 6)
    text[4] = text[1]  # of two classes with equal embeddings the first is predicted
    parts, first = [], 0
    for size in sizes:
        labels = torch.arange(5 * size) % max(1, size) + first
        features = text[labels] + integers(5 * size, 6)
        parts.append((features, labels) if size in (2, 4) else None)
        first += size
    monkeypatch.setattr(evaluation, "named_images", lambda images, names: images)
    monkeypatch.setattr(evaluation, "MOST_SCORES", most)
    starts = [sum(sizes[:step]) for step in range(4)]
    images = [p and SimpleNamespace(features=p[0], labels=(p[1] - s).numpy()) for p, s in zip(parts, starts)]
    tests = [(given, ["a"] * size) for given, size in zip(images, sizes)]
    accuracies = evaluation.seen_accuracies(lambda _: text, lambda images: images.features, tests)
    for step in range(4):
        correct, seen = [], sum(sizes[: step + 1])
        for features, labels in filter(None, parts[: step + 1]):
            for feature, label in zip(features, labels.tolist(), strict=True):
                scores = [float(row @ feature) for row in text[:seen]]
                correct.append(scores.index(max(scores)) == label)
        assert accuracies[step] == pytest.approx(sum(correct) / len(correct))
    assert len(set(accuracies)) > 1, "the test would not notice a mistake"


def test_learning_while_scaled_is_refused_and_scaling_frozen_model_does_nothing(trained):
    learner, (first, second), *_ = trained
    for call, images in ((learner.learn_task, second.train), (learner.update_classes, first.train)):
        with (
            learner.scaled(0.5),
            pytest.raises(ValueError, match="a block is running that holds, scales"),
        ):
            call(images)
    frozen = make_learner("frozen")
    with frozen.scaled(0.5), learner.scaled(0):
        assert torch.equal(frozen.image_embeds(second.test), learner.image_embeds(second.test))
    rows = zero_shot_retention(frozen, second.test, scales=[0.5])["scales"]
    assert len({row["unlearned"] for row in rows}) == 1 and rows[0]["learned"] is None


@pytest.mark.slow
def test_evaluate_command_reports_zero_shot_retention(trained, capsys):
    learner, (first, second), images, folder = trained
    command = ["evaluate", str(folder), "--data", str(images), "--device", "cpu", "--no-progress"]
    assert main([*command, "--zero-shot", "--scale", "0.3", "0.6"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    tests = [(first.test, first.class_names)]
    assert result.pop("learned_images_left_out") == 0
    assert result.pop("not_learned") == sorted(second.class_names)
    assert result.pop("learned") == sorted(first.class_names)
    assert result == zero_shot_retention(learner, second.test, scales=[0.3, 0.6], learned=tests)
    assert "scale 0.3" in captured.err
    for wrong, words in ((["--scale", "0.5"], "--zero-shot"), (["--zero-shot", "--scale", "2"], "at most 1")):
        assert main([*command, *wrong]) == 2
        assert words in capsys.readouterr().err
