"""Compute the measures behind the paper's diagnostic figures from tensors, without drawing anything.

demand    the gradient of a new task: its size, and the parts along the modes and along the occupied directions
depths    the bridge ensemble: the accuracy of each depth, and the reliability of the depths for each class
drift     the features and prototypes of old classes before and after a task
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.classifiers.drift import linear_map
from dulbe_peft.metrics.task_features import TaskFeatures
from dulbe_peft.subspaces.allocation import supports_and_modes
from dulbe_peft.subspaces.decompositions import fix_signs


@dataclass(frozen=True)
class LayerDemand:
    """How much the gradient of a new task would change one layer, and along which directions.

    `energy` is |G|^2, the squared Frobenius norm of the prospective gradient. Three fields are shares of it: `shared`,
    |G P_S|^2, and `residual`, |G P_R|^2, along the modes, and `occupied`, |G U|^2, along the occupied directions.
    `chance` is K / d_in, the expected share along K random directions. `occupied` and `chance` are None if no task has
    been learned.
    """

    energy: float
    shared: float
    residual: float
    occupied: float | None = None
    chance: float | None = None

    @property
    def neither(self) -> float:
        """The share along neither the shared nor the residual modes, in which the task cannot change the layer."""
        return max(0.0, 1.0 - self.shared - self.residual)


@torch.no_grad()
def layer_demands(
    gradients: Mapping[str, torch.Tensor],
    stats: Mapping[str, torch.Tensor] | None,
    shared_rank: int = 1,
    residual_rank: int | Mapping[str, int] = 8,
    support_rank: int = 128,
) -> dict[str, LayerDemand]:
    """Compute the energy of each layer's gradient G, (d_out, d_in), and its shares along modes and occupied space.

    `stats` holds S, (d_in, d_in), of each layer. At most `support_rank` eigenvectors of S span the occupied space.

    Reference:
        Appendix "Gradient-space alignment", rho_S and rho_R, and figures "gradient-space diagnostics" and "Motivating
        observations" (a).

    >>> gradient, history = {"layer": torch.diag(torch.tensor([3.0, 0.0, 4.0]))}, torch.diag(torch.tensor([9.0, 1, 0]))
    >>> demand = layer_demands(gradient, {"layer": history}, 1, 1, support_rank=1)["layer"]
    >>> demand.energy, round(demand.occupied, 2), round(demand.chance, 2), round(demand.residual, 2)
    (25.0, 0.36, 0.33, 0.64)
    """
    supports, modes = supports_and_modes(gradients, stats, shared_rank, residual_rank, support_rank)
    demands = {}
    for name, gradient in gradients.items():
        matrix, plan = gradient.double(), modes[name]
        energy = float(matrix.square().sum())
        occupied = chance = None
        if name in supports:
            support = supports[name].double()
            occupied = min(1.0, float((matrix @ support).square().sum()) / energy) if energy else 0.0
            chance = support.shape[1] / support.shape[0]
        demands[name] = LayerDemand(energy, plan.shared_capture, plan.residual_capture, occupied, chance)
    return demands


@dataclass(frozen=True)
class DepthAccuracy:
    """Accuracies of the bridge ensemble, at every depth and with all depths together.

    `alone`, (K,), is the accuracy with a single one of the `depths`, (K,), which go from 0 (images) to 1 (text).
    `classes`, (C, K), is the same for the images of each class, and NaN for a class without images. `uniform` is the
    accuracy of the mean over the depths, and `weighted` that of the head itself, which weights them by reliability.
    """

    depths: torch.Tensor
    alone: torch.Tensor
    classes: torch.Tensor
    uniform: float
    weighted: float


@torch.no_grad()
def depth_accuracy(head: BridgeEnsembleHead, features: torch.Tensor, labels: torch.Tensor) -> DepthAccuracy:
    """Compute the accuracy on images, (n, d), with labels, (n,), at each of the head's depths.

    Reference:
        Table "Ablation of the bridge-prototype ensemble"; figures "accuracy across bridge depths" and "Effect of
        fixed bridge depth".
    """
    labels, features = labels.long().to(head.device), features.to(head.device, torch.float32)
    bridges = head.bridge_prototypes()  # (C, K, d)
    predicted = (features @ bridges.permute(1, 2, 0)).argmax(dim=2)
    correct = labels[:, None] == predicted.T
    classes = [correct[labels == index].double().mean(dim=0) for index in range(len(head.class_names))]
    return DepthAccuracy(
        depths=head.depths.float().cpu(),
        alone=correct.double().mean(dim=0).cpu(),
        classes=torch.stack(classes).cpu(),
        uniform=float(((features @ bridges.mean(dim=1).T).argmax(dim=1) == labels).double().mean()),
        weighted=float((head(features).argmax(dim=1) == labels).double().mean()),
    )


@dataclass(frozen=True)
class ReliabilityProfile:
    """The mean and standard deviation of pi_c over the classes, (K_b,), and the expected depth of each class, (C,)."""

    depths: torch.Tensor
    mean: torch.Tensor
    spread: torch.Tensor
    expected: torch.Tensor


@torch.no_grad()
def reliability_profile(head: BridgeEnsembleHead) -> ReliabilityProfile:
    """Compute the reliability of every depth over the classes: figure "Effect of the reliability temperature" (a)."""
    weights, expected = head.reliability.double().cpu(), head.expected_depth().double().cpu()
    spread = weights.std(dim=0, correction=0)
    return ReliabilityProfile(head.depths.double().cpu(), weights.mean(dim=0), spread, expected)


def cosines(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return the cosine, (n,), of each row of a matrix with the same row of another matrix, (n, d)."""
    return (F.normalize(before.double(), dim=1) * F.normalize(after.double(), dim=1)).sum(dim=1).clamp(-1, 1)


