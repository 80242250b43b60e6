"""Every classifier against its literal solution on all images at once; what they share, once for all of them."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from hub_stub import on_this_process
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from torch.nn import functional as F

from dulbe_peft import CLASSIFIERS, LdaClassifier, register_classifier
from dulbe_peft.classifiers import make_classifier, make_classifiers, parse_classifier, spec
from dulbe_peft.classifiers.calibration import hold_back
from dulbe_peft.classifiers.gda import ALPHAS, TEMPERATURES
from dulbe_peft.classifiers.ranpac import random_layer
from dulbe_peft.classifiers.ridge import RIDGES
from dulbe_peft.classifiers.teaching import linear_map

DIM, CLASSES, SCALE = 64, 10, 20.0
KEPT = {}  # what has been learned
SPECS = {
    "text": "text",
    "bridge": "bridge",
    "bridge whitened": "bridge:metric=whitened",
    "prototype": "prototype",
    "lda": "lda",
    "lda fixed": "lda:shrinkage=0.1",
    "gda": "gda",
    "gda fixed": "gda:alpha=0.5",
    "ridge": "ridge",
    "ridge fixed": "ridge:ridge=0.5",
    "ranpac": "ranpac:features=200",
    "ranpac fixed": "ranpac:features=200,ridge=20",
    "bayes": "bayes:features=50",
    "bayes fixed": "bayes:kappa=4,rho=10,features=0",
    "visual_agent": "visual_agent",
    "rapf": "rapf:epochs=6,batch_size=32,learning_rate=0.01",
    "bofa": "bofa",
    "slca": "slca:epochs=5,draws=32",
    "engine": "engine",
    "proof": "proof:epochs=10,batch_size=32,learning_rate=0.003",
    "clap4clip": "clap4clip",
    "clg_cbm": "clg_cbm:epochs=30,learning_rate=0.03",
}
NAMED = [name for name in SPECS if " " not in name]
NOT_UPDATING = (
    "text",
    "bridge",
    "bridge whitened",
    "visual_agent",
    "rapf",
    "gda",
    "slca",
    "engine",
    "proof",
    "clap4clip",
    "clg_cbm",
)
# What left-out images say of gda and bayes depends on what was known when they came.
UPDATING = [name for name in SPECS if name not in (*NOT_UPDATING, "bayes")]
JOINT = ["prototype", "lda", "lda fixed", "gda fixed", "ridge fixed", "ranpac fixed", "bayes fixed"]


class Digits:
    """Handwritten digits as 64 grey values: 60 of each class to learn from, others to test; texts are noisy means."""

    def __init__(self):
        data = load_digits()
        images, labels = torch.tensor(data.data).float(), torch.tensor(data.target)
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
        images, labels = images[order], labels[order]
        rank = torch.stack([(labels[:i] == labels[i]).sum() for i in range(len(labels))])
        self.images, self.labels = images[rank < 60], labels[rank < 60]
        self.tests, self.truth = images[rank >= 100], labels[rank >= 100]
        means = torch.stack([images[(rank >= 60) & (rank < 100) & (labels == c)].mean(dim=0) for c in range(CLASSES)])
        self.texts = means + 3 * torch.randn(CLASSES, DIM, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def digits():
    return Digits()


def learned(name, digits, order=range(CLASSES), increment=2, per_class=60, shuffle=0, text=True, scale=SCALE):
    """A classifier that has learned `order` task by task; `shuffle` is the seed of the images' order, 0 for none."""
    given = (name, tuple(order), increment, per_class, shuffle, text, scale)
    if given in KEPT:
        return KEPT[given].fork()
    classifier, order = make_classifier(SPECS[name], DIM, scale), list(order)
    for start in range(0, len(order), increment):
        new = order[start : start + increment]
        images, labels = task(digits, new, per_class)
        if shuffle:
            mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(shuffle))
            images, labels = images[mixed], labels[mixed]
        texts = digits.texts[order[: start + len(new)]] if text else None
        classifier.add_classes([f"digit {c}" for c in new], images, labels, texts)
    KEPT[given] = classifier
    return classifier.fork()


