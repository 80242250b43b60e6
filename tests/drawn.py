"""Random features of a few classes, in the order in which trained classifiers draw them for their batches."""

import torch
from reference import randn as normal
from torch.nn import functional as F

DIM = 6


def features(classes, count, seed):
    labels = torch.arange(count) % classes
    return ranked(normal(classes, DIM, seed=seed)[labels] + 0.4 * normal(count, DIM, seed=seed + 1), labels)


def step(optimizer, rate, loss):
    """Take one optimizer step on a loss."""
    optimizer.param_groups[0]["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def ranked(rows, labels):
    """Sort features and labels into the order from which batches are drawn, independent of the given order."""
    order = [float(row @ torch.arange(1, DIM + 1).sin()) for row in F.normalize(rows, dim=1)]
    order = torch.tensor(order).argsort()
    return rows[order], labels[order]