def coordinate_drift(before: torch.Tensor, after: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    """Return how far each image moved, |s_after - s_before|, (n,), in the coordinates s = z E' of the texts E, (C, d).

    Reference:
        Figure "Visualization of old-task semantic-coordinate drift", |Delta s|, with the texts of task 1.
    """
    return ((after.double() - before.double()) @ texts.double().T).norm(dim=1)


def coordinate_plane(
    before: torch.Tensor, after: torch.Tensor, texts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Project the coordinates of `coordinate_drift` onto the plane in which they vary most; (n, 2) before and after.

    The axes are the first two principal components of all 2 n points; the paper does not name its projection.
    """
    points = torch.cat([before, after]).double() @ texts.double().T
    points = points - points.mean(dim=0)
    _, vectors = torch.linalg.eigh(points.T @ points)
    plane = points @ fix_signs(vectors.flip(1)[:, :2])
    return plane[: len(before)], plane[len(before) :]


def rank_similarity(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Return Spearman's correlation between each row of `before` and the same row of `after`, (C,).

    Both, (C, C'), are cosines of the prototypes of old classes with text embeddings, so that the correlation is 1 for
    a class that keeps the order of its similarities to the names. A constant row gives NaN. The mean of all rows is
    our S_R of figure "Motivating observations" (b), for which the paper gives no formula.

    >>> rank_similarity(torch.tensor([[0.1, 0.2, 0.4]]), torch.tensor([[0.1, 0.9, 0.5]])).tolist()
    [0.5]
    """
    from scipy.stats import rankdata

    first, second = (torch.from_numpy(rankdata(matrix.double().cpu().numpy(), axis=1)) for matrix in (before, after))
    first, second = (ranks - ranks.mean(dim=1, keepdim=True) for ranks in (first, second))
    return (first * second).sum(dim=1) / (first.norm(dim=1) * second.norm(dim=1))


@dataclass(frozen=True)
class TaskDrift:
    """How one task moved features. A value is None if the run did not keep the features that it needs.

    Attributes:
        own: mean cosine between the features of the task's training images before and after the task.
        old: the same for the test images of all earlier tasks.
        coordinates: mean |Delta s| of these test images, by the text embeddings of task 1 from before this task.
        ranks: mean `rank_similarity` of all earlier classes, whose prototypes are means of test features.
        means: mean cosine between these prototypes before and after the task.
        mapped: mean cosine between the prototypes after the task and the linear map of those before it. If it is
            larger than `means`, the map follows the drift.
        foretold: mean cosine between the earlier classes' prototypes, as stored when they were new, and the linear map
            of these prototypes.
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
    """Measure, for each task after the first, how far it moved the features of earlier tasks."""
    rows = []
    prototypes = [_class_means(task.closing.features, task.closing.labels) for task in tasks]
    for number, (earlier, task) in enumerate(itertools.pairwise(tasks), 2):
        closing = task.closing
        figures: dict[str, float] = {}
        map_ = None
        if closing.before is not None:
            figures["own"] = float(cosines(closing.before, closing.features).mean())
            map_ = linear_map(closing.before, closing.features)
            stored = torch.cat(prototypes[: number - 1])
            figures["foretold"] = float(cosines(stored, stored @ map_).mean())
        old = old_test_features(earlier, task)
        if old is not None:
            before, after, truth = old
            means_before, means_after = _class_means(before, truth), _class_means(after, truth)
            figures["old"] = float(cosines(before, after).mean())
            figures["means"] = float(cosines(means_before, means_after).mean())
            if map_ is not None:
                figures["mapped"] = float(cosines(means_after, means_before @ map_).mean())
            if earlier.closing.texts is not None:
                texts, first = earlier.closing.texts.double(), len(tasks[0].closing.class_names)
                figures["coordinates"] = float(coordinate_drift(before, after, texts[:first]).mean())
                similarity = rank_similarity(means_before @ texts.T, means_after @ texts.T).nanmean()
                if not similarity.isnan():  # with a single name, there is no order
                    figures["ranks"] = float(similarity)
        rows.append(TaskDrift(number, **figures))
    return rows


def old_test_features(
    earlier: TaskFeatures, later: TaskFeatures
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return the features of the test images common to two tasks, after each of the tasks, and their labels."""
    common = [number for number in earlier.tests if number in later.tests]
    if not common:
        return None
    truth = torch.cat([earlier.tests[number][1] for number in common])
    before, after = (torch.cat([task.tests[number][0] for number in common]) for task in (earlier, later))
    return (before, after, truth) if len(truth) else None


def _class_means(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the unit mean features, (classes, d), float64, of the classes with images, in the order of the labels."""
    means = [features[labels == label].double().mean(dim=0) for label in labels.unique()]
    return F.normalize(torch.stack(means), dim=1)
