"""SLCA's classifier: two whole tasks beside a literal version."""

import math

import torch
from test_rapf import DIM, features, normal

from dulbe_peft.classifiers.slca import SlcaClassifier, normed

SETTINGS = {"epochs": 3, "batch_size": 5, "learning_rate": 0.05, "rounds": 2, "draws": 7, "norm": 0.2, "ridge": 0.01}


def descend(weight, bias, batches, rate_of):
    """SGD with momentum 0.9 and decay 5e-4 by hand; each batch has a number for the rate, and gives its loss."""
    speeds = [torch.zeros_like(weight), torch.zeros_like(bias)]
    for number, loss_of in batches:
        tensors = [tensor.clone().requires_grad_() for tensor in (weight, bias)]
        slopes = torch.autograd.grad(loss_of(*tensors), tensors)
        speeds = [
            0.9 * speed + slope + 5e-4 * tensor for speed, slope, tensor in zip(speeds, slopes, tensors, strict=True)
        ]
        weight, bias = (t.detach() - rate_of(number) * speed for t, speed in zip(tensors, speeds, strict=True))
    return weight, bias


def cross_entropy(scores, labels):
    return -sum(torch.log_softmax(row, dim=0)[label] for row, label in zip(scores, labels, strict=True)) / len(labels)


def literal_head(x, y, classes, generator):
    def batches():
        for _ in range(3):
            for rows in torch.randperm(len(x), generator=generator).split(5):
                yield 0, lambda w, b, rows=rows: cross_entropy(x[rows] @ w.T + b, y[rows])

    start = torch.zeros(classes, DIM, dtype=torch.float64), torch.zeros(classes, dtype=torch.float64)
    return descend(*start, batches(), lambda _: 0.05)


def literal_alignment(weight, bias, gaussians, sizes, generator):
    task = [number for number, size in enumerate(sizes) for _ in range(size)]

    def loss_of(w, b, x, y):
        scores = x @ w.T + b
        rows = []
        for row in scores:
            norms = [row[[c for c, own in enumerate(task) if own == t]].norm() for t in range(len(sizes))]
            rows.append(row / (sum(norms) / len(norms)) / 0.2)
        return cross_entropy(rows, y)

    def batches():
        for number in range(2):
            noise = [torch.randn(7, DIM, generator=generator).double() for _ in task]
            drawn = []
            for c, (mean, covariance) in enumerate(gaussians):
                shrunk = mean * (0.9 + 0.1 * (task[c] + 1) / len(sizes))
                drawn += [shrunk + torch.linalg.cholesky(covariance) @ n for n in noise[c]]
            x, y = torch.stack(drawn), torch.arange(len(task)).repeat_interleave(7)
            for rows in torch.randperm(len(y), generator=generator).split(7):
                yield number, lambda w, b, x=x[rows], y=y[rows]: loss_of(w, b, x, y)

    return descend(weight, bias, batches(), lambda number: 0.05 * (1 + math.cos(math.pi * number / 2)) / 2)


def test_two_tasks_equal_the_literal_version():
    classifier, gaussians, sizes = SlcaClassifier(DIM, seed=2, **SETTINGS), [], [3, 2]
    weight, bias = torch.zeros(0, DIM, dtype=torch.float64), torch.zeros(0, dtype=torch.float64)
    for number, (classes, names) in enumerate([(3, "abc"), (2, "de")]):
        images, labels = features(classes, 13, 5 * number)
        x = math.sqrt(DIM) * torch.nn.functional.normalize(images, dim=1).double()
        generator = torch.Generator().manual_seed(2 * 1_000_003 + 3 * number)
        own = literal_head(x, labels, classes, generator)
        weight, bias = torch.cat([weight, own[0]]), torch.cat([bias, own[1]])
        gaussians += [
            (x[labels == c].mean(dim=0), torch.cov(x[labels == c].T) + 0.01 * torch.eye(DIM)) for c in range(classes)
        ]
        if number:
            before = weight
            weight, bias = literal_alignment(weight, bias, gaussians, sizes, generator)
            assert (weight - before).abs().max() > 0.1
        classifier.add_classes(list(names), images, labels)
    torch.testing.assert_close(classifier.weight.double(), weight, rtol=0, atol=1e-4)
    torch.testing.assert_close(classifier.bias.double(), bias, rtol=0, atol=1e-4)
    expected = x @ weight.T + bias
    torch.testing.assert_close(classifier(images).double(), expected, rtol=1e-4, atol=1e-3)


def test_a_class_that_is_forgotten_leaves_its_task_s_norm():
    scores = normal(4, 5)
    task = torch.tensor([0, 0, 2, 2, 2])  # task 1 has lost its classes
    mean = (scores[:, :2].norm(dim=1) + scores[:, 2:].norm(dim=1)) / 2
    torch.testing.assert_close(normed(scores, task), scores / mean[:, None])
