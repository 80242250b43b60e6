"""Test RAPF and SLCA, which train on features sampled from each class's Gaussian, against literal versions."""

import math

import pytest
import torch
from drawn import DIM, features, normal, step
from torch.nn import functional as F

from dulbe_peft.classifiers import classifier_of
from dulbe_peft.papers import rapf
from dulbe_peft.papers.rapf import RapfRule, fused
from dulbe_peft.papers.slca import SlcaRule, normed


def test_fusion_equals_the_paper_s_formula():
    old, new = normal(DIM, DIM, seed=1).double(), normal(DIM, DIM, seed=2).double()
    left, values, right = torch.linalg.svd(old)
    p, r = left.T @ new, torch.diag(values) @ right  # U'A_new and U'A_old
    mask = ((p - r).abs() / (p - r).abs().max() + 0.3).clamp(max=1)
    torch.testing.assert_close(fused(old, new, 0.3), left @ (mask * p + (1 - mask) * r), rtol=1e-9, atol=1e-9)
    assert not torch.allclose(fused(old, new, 0.3), new, atol=1e-2)
    torch.testing.assert_close(fused(old, new, 1.0), new)
    assert torch.equal(fused(old, old, 0.3), old)


def literal_map(start, x, y, texts, tau, old, generator, epochs, size, draws, k, distance, most):
    """Return the task's map in float64, computed feature by feature; `old` has (mean, covariance) of old classes."""
    a = start.double().clone().requires_grad_()
    e, rows = F.normalize(texts.double(), dim=1), F.normalize(x.double(), dim=1)
    adam = torch.optim.Adam([a])
    pairs = [(i, j) for i in range(len(old)) for j in range(len(old), len(e)) if (e[i] - e[j]).norm() < distance]

    new = [int((y == c).sum()) for c in range(len(e) - len(old))]
    w = [1.0] * len(old) + [(sum(new) / len(new) / n) ** 0.75 for n in new]

    def draw(classes):
        noise = torch.randn(len(classes), DIM, generator=generator).double()
        return [old[c][0] + torch.linalg.cholesky(old[c][1]) @ n for c, n in zip(classes, noise, strict=True)]

    def mapped(feature):
        return a @ feature / (a @ feature).norm()

    for epoch in range(epochs):
        rate = 0.01 * (0.1 if epoch >= 4 else 1) * (0.1 if epoch >= 10 else 1)
        order = torch.randperm(len(old), generator=generator).tolist()
        for number, batch in enumerate(torch.randperm(len(rows), generator=generator).split(size)):
            shown = [(rows[i], int(y[i]) + len(old)) for i in batch]
            if old:
                chosen = [order[(k * number + n) % len(old)] for n in range(k)]
                classes = [c for c in chosen for _ in range(int(10 * draws))]
                shown += list(zip(draw(classes), classes, strict=True))
            losses = [-w[c] * torch.log_softmax(tau * e @ mapped(feature), dim=0)[c] for feature, c in shown]
            loss = sum(losses) / sum(w[c] for _, c in shown)
            if pairs:
                few = len(pairs) <= most
                hard = pairs if few else [pairs[k] for k in torch.randint(len(pairs), (most,), generator=generator)]
                repeated = [pair for pair in hard for _ in range(int(20 * draws))]
                z = [mapped(feature) for feature in draw([i for i, _ in repeated])]
                gaps = [zi @ e[j] - zi @ e[i] + 0.1 for zi, (i, j) in zip(z, repeated, strict=True)]
                loss = loss + sum(gap.clamp(min=0) for gap in gaps) / len(gaps)
            step(adam, rate, loss)
    return a.detach()


@pytest.mark.parametrize("most", [2, 32])
def test_two_tasks_of_rapf_equal_the_literal_version(monkeypatch, most):
    monkeypatch.setattr(rapf, "MOST_PAIRS", most)
    settings = {"epochs": 6, "batch_size": 5, "draws": 0.3, "replayed": 2, "pair_distance": 1.35}
    classifier = classifier_of(RapfRule)(
        DIM, 10.0, learning_rate=0.01, fusion_bias=0.4, ridge=1e-3, seed=2, **settings
    )
    texts = normal(5, DIM, seed=8)
    assert (torch.cdist(F.normalize(texts[:3], dim=1), F.normalize(texts[3:], dim=1)) < 1.35).sum() > 2

    x, y = features(3, 13, 0)
    generator = torch.Generator().manual_seed(2 * 1_000_003)
    start = (2 * torch.rand(DIM, DIM, generator=generator) - 1) / math.sqrt(DIM)
    first = literal_map(start, x, y, texts[:3], 10.0, [], generator, *settings.values(), most)
    classifier.add_classes(["a", "b", "c"], x, y, texts[:3])
    torch.testing.assert_close(classifier.map.double(), first, rtol=0, atol=1e-4)

    parts = [F.normalize(x, dim=1)[y == c].double() for c in range(3)]
    old = [(part.mean(dim=0), torch.cov(part.T) + 1e-3 * torch.eye(DIM)) for part in parts]
    x2, y2 = features(2, 8, 4)
    generator = torch.Generator().manual_seed(2 * 1_000_003 + 3)
    second = literal_map(first, x2, y2, texts, 10.0, old, generator, *settings.values(), most)
    classifier.add_classes(["d", "e"], x2, y2, texts)
    torch.testing.assert_close(classifier.map.double(), fused(first, second, 0.4), rtol=0, atol=1e-3)
    assert (classifier.map.double() - first).abs().max() > 0.02

    z = F.normalize(F.normalize(x, dim=1).double() @ classifier.map.double().T, dim=1)
    expected = 10 * z @ F.normalize(texts.double(), dim=1).T
    torch.testing.assert_close(classifier(x).double(), expected, rtol=1e-4, atol=1e-4)


