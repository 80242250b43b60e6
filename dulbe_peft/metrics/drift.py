"""How far a task moved the features and prototypes of what was learned before it: the paper's figures as numbers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy.stats import rankdata
from torch.nn import functional as F

from dulbe_peft.classifiers.drift import linear_map
from dulbe_peft.metrics.features import TaskFeatures
from dulbe_peft.subspaces.decompositions import fix_signs


def cosines(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """The cosine, (n,), of each row with the same row of another matrix, (n, d)."""
    return (F.normalize(before.double(), dim=1) * F.normalize(after.double(), dim=1)).sum(dim=1).clamp(-1, 1)


def coordinate_drift(before: torch.Tensor, after: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """How far, (n,), each image moved in the coordinates of the class names E, (C, d): |s_after - s_before|, s = z E'.

    Reference:
        Figure "Visualization of old-task semantic-coordinate drift", |Delta s|, with the texts of task 1.
    """
    return ((after.double() - before.double()) @ texts.double().T).norm(dim=1)


def coordinate_plane(
    before: torch.Tensor, after: torch.Tensor, texts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The coordinates of `coordinate_drift` in the plane in which they vary most, (n, 2) before and after.

    The axes are the first two principal components of all 2 n places; the paper does not name its projection.
    """
    places = torch.cat([before, after]).double() @ texts.double().T
    places = places - places.mean(dim=0)
    _, vectors = torch.linalg.eigh(places.T @ places)
    plane = places @ fix_signs(vectors.flip(1)[:, :2])
    return plane[: len(before)], plane[len(before) :]


def rank_similarity(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """How far each old class keeps the order in which it resembles the classes' names: Spearman's rank correlation.

    `before` and `after`, (C, C'), are cosines of prototypes with text embeddings. A constant row has NaN. The mean of
    all rows is our S_R of figure "Motivating observations" (b), for which the paper gives no formula.

    >>> rank_similarity(torch.tensor([[0.1, 0.2, 0.4]]), torch.tensor([[0.1, 0.9, 0.5]])).tolist()
    [0.5]
    """
    first, second = (torch.from_numpy(rankdata(matrix.double().cpu().numpy(), axis=1)) for matrix in (before, after))
    first, second = (ranks - ranks.mean(dim=1, keepdim=True) for ranks in (first, second))
    return (first * second).sum(dim=1) / (first.norm(dim=1) * second.norm(dim=1))


@dataclass(frozen=True)
class TaskDrift:
    """How one task moved features. Each figure is None where the run did not keep what it needs.

    Attributes:
        task: number of the task, from 1.
        own: mean cosine of the task's training images with themselves before the task.
        old: the same of the test images of all earlier tasks.
        coordinates: mean |Delta s| of these images, by the text embeddings of task 1 as they were before this task.
        ranks: mean `rank_similarity` of all earlier classes; their prototypes are means of test features.
        means: mean cosine of the earlier classes' mean test features with themselves before the task.
        mapped: the same with what the linear map makes of those from before. More than `means`: it follows the drift.
        foretold: mean cosine of the earlier classes' prototypes, of the time when they were new, with what the linear
            map of this task makes of them.
    """

    task: int
    own: float | None = None
    old: float | None = None
    coordinates: float | None = None
    ranks: float | None = None
    means: float | None = None
    mapped: float | None = None
    foretold: float | None = None


@torch.no_grad()
def drift_by_task(tasks: Sequence[TaskFeatures]) -> list[TaskDrift]:
    """How far each task after the first one moved the features of what was learned before."""
    rows = []
    prototypes = [_class_means(tasks[0].closing.features, tasks[0].closing.labels)] if tasks else []
    for number, (earlier, task) in enumerate(itertools.pairwise(tasks), 2):
        closing = task.closing
        figures: dict[str, float] = {}
        moved = None
        if closing.before is not None:
            figures["own"] = float(cosines(closing.before, closing.features).mean())
            moved = linear_map(closing.before, closing.features)
            stored = torch.cat(prototypes)
            figures["foretold"] = float(cosines(stored, stored @ moved).mean())
        old = old_test_features(earlier, task)
        if old is not None:
            first = len(tasks[0].closing.class_names)
            figures |= _old_figures(*old, earlier.texts, first, moved)
        rows.append(TaskDrift(number, **figures))
        prototypes.append(_class_means(closing.features, closing.labels))
    return rows


def old_test_features(
    earlier: TaskFeatures, later: TaskFeatures
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """The test images that two tasks have in common, as the models after each of them see these images."""
    common = [number for number in earlier.tests if number in later.tests]
    if not common:
        return None
    truth = torch.cat([earlier.tests[number][1] for number in common])
    before, after = (torch.cat([task.tests[number][0] for number in common]) for task in (earlier, later))
    return (before, after, truth) if len(truth) else None


def _old_figures(
    before: torch.Tensor,
    after: torch.Tensor,
    truth: torch.Tensor,
    texts: torch.Tensor | None,
    first: int,
    moved: torch.Tensor | None,
) -> dict[str, float]:
    old, new = _class_means(before, truth), _class_means(after, truth)
    figures = {"old": float(cosines(before, after).mean()), "means": float(cosines(old, new).mean())}
    if moved is not None:
        figures["mapped"] = float(cosines(new, old @ moved).mean())
    if texts is not None:
        figures["coordinates"] = float(coordinate_drift(before, after, texts[:first]).mean())
        known = texts.double()
        kept = rank_similarity(old @ known.T, new @ known.T).nanmean() if len(known) > 1 else torch.tensor(torch.nan)
        if not kept.isnan():
            figures["ranks"] = float(kept)
    return figures


def _class_means(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Unit mean features of the classes that have images, in the order of their labels, (classes, d), float64."""
    means = [features[labels == label].double().mean(dim=0) for label in labels.unique()]
    return F.normalize(torch.stack(means), dim=1)