def at_once(name, images, labels, texts=None):
    classifier = make_classifier(SPECS[name], DIM, SCALE)
    classifier.add_classes([f"digit {c}" for c in range(CLASSES)], images, labels, texts)
    return classifier


def task(digits, classes, per_class=60):
    images = torch.cat([digits.images[digits.labels == c][:per_class] for c in classes])
    return images, torch.arange(len(classes)).repeat_interleave(per_class)


def snapshot(classifier):
    return {key: value.clone() for key, value in classifier.state_dict().items()}


def assert_equal_states(found, expected):
    assert set(found) == set(expected)
    for key in expected:
        assert found[key].dtype == expected[key].dtype and torch.equal(found[key], expected[key]), key


def lift(images):
    return (images @ torch.from_numpy(np.random.RandomState(0).standard_normal((DIM, 200)))).clamp(min=0)


@pytest.mark.parametrize("name", ["text", "prototype", "lda", "lda fixed", "ridge fixed", "ranpac fixed"])
def test_each_equals_its_reference(digits, name):
    known = digits.images, digits.labels.tolist(), digits.tests
    expected = {
        "text": lambda: SCALE * reference.unit(digits.tests) @ reference.unit(digits.texts).T,
        "prototype": lambda: reference.class_mean_logits(*known, SCALE),
        "lda": lambda: reference.lda_logits(*known, None),
        "lda fixed": lambda: reference.lda_logits(*known, 0.1),
        "ridge fixed": lambda: SCALE * reference.ridge_scores(*known, 0.5),
        "ranpac fixed": lambda: SCALE * reference.ridge_scores(*known, 20.0, lift=lift),
    }[name]()
    torch.testing.assert_close(learned(name, digits)(digits.tests).double(), expected, rtol=1e-4, atol=2e-4)


def test_ranpac_keeps_its_random_layer():
    """A saved classifier keeps the seed alone, so it depends on these numbers."""
    expected = [[0.44122749, -0.33087015, 2.43077119], [-0.25209213, 0.10960984, 1.58248112]]
    found = random_layer(5, 2, 3)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8)


@pytest.fixture(scope="module")
def unequal(digits):
    """Two images of every odd digit, 14 of every even one, and how many each has."""
    rows = torch.cat([(digits.labels == c).nonzero()[: 2 if c % 2 else 14, 0] for c in range(CLASSES)])
    labels = digits.labels[rows]
    return digits.images[rows], labels, torch.bincount(labels).double()


def test_unequal_counts_are_weighed_as_in_the_references(digits, unequal):
    images, labels, counts = unequal
    scores = reference.ridge_scores(images, labels.tolist(), digits.tests, 0.5)
    expected = {
        "lda": reference.lda_logits(images, labels.tolist(), digits.tests, None, prior_images=1.0),
        "ridge fixed": SCALE * scores * torch.tensor([(float(counts.mean()) / n) ** 0.75 for n in counts.tolist()]),
    }
    for name, logits in expected.items():
        found = at_once(name, images, labels)(digits.tests)
        torch.testing.assert_close(found.double(), logits, rtol=1e-4, atol=1e-3)
        few = digits.truth % 2 == 1
        plain = scores if name != "lda" else reference.lda_logits(images, labels.tolist(), digits.tests, None)
        right = [(found.argmax(dim=1) == digits.truth)[few].double().mean() for found in (logits, plain)]
        assert right[0] > right[1] + 0.1, f"{name}: classes with few images are lost"


