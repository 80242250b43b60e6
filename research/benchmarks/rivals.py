"""Classifiers of other papers that keep all features, which no classifier of the library does.

Each is a function of unit features z (n, d), labels y (n,), unit texts e (C, d), the logit scale tau, and test
features, (m, d). It returns scores, (m, C). It learns all classes at once. With one image per class, it uses the first
setting of its grid, otherwise the setting with the best accuracy on a held-out fifth of the images of each class.

    python -m research.benchmarks.frozen --classifiers tip_adapter proker ranpac_and_text mixed_prototypes linear_probe

SeMoBridge (2509.26036) is not included: it computes the input of the text tower's projection from an embedding. For
that it needs the projection matrix, which is not part of the features.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.geodesics import bridge_prototypes, reliability
from dulbe_peft.classifiers.lda import shrunk_covariance
from dulbe_peft.classifiers.leaving import hold_back
from dulbe_peft.classifiers.registry import make_classifier


def tip_adapter(z: Tensor, y: Tensor, e: Tensor, tau: float, tests: Tensor, alpha: float, beta: float) -> Tensor:
    """tau z'e_c + alpha * sum over the images s of class c of exp(-beta (1 - z's))      (Zhang et al., 2207.09519)"""
    near = (-beta * (1 - tests @ z.T)).exp()
    return tau * tests @ e.T + alpha * near @ F.one_hot(y, len(e)).to(near)


def proker(z: Tensor, y: Tensor, e: Tensor, tau: float, tests: Tensor, beta: float, ridge: float) -> Tensor:
    """z'e + k(z, S) (K + lambda I)^-1 (Y - S e), k(a, b) = exp(-beta |a - b|^2 / 2)     (Bendou et al., 2501.11175)"""
    z, e, tests = z.double(), e.double(), tests.double()
    kernel = (beta * (z @ z.T - 1)).exp()
    left = F.one_hot(y, len(e)).to(z) - z @ e.T
    weights = torch.linalg.solve(kernel + ridge * torch.eye(len(z), dtype=z.dtype), left)
    return tests @ e.T + (beta * (tests @ z.T - 1)).exp() @ weights


def ranpac_and_text(z: Tensor, y: Tensor, e: Tensor, tau: float, tests: Tensor, share: float) -> Tensor:
    """log p of RanPAC + share * log p of the text classifier    (McDonnell et al., 2307.02251, with texts added)"""
    classifier = make_classifier("ranpac:features=1000", z.shape[1], tau)
    classifier.add_classes([str(label) for label in range(len(e))], z, y)
    return classifier.probabilities(tests).log() + share * (tau * tests @ e.T).log_softmax(dim=1)


@lru_cache(maxsize=2)
def fitted_lda(z: Tensor, y: Tensor, classes: int, tau: float) -> Classifier:
    """Return `lda` after learning the images, which all settings of a grid share. Tensors are compared by identity."""
    lda = make_classifier("lda", z.shape[1], tau)
    lda.add_classes([str(label) for label in range(classes)], z, y)
    return lda


def whitened_bridge(z: Tensor, y: Tensor, e: Tensor, tau: float, tests: Tensor, beta: float) -> Tensor:
    """Apply the bridge ensemble of DuLBE to whitened unit features, (z - m) Sigma^-1/2.

    m is the mean of the texts for texts, and the mean of the class means for images. Sigma is the covariance within
    the classes, as `lda` estimates it. Every class needs at least one image.
    """
    lda = fitted_lda(z, y, len(e), tau)
    covariance = shrunk_covariance(lda.scatter, int(lda.freedom), "oas", 1 / tau)
    variances, directions = torch.linalg.eigh(covariance)
    matrix, centre = (directions * variances.clamp_min(1e-12).rsqrt()) @ directions.T, lda.means.mean(dim=0)
    pairs = (z, centre), (tests, centre), (lda.means, centre), (e, e.double().mean(dim=0))
    z, tests, means, e = (F.normalize((rows.double() - mean) @ matrix, dim=1).float() for rows, mean in pairs)
    bridges = bridge_prototypes(means, e, torch.linspace(0, 1, 10))
    weights = (reliability(z, y, bridges, tau) / beta).softmax(dim=1)
    return tau * tests @ (weights[:, :, None] * bridges).sum(dim=1).T


