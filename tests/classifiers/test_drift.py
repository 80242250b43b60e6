"""Statistics of old classes follow the drift of features that training causes."""

import pytest
import torch
from reference import drift_map, left_out_drift, randn

from dulbe_peft.classifiers import drift
from dulbe_peft.classifiers.registry import make_classifier

DIM, CLASSES = 12, 6


def images(count=8, classes=range(CLASSES), seed=0, dim=DIM):
    """Return unit features around one centre per class, and their labels from 0."""
    centres, labels = 3 * randn(99, dim, seed=seed), torch.arange(len(classes)).repeat_interleave(count)
    rows = centres[torch.tensor(list(classes))[labels]] + randn(len(labels), dim, seed=seed + 1)
    return torch.nn.functional.normalize(rows, dim=1), labels


def turned(rows, amount=0.3, dim=DIM):
    """Return the features after a smooth change of the model."""
    return torch.nn.functional.normalize(rows + amount * rows @ randn(dim, dim, seed=7) / dim**0.5, dim=1)


@pytest.mark.parametrize("count", [1, 8])  # fewer images than dimensions, and more
def test_drift_map_and_its_errors_equal_the_reference(count):
    before, labels = images(count)
    after = turned(before)
    for ridge in (0.03, 1.0):
        expected = drift_map(before, after, ridge)
        assert torch.allclose(drift.linear_map(before, after, ridge), expected, atol=1e-10)
    errors = drift.left_out_errors(before.double(), after.double(), labels)
    expected = left_out_drift(before, after, labels, drift.STRENGTHS, drift.FOLDS)
    assert torch.allclose(errors, expected, rtol=1e-7)


def test_drift_map_is_chosen_only_if_it_predicts_held_out_classes():
    before, labels = images(8)
    actual = drift.chosen_map(before, turned(before), labels)
    errors = drift.left_out_errors(before.double(), turned(before).double(), labels)
    assert torch.equal(actual, drift.linear_map(before, turned(before), drift.STRENGTHS[int(errors.argmin())]))
    noise = torch.nn.functional.normalize(before + 0.3 * randn(*before.shape, seed=9), dim=1)
    assert drift.chosen_map(before, before, labels) is None, "nothing drifted"
    shuffled = before + (noise - before)[torch.randperm(len(before), generator=torch.Generator().manual_seed(0))]
    centred = shuffled - (shuffled - before).mean(dim=0)
    unrelated = drift.chosen_map(before, centred, labels)
    assert unrelated is None or (unrelated - torch.eye(DIM)).norm() < 0.2 * (actual - torch.eye(DIM)).norm()
    alone = drift.chosen_map(before[:8], turned(before[:8]), labels[:8])
    assert alone is not None and alone.shape == (DIM, DIM), "with one class, images are held out instead of classes"
    assert drift.chosen_map(before[:1], turned(before[:1]), labels[:1]) is None, (
        "with one image, nothing can be held out"
    )


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["lda", "bayes", "bayes:features=0", "ridge", "ranpac:features=100", "prototype"])
def test_following_drift_improves_accuracy_on_old_classes(spec):
    old, labels = images(12)
    new, more = images(12, range(CLASSES, 6 * CLASSES))
    tests, truth = images(30, seed=0)
    kept = make_classifier(spec, DIM, 10.0)
    kept.add_classes([f"old {c}" for c in range(CLASSES)], old, labels)
    stayed = kept.fork()
    kept.follow(new, turned(new, 1.5), more)
    for each in (kept, stayed):
        each.add_classes([f"new {c}" for c in range(5 * CLASSES)], turned(new, 1.5), more)
    right = [(each(turned(tests, 1.5)).argmax(dim=1) == truth).double().mean() for each in (kept, stayed)]
    assert right[0] > right[1] + 0.05, right


@pytest.mark.parametrize("spec", ["lda", "bayes:features=64", "ranpac:features=64"])
def test_follow_maps_sums_in_the_space_of_the_lifted_features(spec):
    old, labels = images(12)
    new, more = images(12, range(CLASSES, 2 * CLASSES))
    kept = make_classifier(spec, DIM, 10.0)
    kept.add_classes([f"old {c}" for c in range(CLASSES)], old, labels)
    before = {name: tensor.clone() for name, tensor in kept.tensors().items()}
    kept.follow(new, turned(new), more)
    lifted = [kept.rule.lifted(kept.state, each.double()) for each in (new, turned(new))]
    matrix = drift.chosen_map(*lifted, more)
    assert torch.allclose(kept.sums, before["sums"] @ matrix)
    name = "gram" if "gram" in before else "scatter"
    expected = matrix.T @ before[name].double() @ matrix
    assert torch.allclose(getattr(kept, name).double(), expected, atol=1e-5 * float(expected.abs().max()))
    assert torch.equal(kept.counts, before["counts"])


def test_follow_without_drift_changes_no_bit():
    old, labels = images(12)
    for spec in ("lda", "bayes", "ranpac:features=64"):
        kept = make_classifier(spec, DIM, 10.0)
        kept.add_classes([f"old {c}" for c in range(CLASSES)], old, labels)
        before = {name: tensor.clone() for name, tensor in kept.tensors().items()}
        kept.follow(old, old, labels)
        assert all(torch.equal(before[name], tensor) for name, tensor in kept.tensors().items())