def test_rapf_replays_every_old_class_in_an_epoch_and_takes_a_least_number_of_steps(monkeypatch):
    monkeypatch.setattr(rapf, "LEAST_STEPS", 12)
    texts = normal(7, DIM, seed=8)
    tasks = [(*features(5, 26, 0), "abcde", texts[:5]), (*features(2, 8, 4), "fg", texts)]

    def learned(**settings):
        classifier = classifier_of(RapfRule)(DIM, 10.0, epochs=4, ridge=1e-3, **settings)
        maps = []
        for x, y, names, each in tasks:
            classifier.add_classes(list(names), x, y, each)
            maps.append(classifier.map.clone())
        return maps

    assert torch.equal(learned()[0], learned(batch_size=8)[0])  # 26 images in at least three steps an epoch
    monkeypatch.setattr(rapf, "BATCH", 2)
    assert torch.equal(learned()[1], learned(batch_size=2, replayed=2)[1])  # 8 images, 4 steps, 5 old classes
    with pytest.warns(UserWarning, match="8 images in batches of 4 for 4 epochs give 8 steps .* fewer than 12 may"):
        learned(batch_size=4)


SETTINGS = {"epochs": 3, "batch_size": 5, "learning_rate": 0.05, "rounds": 2, "draws": 7, "norm": 0.2, "ridge": 0.01}


def trainable(*start):
    """Return trainable copies of the tensors, and their SGD optimiser with momentum 0.9 and decay 5e-4."""
    tensors = [tensor.clone().requires_grad_() for tensor in start]
    return *tensors, torch.optim.SGD(tensors, momentum=0.9, weight_decay=5e-4)


def literal_head(x, y, classes, generator):
    w, b, sgd = trainable(torch.zeros(classes, DIM, dtype=torch.float64), torch.zeros(classes, dtype=torch.float64))
    for _ in range(3):
        for rows in torch.randperm(len(x), generator=generator).split(5):
            step(sgd, 0.05, F.cross_entropy(x[rows] @ w.T + b, y[rows]))
    return w.detach(), b.detach()


def literal_alignment(weight, bias, gaussians, sizes, generator):
    task, (w, b, sgd) = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)), trainable(weight, bias)
    for number in range(2):
        noise = [torch.randn(7, DIM, generator=generator).double() for _ in task]
        samples = []
        for c, (mean, covariance) in enumerate(gaussians):
            shrunk = mean * (0.9 + 0.1 * (int(task[c]) + 1) / len(sizes))
            samples += [shrunk + torch.linalg.cholesky(covariance) @ n for n in noise[c]]
        x, y = torch.stack(samples), torch.arange(len(task)).repeat_interleave(7)
        for rows in torch.randperm(len(y), generator=generator).split(7):
            scores = x[rows] @ w.T + b
            norms = [scores[:, task == t].norm(dim=1, keepdim=True) for t in range(len(sizes))]
            loss = F.cross_entropy(scores / (sum(norms) / len(norms)) / 0.2, y[rows])
            step(sgd, 0.05 * (1 + math.cos(math.pi * number / 2)) / 2, loss)
    return w.detach(), b.detach()


def test_three_tasks_of_slca_equal_the_literal_version():
    classifier, gaussians, sizes = classifier_of(SlcaRule)(DIM, seed=2, **SETTINGS), [], [3, 2, 2]
    heads = torch.zeros(0, DIM, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    for number, (classes, names) in enumerate([(3, "abc"), (2, "de"), (2, "fg")]):
        images, labels = features(classes, 13, 5 * number)
        x = math.sqrt(DIM) * torch.nn.functional.normalize(images, dim=1).double()
        generator = torch.Generator().manual_seed(2 * 1_000_003 + sum(sizes[:number]))
        head = literal_head(x, labels, classes, generator)
        weight, bias = heads = torch.cat([heads[0], head[0]]), torch.cat([heads[1], head[1]])
        parts = [x[labels == c] for c in range(classes)]
        gaussians += [(part.mean(dim=0), torch.cov(part.T) + 0.01 * torch.eye(DIM)) for part in parts]
        if number:
            weight, bias = literal_alignment(*heads, gaussians, sizes[: number + 1], generator)
            assert (weight - heads[0]).abs().max() > 0.1
        classifier.add_classes(list(names), images, labels)
    torch.testing.assert_close(classifier.weight.double(), weight, rtol=0, atol=1e-4)
    torch.testing.assert_close(classifier.bias.double(), bias, rtol=0, atol=1e-4)
    expected = x @ weight.T + bias
    torch.testing.assert_close(classifier(images).double(), expected, rtol=1e-4, atol=1e-3)


def test_norm_skips_tasks_whose_classes_are_all_forgotten():
    scores = normal(4, 5)
    task = torch.tensor([0, 0, 2, 2, 2])  # all classes of task 1 were forgotten
    mean = (scores[:, :2].norm(dim=1) + scores[:, 2:].norm(dim=1)) / 2
    torch.testing.assert_close(normed(scores, task), scores / mean[:, None])


def test_rapf_warns_of_few_steps():
    rule = RapfRule(embed_dim=4, logit_scale=100.0)
    with pytest.warns(UserWarning, match="rapf: 2 images in batches of 1 for 15 epochs give 30 steps"):
        assert rule._schedule(2, 0)[0] == 1