def test_gda_weighs_lda_by_images_that_are_really_left_out(digits, unequal):
    images, labels, counts = unequal
    classifier = make_classifier("gda:shrinkage=0.2", DIM, SCALE)
    classifier.add_classes([str(c) for c in range(CLASSES)], images, labels, digits.texts)
    text = SCALE * reference.unit(images) @ reference.unit(digits.texts).T
    freedom = int(classifier.freedom)
    whole = (int(counts.max()), classifier.means.mean(dim=0), freedom, classifier.scatter.trace() / freedom / DIM)
    losses = torch.zeros(len(ALPHAS), len(TEMPERATURES), dtype=torch.float64)
    for i, label in enumerate(labels.tolist()):
        rest = torch.arange(len(labels)) != i
        scores = reference.lda_logits(images[rest], labels[rest].tolist(), images[i : i + 1], 0.2, 1.0, whole)[0]
        for a, alpha in enumerate(ALPHAS):
            for t, temperature_ in enumerate(TEMPERATURES):
                mixed = (text[i] + alpha * scores) / (temperature_ * max(1, alpha))
                losses[a, t] -= mixed.log_softmax(dim=0)[label]
    torch.testing.assert_close(classifier.losses, losses, rtol=1e-4, atol=1e-3)
    alpha = ALPHAS[int(losses.amin(dim=1).argmin())]
    assert classifier.weight() == alpha and ALPHAS[0] < alpha < ALPHAS[-1]
    by_image = reference.lda_logits(images, labels.tolist(), digits.tests, 0.2, 1.0)
    expected = SCALE * reference.unit(digits.tests) @ reference.unit(digits.texts).T + alpha * by_image
    torch.testing.assert_close(max(1, alpha) * classifier(digits.tests).double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("name", "unit"), [("ridge", 1.0), ("ranpac", 200.0)])
def test_the_ridge_is_the_best_on_all_tasks_held_back_images(digits, name, unit):
    lifted = lift if name == "ranpac" else lambda images: images
    total = torch.zeros(len(RIDGES), dtype=torch.float64)
    seen_images, seen_labels = torch.zeros(0, DIM), []
    for start in range(0, CLASSES, 2):
        images, labels = task(digits, [start, start + 1])
        held = hold_back(F.normalize(images, dim=1), labels)
        truth = F.one_hot(labels[held] + start, start + 2)
        for number, ridge in enumerate(RIDGES):
            fit = torch.cat([seen_images, images[~held]]), seen_labels + (labels[~held] + start).tolist()
            scores = reference.ridge_scores(*fit, images[held], ridge * unit, lifted)
            total[number] += ((scores - truth) ** 2).sum()
        seen_images, seen_labels = torch.cat([seen_images, images]), seen_labels + (labels + start).tolist()
    classifier = learned(name, digits)
    torch.testing.assert_close(classifier.errors, total, rtol=1e-3, atol=1e-3)
    assert classifier.strength() == unit * RIDGES[int(total.argmin())]
    assert 0 < int(total.argmin()) < len(RIDGES) - 1


def test_a_gram_matrix_that_rounding_left_indefinite_is_solved(digits):
    classifier = make_classifier("ranpac:features=200,ridge=1e-9", DIM)
    images, labels = task(digits, [0, 1], per_class=5)
    classifier.add_classes(["a", "b"], images, labels)
    assert torch.linalg.cholesky_ex(classifier.gram.double() + 1e-9 * torch.eye(200))[1] > 0
    assert classifier(images).argmax(dim=1).tolist() == labels.tolist()