def mixed_prototypes(
    z: Tensor, y: Tensor, e: Tensor, tau: float, tests: Tensor, kept: float, share: float, alpha: float
) -> Tensor:
    """tau z'p_c + alpha * LDA score, with p_c the direction of (1 - share) e_c + share * P v_c       (2603.24528)

    v_c is the class mean, and P projects onto the principal directions of the texts with a share `kept` of their
    variance. This is the rule in the summary of the paper; the ridge of its LDA is that of `lda`.
    """
    lda = fitted_lda(z, y, len(e), tau)
    _, sizes, directions = torch.linalg.svd(e, full_matrices=False)
    number = int((sizes.square().cumsum(0) / sizes.square().sum() < kept).sum()) + 1
    projected = F.normalize(lda.means.float() @ directions[:number].T @ directions[:number], dim=1)
    prototypes = F.normalize((1 - share) * e + share * projected, dim=1)
    return tau * tests @ prototypes.T + alpha * lda(tests)


def nearest_images(z: Tensor, y: Tensor, e: Tensor, tau: float, tests: Tensor, neighbours: int) -> Tensor:
    """Return the share of each class among the k nearest images, weighted by the inverse distance."""
    rule = KNeighborsClassifier(min(neighbours, len(z)), weights="distance", metric="cosine").fit(z.numpy(), y.numpy())
    return torch.from_numpy(rule.predict_proba(tests.numpy()))


def linear_probe(z: Tensor, y: Tensor, e: Tensor, tau: float, tests: Tensor, strength: float) -> Tensor:
    """Fit logistic regression to the features, with a penalty of 1 / strength."""
    rule = LogisticRegression(C=strength, max_iter=2000).fit(z.numpy(), y.numpy())
    return torch.from_numpy(rule.predict_log_proba(tests.numpy()))


def _grid(**values: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [dict(zip(values, combination, strict=True)) for combination in product(*values.values())]


RIVALS: dict[str, tuple[Callable[..., Tensor], list[dict[str, Any]]]] = {
    "tip_adapter": (tip_adapter, _grid(alpha=(1.0, 0.3, 3.0, 10.0, 30.0), beta=(5.5, 1.0, 2.0, 10.0, 20.0, 40.0))),
    "proker": (proker, _grid(beta=(5.5, 1.0, 2.0, 10.0, 20.0), ridge=(1.0, 0.01, 0.1, 10.0, 100.0))),
    "ranpac_and_text": (ranpac_and_text, _grid(share=(0.3, 0.0, 0.1, 1.0, 3.0))),
    "mixed_prototypes": (
        mixed_prototypes,
        _grid(kept=(0.95, 0.8), share=(0.3, 0.1, 0.6), alpha=(0.0, 0.03, 0.1, 0.3, 1.0, 3.0)),
    ),
    "whitened_bridge": (whitened_bridge, _grid(beta=(0.05,))),
    "nearest_images": (nearest_images, _grid(neighbours=(1, 3, 5, 10, 20))),
    "linear_probe": (linear_probe, _grid(strength=(100.0, 1.0, 10.0, 1000.0))),
}

WITH_TEXT = set(RIVALS) - {"nearest_images", "linear_probe"}


@torch.no_grad()
def scores(name: str, z: Tensor, y: Tensor, e: Tensor, tau: float, tests: Tensor) -> Tensor:
    """Return the scores of a rival, (m, C), with the setting that is best on held-out images of `z`."""
    rule, grid = RIVALS[name]
    held, setting = hold_back(z, y), grid[0]
    with warnings.catch_warnings():
        # scikit-learn takes labels with few images per class for the targets of a regression, and warns.
        warnings.filterwarnings("ignore", "The number of unique classes")
        if held.any():
            learned, tested = (z[~held], y[~held]), z[held]
            fitted = [rule(*learned, e, tau, tested, **each).argmax(dim=1) for each in grid]
            setting = grid[max(range(len(grid)), key=lambda place: int((fitted[place] == y[held]).sum()))]
        return rule(z, y, e, tau, tests, **setting)


def figures(name: str, features: dict[str, Any], tasks: Sequence[Any]) -> dict[str, float]:
    """Return A_last, as a fraction, after learning all tasks of `research.benchmarks.frozen.draw` at once."""
    classes = [label for task in tasks for label in task.classes]
    starts = [sum(len(task.classes) for task in tasks[:place]) for place in range(len(tasks))]
    labels = [start + label for start, task in zip(starts, tasks, strict=True) for label in task.y]
    labels += [label for task in tasks for label in task.further_y]
    images = torch.cat([*(task.train for task in tasks), *(task.further for task in tasks)])
    tests, truth = torch.cat([task.test for task in tasks]), [label for task in tasks for label in task.truth]
    texts = torch.zeros(len(classes), images.shape[1]) if features["text"] is None else features["text"][classes]
    values = scores(name, images, torch.tensor(labels), texts, features["scale"], tests)
    return {"A_last": (values.argmax(dim=1) == torch.tensor(truth)).double().mean().item()}
