"""The paper's formulas as they are printed, in float64, without regard to speed or degenerate cases.

The library must give the same numbers. It imports nothing from here.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional as F


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal random numbers, the same in every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def occupation(tokens: torch.Tensor) -> torch.Tensor:
    """Return S = sum over tokens of x x'."""
    rows = tokens.double().flatten(0, -2)
    return rows.T @ rows


def support(statistic: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the top eigenvectors of S, and all its eigenvalues in descending order."""
    values, vectors = torch.linalg.eigh(statistic.double())
    order = values.argsort(descending=True)
    return vectors[:, order[:rank]], values[order]


def first_task_bases(
    gradient: torch.Tensor, shared_rank: int, residual_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    _, _, right = torch.linalg.svd(gradient.double(), full_matrices=True)
    return right[:shared_rank].T, right[shared_rank : shared_rank + residual_rank].T


def bases(
    gradient: torch.Tensor, statistic: torch.Tensor, shared_rank: int, residual_rank: int, support_rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return P_S = U [q_1 .. q_r], q the top eigenvectors of U'G'GU, and P_R.

    P_R holds the top right singular vectors of G(I - UU').
    """
    gradient = gradient.double()
    occupied, _ = support(statistic, support_rank)
    demand = occupied.T @ gradient.T @ gradient @ occupied
    values, vectors = torch.linalg.eigh(demand)
    shared = occupied @ vectors[:, values.argsort(descending=True)[:shared_rank]]
    projector = torch.eye(len(occupied), dtype=torch.float64) - occupied @ occupied.T
    _, _, right = torch.linalg.svd(gradient @ projector, full_matrices=True)
    return shared, right[:residual_rank].T


def slerp(start: torch.Tensor, end: torch.Tensor, fraction: float) -> torch.Tensor:
    """Return the spherical interpolation by its textbook formula."""
    start, end = start.double(), end.double()
    theta = math.acos(float(start @ end))
    return (math.sin((1 - fraction) * theta) * start + math.sin(fraction * theta) * end) / math.sin(theta)


def softmax(values: list[float]) -> list[float]:
    top = max(values)
    powers = [math.exp(value - top) for value in values]
    return [power / sum(powers) for power in powers]


def bidirectional_kl(
    student: torch.Tensor, teacher: torch.Tensor, class_temperature: float, instance_temperature: float
) -> tuple[float, float]:
    """Return the sum over all images and the sum over all classes, each times its temperature squared."""

    def total(dim: int, temperature: float) -> float:
        p, q = ((logits.double() / temperature).softmax(dim) for logits in (teacher, student))
        return temperature**2 * (p * (p.log() - q.log())).sum().item()

    return total(1, class_temperature), total(0, instance_temperature)


class Head:
    """The bridge ensemble, computed depth by depth as K_b classifiers."""

    def __init__(self, depths: list[float], temperature: float = 0.05, logit_scale: float = 100.0) -> None:
        self.depths, self.temperature, self.logit_scale = depths, temperature, logit_scale
        self.visual: list[torch.Tensor] = []
        self.weights: list[list[float]] = []

    def add_classes(self, images: torch.Tensor, labels: list[int], texts: torch.Tensor) -> None:
        images, self.text, old = unit(images), unit(texts), len(self.visual)
        groups = [images[[i for i, label in enumerate(labels) if label == new]] for new in range(len(texts) - old)]
        self.visual = [*self.visual, *(F.normalize(group.sum(dim=0), dim=0) for group in groups)]
        for index, group in enumerate(groups, old):
            self.weights.append(softmax([value / self.temperature for value in self.rho(group, index)]))

    def rho(self, images: torch.Tensor, index: int) -> list[float]:
        """Return the mean probability of the class `index` over its images, at each depth."""
        return [self.depth_logits(images, depth).softmax(dim=1)[:, index].mean().item() for depth in self.depths]

    def depth_logits(self, images: torch.Tensor, depth: float) -> torch.Tensor:
        bridges = [slerp(v, e, depth) for v, e in zip(self.visual, self.text, strict=True)]
        return self.logit_scale * images @ torch.stack(bridges).T

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor(self.weights, dtype=torch.float64)
        return sum(weights[:, k] * self.depth_logits(unit(images), depth) for k, depth in enumerate(self.depths))


class PooledHead(Head):
    """The bridge ensemble with one set of weights for all classes, estimated by leaving out one image at a time."""

    def __init__(self, depths: list[float], temperature: float = 0.05, logit_scale: float = 100.0) -> None:
        super().__init__(depths, temperature, logit_scale)
        self.sums: list[torch.Tensor] = []
        self.counts: list[int] = []
        self.told: list[list[list[float]]] = []  # [class][image][depth]: probability of an image left out
        self.by_text: list[list[float]] = []  # [class][image]: probability by the text embeddings alone
        self.rivals: list[list[int]] = []  # [class][image]: number of other classes when the image was learned

    def learn(self, images: torch.Tensor, labels: list[int], texts: torch.Tensor) -> None:
        """Learn images. `labels` index all classes of `texts`, old and new ones."""
        images, self.text, new = unit(images), unit(texts), len(texts) - len(self.sums)
        self.sums += [torch.zeros(texts.shape[1], dtype=torch.float64) for _ in range(new)]
        self.counts += [0] * new
        self.told += [[] for _ in range(new)]
        self.by_text += [[] for _ in range(new)]
        self.rivals += [[] for _ in range(new)]
        for image, label in zip(images, labels, strict=True):
            self.sums[label] = self.sums[label] + image
            self.counts[label] += 1
        self.visual = [F.normalize(total, dim=0) for total in self.sums]
        for image, label in zip(images, labels, strict=True):
            self.rivals[label].append(len(texts) - 1)
            self.by_text[label].append(float((self.logit_scale * self.text @ image).softmax(dim=0)[label]))
            if self.counts[label] > 1:
                self.told[label].append([self.without(image, label, depth) for depth in self.depths])

    def without(self, image: torch.Tensor, label: int, depth: float) -> float:
        """Return the probability of a learned image's class at a depth, with the image left out of its prototype."""
        scores = torch.stack([slerp(v, e, depth) for v, e in zip(self.visual, self.text, strict=True)]) @ image
        rest = (self.sums[label] - image) / (self.counts[label] - 1)
        start, text = F.normalize(rest, dim=0), self.text[label]
        theta = math.acos(float(start @ text))
        ratio = float(rest.norm()) / (float(self.sums[label].norm()) / self.counts[label])
        by_image, by_text = (math.sin(part * theta) / math.sin(theta) for part in (1 - depth, depth))
        scores[label] = (by_image * ratio * start + by_text * text) @ image
        return float((self.logit_scale * scores).softmax(dim=0)[label])

    def among_all(self, mean: float, label: int) -> float:
        """Convert a mean probability among the classes known at the time of learning to one among all classes."""
        rivals = sum(self.rivals[label]) / len(self.rivals[label])
        return mean / (mean + (1 - mean) * (len(self.sums) - 1) / rivals)

    def usual(self, depth: float) -> float:
        """Return the prior of rho at a depth."""
        means = [self.among_all(sum(each) / len(each), label) for label, each in enumerate(self.by_text)]
        by_text = sum(means) / len(means)
        middle = min(1.0, max(0.0, 1 + math.log(by_text) / math.log(len(self.by_text))))
        height = min(1.0, by_text * math.exp(4 * (1 - middle) ** 2))
        return height * math.exp(-4 * (depth - middle) ** 2)

    def pooled_weights(self) -> list[float]:
        rho = []
        for index, depth in enumerate(self.depths):
            each = []
            for label, rows in enumerate(self.told):
                mean = self.among_all(sum(row[index] for row in rows) / len(rows), label) if rows else 0.0
                each.append((len(rows) * mean + self.usual(depth)) / (len(rows) + 1))
            rho.append(sum(each) / len(each))
        return softmax([value / (self.temperature * max(rho)) for value in rho])

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        weighted = zip(self.pooled_weights(), self.depths, strict=True)
        return sum(weight * self.depth_logits(unit(images), depth) for weight, depth in weighted)


def unit(rows: torch.Tensor) -> torch.Tensor:
    return F.normalize(rows.double(), dim=-1)


def class_mean_logits(images: torch.Tensor, labels: list[int], tests: torch.Tensor, scale: float) -> torch.Tensor:
    """Return tau z . v_c, where v_c is the direction of the class mean."""
    sums = F.one_hot(torch.tensor(labels)).double().T @ unit(images)
    return scale * unit(tests) @ unit(sums).T


def oas(covariance: torch.Tensor, samples: int) -> float:
    """Return the OAS shrinkage: Chen et al., 2010, equation 23."""
    d, trace, square = len(covariance), covariance.trace().item(), (covariance @ covariance).trace().item()
    value = ((1 - 2 / d) * square + trace**2) / ((samples + 1 - 2 / d) * (square - trace**2 / d))
    return min(value, 1.0)


def lda_logits(
    images: torch.Tensor,
    labels: list[int],
    tests: torch.Tensor,
    shrinkage: float | None,
    prior_images: float = 0.0,
    whole: tuple | None = None,
) -> torch.Tensor:
    """Return z' Sigma^-1 m - m' Sigma^-1 m / 2 with the shrunk pooled covariance; a shrinkage of None means OAS.

    `whole` is used when images are left out one at a time. It gives the values of all images for the largest count,
    the mean of the class means, the degrees of freedom and the mean variance.
    """
    images, classes = unit(images), max(labels) + 1
    d, members = images.shape[1], F.one_hot(torch.tensor(labels)).double()
    counts = members.sum(dim=0)
    means = members.T @ images / counts[:, None]
    away = images - means[labels]
    scatter = away.T @ away
    most, middle, freedom = counts.max(), means.mean(dim=0), len(images) - classes
    variance = scatter.trace() / freedom / d
    if whole:
        most, middle, freedom, variance = whole
    shrinkage = oas(scatter / freedom, freedom) if shrinkage is None else shrinkage
    covariance = (1 - shrinkage) * scatter / freedom + shrinkage * variance * torch.eye(d, dtype=torch.float64)
    inverse, weight = torch.linalg.inv(covariance), counts / (counts + prior_images) * (most + prior_images) / most
    drawn = middle + weight[:, None] * (means - middle)
    return unit(tests) @ inverse @ drawn.T - (drawn @ inverse * drawn).sum(dim=1) / 2


def ridge_scores(
    images: torch.Tensor, labels: list[int], tests: torch.Tensor, ridge: float, lift: Callable = lambda x: x
) -> torch.Tensor:
    """Return h' (H'H + lambda I)^-1 H'Y, with one-hot Y."""
    lifted = lift(unit(images))
    truth = F.one_hot(torch.tensor(labels)).double()
    inverse = torch.linalg.inv(lifted.T @ lifted + ridge * torch.eye(lifted.shape[1], dtype=torch.float64))
    return lift(unit(tests)) @ inverse @ lifted.T @ truth


def calibration_error(probabilities: torch.Tensor, labels: torch.Tensor, bins: int = 15) -> float:
    """Return the expected calibration error: the mean gap between confidence and accuracy in bins of equal width."""
    confidence, chosen = probabilities.double().max(dim=1)
    correct, total = (chosen == labels).double(), 0.0
    for number in range(bins):
        inside = (confidence > number / bins) & (confidence <= (number + 1) / bins)
        if inside.any():
            gap = abs(correct[inside].mean().item() - confidence[inside].mean().item())
            total += gap * inside.double().mean().item()
    return total


def gda_clip_logits(images, labels, texts, tests, alpha, scale=100.0):
    """Return the logits of GDA-CLIP by its paper and code: the text logits plus alpha times those of the Gaussians.

    The precision is d ((N - 1) S + tr(S) I)^-1, where S is the covariance of the N rows around their class means.
    """
    classes, d = labels.max() + 1, images.shape[1]
    means = np.stack([images[labels == c].mean(axis=0) for c in range(classes)])
    away = images - means[labels]
    spread = np.cov(away.T)
    precision = d * np.linalg.inv((len(images) - 1) * spread + np.trace(spread) * np.eye(d))
    weights = means @ precision
    bias = np.log(1 / classes) - (weights * means).sum(axis=1) / 2
    return scale * tests @ texts.T + alpha * (tests @ weights.T + bias)


def drift_map(before: torch.Tensor, after: torch.Tensor, ridge: float) -> torch.Tensor:
    """Return argmin_M |X M - Y|^2 + lambda |M - I|^2 by the normal equations.

    lambda is `ridge` times the mean eigenvalue of X'X.
    """
    old, new = before.double(), after.double()
    width = old.shape[1]
    penalty = ridge * torch.linalg.eigvalsh(old.T @ old).mean() * torch.eye(width, dtype=torch.float64)
    return torch.linalg.inv(old.T @ old + penalty) @ (old.T @ new + penalty)


def left_out_drift(
    before: torch.Tensor, after: torch.Tensor, labels: torch.Tensor, ridges: tuple[float, ...], folds: int
) -> torch.Tensor:
    """Return for each ridge the sum over all images of |y - x M|^2, with M fitted to other folds; inf means M = I."""
    errors = torch.zeros(len(ridges), dtype=torch.float64)
    for place, ridge in enumerate(ridges):
        for image in range(len(labels)):
            others = labels % folds != labels[image] % folds
            identity = torch.eye(before.shape[1], dtype=torch.float64)
            matrix = identity if math.isinf(ridge) else drift_map(before[others], after[others], ridge)
            errors[place] += ((after[image].double() - before[image].double() @ matrix) ** 2).sum()
    return errors


def label_noise(logits: torch.Tensor, labels: torch.Tensor, temperature: float, wrong) -> list[float]:
    """Log-likelihood of labels for each share of wrong labels, as in `calibration.fit_temperature`, image by image."""
    classes, doubt, totals = logits.shape[1], 1 / 3 / (len(labels) + 2), [0.0] * len(wrong)
    for scores, label in zip((logits.double() / temperature).tolist(), labels.tolist(), strict=True):
        found = softmax(scores)
        rival = max(p for place, p in enumerate(found) if place != label)
        for number, w in enumerate(wrong):
            w = min(w, (classes - 1) / classes)
            likely = (1 - w) * found[label] + w * (1 - found[label]) / (classes - 1)
            totals[number] += (1 - doubt) * math.log(likely) + doubt * math.log(rival)
    return totals