@pytest.mark.parametrize("name", JOINT)
@pytest.mark.parametrize(("increment", "shuffle"), [(10, 0), (5, 3), (1, 4)])
def test_classes_tasks_and_images_in_any_order_give_one_solution(digits, name, increment, shuffle):
    expected = learned(name, digits)(digits.tests)
    order = [3, 9, 0, 4, 7, 1, 8, 6, 2, 5]
    found = learned(name, digits, order, increment, shuffle=shuffle)
    back = [order.index(c) for c in range(CLASSES)]
    torch.testing.assert_close(found(digits.tests)[:, back], expected, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("name", UPDATING)
def test_further_images_of_known_classes_are_as_if_they_had_been_there(digits, name):
    images, labels = task(digits, range(CLASSES))
    early = torch.arange(len(labels)) % 60 < 20
    late, together = at_once(name, images[early], labels[early], digits.texts), learned(name, digits, increment=10)
    before, state = late.fork(), snapshot(late)
    for rows in (~early).nonzero()[:, 0].split(77):
        late.update_classes(images[rows], labels[rows])
    late.update_classes(images[:0], labels[:0])
    assert_equal_states(snapshot(before), state)
    if hasattr(late, "errors"):
        late.ridge = together.ridge = together.strength()
    if name == "bofa":  # the first images have chosen it
        late.install({"image_weight": together.image_weight})
    torch.testing.assert_close(late(digits.tests), together(digits.tests), rtol=1e-4, atol=2e-3)
    assert late.counts.tolist() == [60] * CLASSES


@pytest.mark.parametrize("name", SPECS)
def test_a_forgotten_class_is_gone_and_the_others_keep_their_scores(digits, name):
    classifier = learned(name, digits)
    expected, count = classifier(digits.tests), classifier.temperature
    classifier.forget_class("digit 4")
    kept = [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert classifier.class_names == [f"digit {c}" for c in kept]
    # Scores of these depend on the classes that there are: relative to them, after they saw them, or by their mean.
    relative = ("visual_agent", "engine", "proof", "clap4clip", "clg_cbm", "bayes", "bayes fixed", "bridge whitened")
    if name not in relative:
        torch.testing.assert_close(classifier(digits.tests), expected[:, kept], rtol=1e-5, atol=1e-4)
    assert classifier.temperature == pytest.approx(count, rel=0.2)
    with pytest.raises(ValueError, match="'digit 4' is not known"):
        classifier.forget_class("digit 4")
    images, labels = task(digits, [4])
    classifier.add_classes(["digit 4"], images, labels, digits.texts[[*kept, 4]])
    assert classifier(digits.tests).shape == (len(digits.tests), CLASSES)


@pytest.mark.parametrize("name", SPECS)
def test_without_its_last_class_a_classifier_is_a_new_one(digits, name):
    classifier, new = learned(name, digits), learned(name, digits, range(2))
    for known in classifier.class_names:
        classifier.forget_class(known)
    assert_equal_states(snapshot(classifier), snapshot(make_classifier(SPECS[name], DIM, SCALE)))
    classifier.add_classes(new.class_names, *task(digits, range(2)), digits.texts[:2])
    assert_equal_states(snapshot(classifier), snapshot(new))


@pytest.mark.parametrize("name", SPECS)
def test_one_image_a_class(digits, name):
    classifier = learned(name, digits, per_class=1)
    assert classifier.temperature == 1.0 or name in ("bayes", "bayes fixed")
    assert classifier.nbytes == learned(name, digits, range(2), per_class=1).nbytes_with(CLASSES)
    accuracy = (classifier(digits.tests).argmax(dim=1) == digits.truth).double().mean()
    assert accuracy > 0.4
    torch.testing.assert_close(classifier.probabilities(digits.tests).sum(dim=1), torch.ones(len(digits.tests)))


@pytest.mark.parametrize("name", NAMED)
def test_probabilities_of_digits_are_calibrated(digits, name):
    classifier = learned(name, digits, scale=100.0)
    raw = reference.calibration_error(classifier(digits.tests).softmax(dim=1), digits.truth)
    calibrated = reference.calibration_error(classifier.probabilities(digits.tests), digits.truth)
    assert calibrated < (raw if name in ("lda", "ridge") else raw + 0.01)
    # No temperature makes much of a mix with a distribution that is nearly flat.
    assert calibrated < {"visual_agent": 0.12, "gda": 0.07, "slca": 0.12}.get(name, 0.06)
    assert torch.equal(classifier.probabilities(digits.tests).argmax(dim=1), classifier(digits.tests).argmax(dim=1))


def test_linear_map_solves_its_normal_equations():
    before, after = torch.randn(50, 8), torch.randn(50, 8)
    found = linear_map(before, after, ridge=0.5)
    weight = 0.5 * before.double().square().sum() / 8
    slope = before.double().T @ (before.double() @ found - after.double()) + weight * (found - torch.eye(8))
    torch.testing.assert_close(slope, torch.zeros(8, 8, dtype=torch.float64), rtol=0, atol=1e-9)
    torch.testing.assert_close(linear_map(before, after, 1e9), torch.eye(8).double(), rtol=0, atol=1e-6)
    turn = torch.linalg.qr(torch.randn(8, 8))[0]
    torch.testing.assert_close(linear_map(before, before @ turn, 1e-9), turn.double(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bridge", "prototype", "lda fixed", "gda fixed", "ridge fixed", "bayes fixed"])
def test_a_turn_of_all_features_is_followed_exactly(digits, name):
    turn = torch.linalg.qr(torch.randn(DIM, DIM, dtype=torch.float64))[0]
    classifier = learned(name, digits)
    expected = classifier(digits.tests)
    classifier.move(turn)
    if CLASSIFIERS[classifier.name].needs_text:
        classifier.set_text_embeds((F.normalize(digits.texts, dim=1).double() @ turn).float())
    found = classifier((digits.tests.double() @ turn).float())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-3)


def test_add_classes_refuses_and_changes_nothing(digits):
    classifier = learned("bridge", digits)
    images, labels = task(digits, [0, 1])
    texts = torch.cat([digits.texts, digits.texts[:2] + 1])
    state = snapshot(classifier)
    good = {"class_names": ["x", "y"], "image_embeds": images, "labels": labels, "text_embeds": texts}
    for change, message in (
        ({"class_names": ["digit 0", "x"]}, "'digit 0', a class that was seen already"),
        ({"image_embeds": torch.full((120, DIM), math.nan)}, "image_embeds row 0 holds NaN or infinity"),
        ({"image_embeds": torch.zeros(120, DIM)}, "image_embeds row 0 is zero"),
        ({"image_embeds": torch.ones(120, 3)}, r"must be \(rows, 64\), got shape \(120, 3\)"),
        ({"image_embeds": torch.ones(120, DIM).long()}, "must be a floating-point tensor"),
        ({"labels": [True, False] * 60}, "labels must be integers, got torch.bool"),
        ({"labels": torch.arange(120) % 2 + 1}, "label 2 is out of range for 2 classes"),
        ({"labels": torch.zeros(5).long()}, r"labels must be \(120,\), one per image"),
        ({"labels": torch.zeros(120).long()}, "class 'y' has no image"),
        ({"text_embeds": torch.ones(3, DIM)}, "text_embeds must have 12 rows"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            classifier.add_classes(**{**good, **change})
    assert_equal_states(snapshot(classifier), state)


def test_other_bad_calls_are_named_and_change_nothing(digits):
    images, labels = task(digits, [0, 1])
    classifier, trained, text = (learned(name, digits) for name in ("lda", "rapf", "text"))
    state = snapshot(classifier)
    text.install({"text_embeds": 1e38 * text.text_embeds})
    opposite = torch.cat([torch.eye(DIM), -torch.eye(DIM)[:1]])
    for call, message in (
        (lambda: classifier.add_classes(["x"], opposite[[0, -1]], [0, 0]), "class 'x' cancel out"),
        (lambda: classifier.move(torch.full((DIM, DIM), math.nan)), "the map"),
        (lambda: classifier.load_state_dict(state | {"means": state["means"][:4]}), r"means must be .*\(10, 64\)"),
        (lambda: classifier.load_state_dict(state | {"_extra_state": torch.tensor([9]).byte()}), "are damaged"),
        (lambda: make_classifier("lda", DIM)(images), "no class yet"),
        (lambda: trained.update_classes(images, labels), "'rapf' classifier cannot learn more images"),
        (lambda: text(digits.tests), "'text' classifier gives scores that are not finite"),
        (lambda: linear_map(images, images[:3]), r"\(120, 64\) and \(3, 64\)"),
        (lambda: make_classifier(classifier, DIM), "already has 10 classes"),
        (lambda: make_classifier(make_classifier("lda", 8), 9), "takes 8 dimensions, the model gives 9"),
    ):
        with pytest.raises((ValueError, RuntimeError), match=message):
            call()
    assert_equal_states(snapshot(classifier), state)


@pytest.mark.parametrize("name", NAMED)
def test_texts_are_asked_for_where_they_are_needed(digits, name):
    if CLASSIFIERS[name].needs_text:
        with pytest.raises(TypeError, match="text_embeds"):
            learned(name, digits, text=False)
        classifier = learned(name, digits)
        classifier.set_text_embeds(digits.texts.flip(0))
        torch.testing.assert_close(classifier.text_embeds, F.normalize(digits.texts.flip(0), dim=1))
    else:
        classifier = learned(name, digits, text=False)
        assert torch.equal(classifier(digits.tests), learned(name, digits)(digits.tests))
        with pytest.raises(ValueError, match=f"'{name}' classifier keeps no text"):
            classifier.set_text_embeds(digits.texts)


@pytest.mark.parametrize("name", NAMED)
def test_gradients_reach_the_features_and_copies_are_independent(digits, name):
    classifier = learned(name, digits)
    images = digits.tests[:5].clone().requires_grad_()
    with torch.inference_mode():
        expected = classifier(digits.tests)
    classifier(images)[:, 0].sum().backward()
    assert images.grad.isfinite().all() and images.grad.abs().sum() > 0
    for twin in (copy.deepcopy(classifier), pickle.loads(pickle.dumps(classifier)), classifier.fork()):
        assert not twin._derived  # a pickle would be twice as large
        assert torch.equal(twin(digits.tests), expected) and twin.temperature == classifier.temperature
        twin.forget_class("digit 0")
        assert torch.equal(classifier(digits.tests), expected)


@pytest.mark.parametrize("name", ["prototype", "lda", "ridge", "ranpac", "bayes"])
def test_statistics_stay_in_float64_whatever_the_module_is_converted_to(digits, name):
    classifier = learned(name, digits)
    expected = classifier(digits.tests)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(classifier(digits.tests), expected)
        assert torch.equal(learned(name, digits)(digits.tests), expected)
    double = {key for key, value in classifier.state_dict().items() if value.dtype == torch.float64}
    classifier.to(torch.bfloat16)
    assert double and double == {k for k, v in classifier.state_dict().items() if v.dtype == torch.float64}
    if name in ("prototype", "lda", "ridge"):  # G of ranpac and the texts of bayes are float32 and are rounded
        assert torch.equal(classifier(digits.tests), expected)
    assert {value.device.type for value in classifier.to("meta").tensors().values()} == {"meta"}


@pytest.mark.parametrize("name", SPECS)
def test_state_dicts_and_files_give_the_same_bits_back(digits, name, tmp_path):
    classifier = learned(name, digits)
    other = make_classifier(SPECS[name], DIM, SCALE)
    other.load_state_dict(classifier.state_dict())
    classifier.save_pretrained(tmp_path / "a")
    loaded = type(classifier).from_pretrained(tmp_path / "a")
    for found in (other, loaded):
        assert_equal_states(snapshot(found), snapshot(classifier))
        assert torch.equal(found(digits.tests), classifier(digits.tests))
        assert torch.equal(found.probabilities(digits.tests), classifier.probabilities(digits.tests))
        assert spec(found) == spec(classifier) and found.temperature != 1
    loaded.save_pretrained(tmp_path / "b")
    stem = type(classifier).file_stem
    assert {path.name for path in (tmp_path / "a").iterdir()} == {f"{stem}_config.json", f"{stem}.safetensors"}
    assert all(path.read_bytes() == (tmp_path / "b" / path.name).read_bytes() for path in (tmp_path / "a").iterdir())
    images, labels = task(digits, [0, 1])
    for further in (classifier, loaded):
        further.add_classes(["x", "y"], images, labels, torch.cat([digits.texts, digits.texts[:2] + 1]))
    assert_equal_states(snapshot(loaded), snapshot(classifier))


def test_damaged_files_are_refused(digits, tmp_path):
    for changes, message in (
        ({"name": "ridge"}, "holds a classifier 'ridge', expected 'lda'"),
        ({"settings": {"shrinkage": 2.0}}, "shrinkage must be 'oas' or"),
        ({"embed_dim": 10**12}, "cannot be loaded"),
        ({"means": None}, "Missing key.*means"),
    ):
        learned("lda", digits).save_pretrained(tmp_path)
        config, tensors = tmp_path / "lda_config.json", load_file(tmp_path / "lda.safetensors")
        if changes.keys() & tensors.keys():
            save_file({k: v for k, v in (tensors | changes).items() if v is not None}, tmp_path / "lda.safetensors")
        else:
            config.write_text(json.dumps(json.loads(config.read_text()) | changes))
        with pytest.raises(ValueError, match=message):
            LdaClassifier.from_pretrained(tmp_path)
    config.unlink()
    with pytest.raises(FileNotFoundError, match="lda_config.json"):
        LdaClassifier.from_pretrained(tmp_path)


@pytest.fixture
def page(monkeypatch, capsys):
    """The names that the page's code makes, and what it prints; `median` is a classifier from outside the package."""
    monkeypatch.setitem(CLASSIFIERS, "median", None)
    monkeypatch.delitem(CLASSIFIERS, "median")
    text = (Path(__file__).parents[1] / "docs" / "classifiers.md").read_text(encoding="utf-8")
    names = {"__name__": "page"}
    for block in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(block, "docs/classifiers.md", "exec"), names)
    return names | {"printed": capsys.readouterr().out}


def test_a_classifier_from_outside_works_with_files_and_the_hub(digits, page, tmp_path, monkeypatch):
    assert page["printed"] == "tensor([0, 1, 2])\n"
    cls = page["NearestMedian"]
    classifier = make_classifier("median:power=2", DIM, SCALE, {"power": 3.0, "num_depths": 4})
    assert type(classifier) is cls and classifier.power == 2 and spec(classifier) == "median:power=2.0"
    images, labels = task(digits, range(CLASSES))
    classifier.add_classes([f"digit {c}" for c in range(CLASSES)], images, labels)
    assert (classifier(digits.tests).argmax(dim=1) == digits.truth).double().mean() > 0.7
    classifier.forget_class("digit 9")
    classifier.save_pretrained(tmp_path / "saved")
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {"median_config.json", "median.safetensors"}
    with on_this_process(monkeypatch, tmp_path) as hub:
        classifier.push_to_hub("median")
        online = cls.from_pretrained("someone/median")
        commit = hub.repos["someone/median"]["branches"]["main"]
    assert online.source == {"repo_id": "someone/median", "commit": commit}
    for loaded in (online, cls.from_pretrained(tmp_path / "saved")):
        assert loaded.power == 2 and torch.equal(loaded(digits.tests), classifier(digits.tests))


def test_classes_that_cannot_be_registered_are_refused(page):
    base = page["NearestMedian"]
    assert register_classifier(base) is base
    for cls, error, message in (
        (dict, TypeError, "derived from Classifier"),
        (type("A", (base,), {"name": "Two words"}), ValueError, "characters a-z"),
        (type("B", (base,), {"name": "lda"}), ValueError, "LdaClassifier has"),
        (type("C", (base,), {"name": "mine", "file_stem": "head"}), ValueError, "BridgeEnsembleHead has"),
    ):
        with pytest.raises(error, match=message):
            register_classifier(cls)
    assert {*NAMED, "median"} == set(CLASSIFIERS)


def test_names_and_settings_make_classifiers():
    assert set(NAMED) == set(CLASSIFIERS)
    made = make_classifiers(["bridge", "ranpac:seed=3", "lda"], 8, 15.0, {"num_depths": 4, "features": 50})
    assert list(map(spec, made.values())) == ["bridge:num_depths=4", "ranpac:features=50,seed=3", "lda"]
    assert all(make_classifier(spec(one), 8).settings() == one.settings() for one in made.values())
    assert spec(make_classifier("bridge:depths=0.3/0.5", 8)) == "bridge:depths=0.3/0.5"
    for text, follows in (("bayes", True), ("lda", True), ("ranpac", False)):
        cls, settings = parse_classifier(text)
        assert cls.follows_drift(settings) == follows


def test_specs_that_do_not_fit_are_refused():
    for text, message in (
        ("ranpack", r"no classifier 'ranpack'; did you mean 'ranpac'\? \(known: .*bridge"),
        ("ranpac:feature=3", r"no setting 'feature'; did you mean 'features'\?"),
        ("bridge:metric=euclid", "must be '?cosine'? or '?whitened"),
        ("lda:shrinkage=0", "shrinkage must be 'oas' or a number above 0"),
        ("text:embed_dim=4", r"no setting 'embed_dim' \(known: none\)"),
    ):
        with pytest.raises(ValueError, match=message):
            make_classifier(text, 8)
