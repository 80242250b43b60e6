"""Test ENGINE's classifier: three tasks against a literal version, and classes whose images hardly differ."""

import math

import torch
from drawn import DIM, features, normal, step
from torch.nn import functional as F

from dulbe_peft.classifiers import classifier_of
from dulbe_peft.papers import knowledge_injection
from dulbe_peft.papers.knowledge_injection import EngineRule

SETTINGS = {
    "epochs": 3,
    "batch_size": 5,
    "learning_rate": 0.4,
    "text_loss": 1.5,
    "image_loss": 0.7,
    "noise": 2.0,
    "discriminant": 0.3,
    "seed": 2,
}
TASKS = [(3, "abc"), (2, "de"), (1, "f")]


def mapped(x, units):
    """Return the sum of the units' outputs for one feature, (d,), normalised to length 1."""
    total = sum(weight @ (10 * x) + bias for weight, bias in units)
    return total / total.norm()


def contrast(rows, others, sharpness=1.0):
    """Return the mean cross-entropy of each row with all `others`, whose entry at the same index is the target."""
    return F.cross_entropy(sharpness * torch.stack(rows) @ torch.stack(others).T, torch.arange(len(rows)))


def batch_loss(images, classes, new, texts, image_units, text_units):
    """Return the loss in float64 of features, the first `new` of which are images and have length 1."""
    z = [mapped(image, image_units) for image in images]
    e = [mapped(texts[c], text_units) for c in classes]
    pair = (contrast(z, e, math.log(100)) + contrast(e, z, math.log(100))) / 2
    return pair + 1.5 * contrast(e, [texts[c] for c in classes]) + 0.7 * contrast(z[:new], images[:new])


def literal_units(x, y, texts, old_means, earlier, generator):
    """Return the task's two units after SGD with momentum 0.9, decay 0.05 and a cosine; `earlier` are frozen."""
    rows = [(2 * torch.rand(DIM, DIM + 1, generator=generator) - 1) / math.sqrt(DIM) for _ in range(2)]
    starts = [tensor.clone() for row in rows for tensor in (row[:, :DIM], row[:, DIM])]
    leaves = [tensor.double().requires_grad_() for tensor in starts]
    units, old = [earlier[0] + [leaves[:2]], earlier[1] + [leaves[2:]]], len(old_means)
    sgd = torch.optim.SGD(leaves, momentum=0.9, weight_decay=0.05)
    for epoch in range(3):
        for batch in torch.randperm(len(x), generator=generator).split(5):
            order = torch.randperm(old, generator=generator)[:4].tolist()
            noise = torch.randn(len(order), DIM, generator=generator).double()
            samples = [old_means[c] + 2.0 * n / 10 for c, n in zip(order, noise, strict=True)]
            images, classes = [*x[batch], *samples], [*(y[batch] + old).tolist(), *order]
            rate = 0.4 * (1 + math.cos(math.pi * epoch / 3)) / 2
            step(sgd, rate, batch_loss(images, classes, len(batch), texts, *units))
    trained = [tensor.detach() for tensor in leaves]
    return trained[:2], trained[2:]


def literal_scores(tests, texts, units, tasks):
    """Return the scores in float64; `tasks` has the unit features and labels of all tasks."""
    means = [rows[labels == c].mean(dim=0) for rows, labels in tasks for c in range(int(labels.max()) + 1)]
    centred = [z - rows[labels == c].mean(dim=0) for rows, labels in tasks for z, c in zip(rows, labels, strict=True)]
    n = len(centred)
    covariance = sum(torch.outer(row, row) for row in centred) / (n - 1)
    precision = DIM * torch.linalg.inv((n - 1) * covariance + covariance.trace() * torch.eye(DIM))
    scores = []
    for z in tests:
        g = torch.stack([m @ precision @ z - m @ precision @ m / 2 - math.log(len(means)) for m in means])
        cosines = torch.stack([mapped(z, units[0]) @ mapped(e, units[1]) for e in texts])
        scores.append(20 * (0.3 * g / g.norm() + 0.7 * cosines))
    return torch.stack(scores)


def test_three_tasks_equal_the_literal_version(monkeypatch):
    monkeypatch.setattr(knowledge_injection, "MOST_DRAWN", 4)  # fewer than the five old classes of the last task
    classifier, texts, units = classifier_of(EngineRule)(DIM, 20.0, **SETTINGS), normal(6, DIM, seed=8), [[], []]
    e, old, tasks, tests = F.normalize(texts.double(), dim=1), [], [], F.normalize(normal(9, DIM, seed=9), dim=1)
    for number, (classes, names) in enumerate(TASKS):
        images, labels = features(classes, 13, 5 * number)
        x, seen = F.normalize(images, dim=1).double(), len(old) + classes
        generator = torch.Generator().manual_seed(2 * 1_000_003 + len(old))
        before = classifier.image_unit.double()
        new = literal_units(x, labels, e[:seen], old, units, generator)
        units, tasks = [[*kept, unit] for kept, unit in zip(units, new, strict=True)], [*tasks, (x, labels)]
        old += [x[labels == c].mean(dim=0) for c in range(classes)]
        order = normal(len(x), seed=number).argsort()  # the order must not matter
        classifier.add_classes(list(names), images[order], labels[order], texts[:seen])
        assert (classifier.image_unit.double() - before).abs().max() > 0.1
    for name, expected in zip(("image_unit", "text_unit"), units, strict=True):
        total = torch.cat([sum(w for w, _ in expected), sum(b for _, b in expected)[:, None]], dim=1)
        torch.testing.assert_close(classifier.tensors()[name].double(), total, rtol=0, atol=1e-4)
    expected = literal_scores(tests.double(), e, units, tasks)
    torch.testing.assert_close(classifier(tests).double(), expected, rtol=1e-4, atol=1e-3)


def test_discriminant_has_no_effect_on_identical_images():
    images, labels = features(2, 8, 0)
    classifier, texts = classifier_of(EngineRule)(DIM, epochs=1, discriminant=0.5), normal(2, DIM, seed=8)
    same = torch.stack([images[labels == c][0] for c in (0, 1)]).repeat_interleave(7, dim=0)
    classifier.add_classes(["a", "b"], same, [0] * 7 + [1] * 7, texts)
    assert not classifier.scatter.any()
    without = classifier_of(EngineRule)(DIM, epochs=1, discriminant=0.0)
    without.load_state_dict(classifier.state_dict())
    margin = classifier(images)[:, 0] - classifier(images)[:, 1]
    torch.testing.assert_close(margin, (without(images)[:, 0] - without(images)[:, 1]) / 2, rtol=1e-4, atol=1e-3)


def test_nearly_identical_images_do_not_overflow_half_precision():
    (images, labels), texts = features(2, 8, 0), normal(2, DIM, seed=8)
    classifier, z = classifier_of(EngineRule)(DIM, 20.0, epochs=1, discriminant=1.0), F.normalize(images, dim=1)
    classifier.add_classes(["a", "b"], z[labels] + 1e-4 * images, labels, texts)
    tensors, means, precision = (
        classifier.formula()[1],
        classifier.means,
        classifier.rule.fitted(classifier.state).precision,
    )
    assert all(tensor.half().isfinite().all() for tensor in tensors.values())
    assert not (means @ precision).half().isfinite().all()
    g = z.double() @ precision @ means.T - ((means @ precision) * means).sum(dim=1) / 2 - math.log(2)
    torch.testing.assert_close(classifier(z).double(), 20 * F.normalize(g, dim=1), rtol=0, atol=1e-3)
