"""RAPF's classifier: two whole tasks, Gaussians and fusion, each beside a literal version."""

import math
import weakref

import torch
from torch.nn import functional as F

from dulbe_peft.classifiers import rapf
from dulbe_peft.classifiers.fitting import gaussians
from dulbe_peft.classifiers.rapf import RapfClassifier, fused

DIM = 6


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def features(classes, count, seed):
    labels = torch.arange(count) % classes
    return ranked(normal(classes, DIM, seed=seed)[labels] + 0.4 * normal(count, DIM, seed=seed + 1), labels)


def ranked(rows, labels):
    """In the order from which the batches are drawn, whatever the order of the images."""
    order = [float(row @ torch.arange(1, DIM + 1).sin()) for row in F.normalize(rows, dim=1)]
    order = torch.tensor(order).argsort()
    return rows[order], labels[order]


def test_gaussians_are_the_literal_ones():
    x, y = features(2, 9, 0)
    means, factors = gaussians(x, y, 2, 1e-3)
    for c in range(2):
        own = x[y == c].double()
        mean = sum(own) / len(own)
        sigma = sum(torch.outer(row - mean, row - mean) for row in own) / (len(own) - 1)
        sigma += 1e-3 * torch.eye(DIM)
        torch.testing.assert_close(means[c].double(), mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(factors[c].double() @ factors[c].double().T, sigma, rtol=1e-5, atol=1e-6)


def test_fusion_is_the_literal_one():
    old, new = normal(DIM, DIM, seed=1).double(), normal(DIM, DIM, seed=2).double()
    left, values, right = torch.linalg.svd(old)
    p, r = left.T @ new, torch.diag(values) @ right  # U'A_new and U'A_old
    change = (p - r).abs()
    expected = torch.zeros(DIM, DIM, dtype=torch.float64)
    for i in range(DIM):
        for j in range(DIM):
            mask = min(1.0, float(change[i, j] / change.max()) + 0.3)
            expected[i, j] = mask * p[i, j] + (1 - mask) * r[i, j]
    torch.testing.assert_close(fused(old, new, 0.3), left @ expected, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(fused(old, new, 0.3), new, atol=1e-2)
    torch.testing.assert_close(fused(old, new, 1.0), new)
    assert torch.equal(fused(old, old, 0.3), old)


def literal_map(start, x, y, texts, tau, old, generator, epochs, size, draws, k, distance):
    """The task's map in float64, one feature after the other; `old` holds (mean, covariance) of the old classes."""
    a = start.double().clone().requires_grad_()
    e, rows = F.normalize(texts.double(), dim=1), F.normalize(x.double(), dim=1)
    adam = torch.optim.Adam([a], lr=0.01)
    pairs = [(i, j) for i in range(len(old)) for j in range(len(old), len(e)) if (e[i] - e[j]).norm() < distance]

    new = [int((y == c).sum()) for c in range(len(e) - len(old))]
    w = [1.0] * len(old) + [(sum(new) / len(new) / n) ** 0.75 for n in new]

    def draw(classes):
        noise = torch.randn(len(classes), DIM, generator=generator).double()
        return [old[c][0] + torch.linalg.cholesky(old[c][1]) @ n for c, n in zip(classes, noise, strict=True)]

    def mapped(feature):
        return a @ feature / (a @ feature).norm()

    for epoch in range(epochs):
        adam.param_groups[0]["lr"] = 0.01 * (0.1 if epoch >= 4 else 1) * (0.1 if epoch >= 10 else 1)
        order = torch.randperm(len(old), generator=generator).tolist()
        for step, batch in enumerate(torch.randperm(len(rows), generator=generator).split(size)):
            shown = [(rows[i], int(y[i]) + len(old)) for i in batch]
            if old:
                chosen = [order[(k * step + n) % len(old)] for n in range(k)]
                classes = [c for c in chosen for _ in range(int(10 * draws))]
                shown += list(zip(draw(classes), classes, strict=True))
            losses = [-w[c] * torch.log_softmax(tau * e @ mapped(feature), dim=0)[c] for feature, c in shown]
            loss = sum(losses) / sum(w[c] for _, c in shown)
            if pairs:
                every = [pair for pair in pairs for _ in range(int(20 * draws))]
                z = [mapped(feature) for feature in draw([i for i, _ in every])]
                gaps = [zi @ e[j] - zi @ e[i] + 0.1 for zi, (i, j) in zip(z, every, strict=True)]
                loss = loss + sum(gap.clamp(min=0) for gap in gaps) / len(gaps)
            adam.zero_grad()
            loss.backward()
            adam.step()
    return a.detach()


def test_two_tasks_equal_the_literal_version():
    settings = {"epochs": 6, "batch_size": 5, "draws": 0.3, "replayed": 2, "pair_distance": 1.35}
    classifier = RapfClassifier(DIM, 10.0, learning_rate=0.01, fusion_bias=0.4, ridge=1e-3, seed=2, **settings)
    texts = normal(5, DIM, seed=8)
    assert (torch.cdist(F.normalize(texts[:3], dim=1), F.normalize(texts[3:], dim=1)) < 1.35).sum() > 1
    own = (6, 5, 0.3, 2, 1.35)

    x, y = features(3, 13, 0)
    generator = torch.Generator().manual_seed(2 * 1_000_003)
    start = (2 * torch.rand(DIM, DIM, generator=generator) - 1) / math.sqrt(DIM)
    first = literal_map(start, x, y, texts[:3], 10.0, [], generator, *own)
    classifier.add_classes(["a", "b", "c"], x, y, texts[:3])
    torch.testing.assert_close(classifier.map.double(), first, rtol=0, atol=1e-4)

    old = []
    for c in range(3):
        rows = F.normalize(x, dim=1)[y == c].double()
        old.append((rows.mean(dim=0), torch.cov(rows.T) + 1e-3 * torch.eye(DIM)))
    x2, y2 = features(2, 8, 4)
    generator = torch.Generator().manual_seed(2 * 1_000_003 + 3)
    second = literal_map(first, x2, y2, texts, 10.0, old, generator, *own)
    classifier.add_classes(["d", "e"], x2, y2, texts)
    torch.testing.assert_close(classifier.map.double(), fused(first, second, 0.4), rtol=0, atol=1e-3)
    assert (classifier.map.double() - first).abs().max() > 0.02

    z = F.normalize(F.normalize(x, dim=1).double() @ classifier.map.double().T, dim=1)
    expected = 10 * z @ F.normalize(texts.double(), dim=1).T
    torch.testing.assert_close(classifier(x).double(), expected, rtol=1e-4, atol=1e-4)


def test_of_many_hard_pairs_each_step_draws_some(monkeypatch):
    steps, push_apart = [], rapf.push_apart
    monkeypatch.setattr(rapf, "push_apart", lambda z, e, pairs: (steps.append(pairs), push_apart(z, e, pairs))[1])
    monkeypatch.setattr(rapf, "MOST_PAIRS", 2)
    classifier, texts = RapfClassifier(DIM, epochs=4, draws=0.5, pair_distance=2.0), normal(5, DIM, seed=8)
    classifier.add_classes(["a", "b", "c"], *features(3, 13, 0), texts[:3])
    classifier.add_classes(["d", "e"], *features(2, 8, 4), texts)
    assert {len(pairs) for pairs in steps} == {2 * 10}
    assert 2 < len(torch.cat(steps).unique(dim=0)) <= 6


def test_the_copy_without_held_back_images_is_gone_before_all_are_learned(monkeypatch):
    learn, made, alive = RapfClassifier.learn, [], []

    def watched(*given):
        alive.append([found() is not None for found in made])
        changes = learn(*given)
        made.append(weakref.ref(changes["factors"]))
        return changes

    monkeypatch.setattr(RapfClassifier, "learn", watched)
    RapfClassifier(DIM, epochs=1).add_classes(["a", "b"], *features(2, 12, 0), normal(2, DIM))
    assert alive == [[], [False]]


def test_gaussians_move_with_the_features():
    classifier = RapfClassifier(DIM, epochs=1)
    classifier.add_classes(["a", "b"], *features(2, 8, 0), normal(2, DIM, seed=8))
    matrix = torch.eye(DIM).double() + 0.1 * normal(DIM, DIM, seed=11).double()
    means, factors, map_ = classifier.means.double(), classifier.factors.double(), classifier.map.clone()
    classifier.move(matrix)
    torch.testing.assert_close(classifier.means.double(), means @ matrix, rtol=0, atol=1e-6)
    sigma = classifier.factors[1].double() @ classifier.factors[1].double().T
    torch.testing.assert_close(sigma, matrix.T @ factors[1] @ factors[1].T @ matrix, rtol=1e-4, atol=1e-6)
    assert torch.equal(classifier.map, map_)
