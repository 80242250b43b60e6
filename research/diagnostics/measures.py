"""The measures behind the paper's diagnostic figures: functions of tensors that give numbers, without any drawing.

demand    gradient of a new task: how large, and which part the modes and the occupied directions take
depths    bridge ensemble: what each depth alone tells, and which depths each class trusts
drift     features and prototypes of old classes before and after a task
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.classifiers.drift import linear_map
from dulbe_peft.metrics.features import TaskFeatures
from dulbe_peft.subspaces.allocation import supports_and_modes
from dulbe_peft.subspaces.decompositions import fix_signs


@dataclass(frozen=True)
class LayerDemand:
    """How much a new task wants to change one layer, and along which directions.

    `energy` is |G|^2, the squared Frobenius norm of the prospective gradient. The others are shares of it: `shared`
    |G P_S|^2 and `residual` |G P_R|^2 along the modes, `occupied` |G U|^2 along the occupied directions. `chance` is
    K / d_in, what K random directions would take; both are None where no task has been learned.
    """

    energy: float
    shared: float
    residual: float
    occupied: float | None = None
    chance: float | None = None

    @property
    def neither(self) -> float:
        """The part that neither the shared nor the residual modes take: the task cannot write there."""
        return max(0.0, 1.0 - self.shared - self.residual)


@torch.no_grad()
def layer_demands(
    gradients: Mapping[str, torch.Tensor],
    stats: Mapping[str, torch.Tensor] | None,
    shared_rank: int = 1,
    residual_rank: int | Mapping[str, int] = 8,
    support_rank: int = 128,
) -> dict[str, LayerDemand]:
    """The energy of each layer's gradient G, (d_out, d_in), and its parts along modes and occupied directions.

    `stats` has S, (d_in, d_in); at most `support_rank` eigenvectors of S are called occupied.

    Reference:
        Appendix "Gradient-space alignment", rho_S and rho_R, and figures "gradient-space diagnostics" and "Motivating
        observations" (a).

    >>> gradient, history = {"layer": torch.diag(torch.tensor([3.0, 0.0, 4.0]))}, torch.diag(torch.tensor([9.0, 1, 0]))
    >>> demand = layer_demands(gradient, {"layer": history}, 1, 1, support_rank=1)["layer"]
    >>> demand.energy, round(demand.occupied, 2), round(demand.chance, 2), round(demand.residual, 2)
    (25.0, 0.36, 0.33, 0.64)
    """
    supports, modes = supports_and_modes(gradients, stats, shared_rank, residual_rank, support_rank)
    found = {}
    for name, gradient in gradients.items():
        matrix, plan = gradient.double(), modes[name]
        energy = float(matrix.square().sum())
        occupied = chance = None
        if name in supports:
            support = supports[name].double()
            occupied = min(1.0, float((matrix @ support).square().sum()) / energy) if energy else 0.0
            chance = support.shape[1] / support.shape[0]
        found[name] = LayerDemand(energy, plan.shared_capture, plan.residual_capture, occupied, chance)
    return found


@dataclass(frozen=True)
class DepthAccuracy:
    """Shares of images that are named right at every bridge depth, and by all depths together.

    `alone`, (K,), is of the classifier that has one of the `depths`, (K,), from 0, the images, to 1, the text;
    `classes`, (C, K), is the same for the images of each class, NaN for one without images. `uniform` is of the mean
    over the depths, `weighted` of the head itself, which weighs them by their reliability.
    """

    depths: torch.Tensor
    alone: torch.Tensor
    classes: torch.Tensor
    uniform: float
    weighted: float


@torch.no_grad()
def depth_accuracy(head: BridgeEnsembleHead, features: torch.Tensor, labels: torch.Tensor) -> DepthAccuracy:
    """Accuracy of images, (n, d), with labels, (n,), at each of the head's depths.

    Reference:
        Table "Ablation of the bridge-prototype ensemble"; figures "accuracy across bridge depths" and "Effect of
        fixed bridge depth".
    """
    labels, features = labels.long().to(head.device), features.to(head.device, torch.float32)
    bridges = head.bridge_prototypes()  # (C, K, d)
    answers = (features @ bridges.permute(1, 2, 0)).argmax(dim=2)
    right = labels[:, None] == answers.T
    classes = [right[labels == index].double().mean(dim=0) for index in range(len(head.class_names))]
    return DepthAccuracy(
        depths=head.depths.float().cpu(),
        alone=right.double().mean(dim=0).cpu(),
        classes=torch.stack(classes).cpu(),
        uniform=float(((features @ bridges.mean(dim=1).T).argmax(dim=1) == labels).double().mean()),
        weighted=float((head(features).argmax(dim=1) == labels).double().mean()),
    )


@dataclass(frozen=True)
class ReliabilityProfile:
    """Mean and spread of pi_c over the classes at every depth, (K_b,), and each class's expected depth, (C,)."""

    depths: torch.Tensor
    mean: torch.Tensor
    spread: torch.Tensor
    expected: torch.Tensor


@torch.no_grad()
def reliability_profile(head: BridgeEnsembleHead) -> ReliabilityProfile:
    """The reliability of every depth over the classes: figure "Effect of the reliability temperature" (a)."""
    weights, expected = head.reliability.double().cpu(), head.expected_depth().double().cpu()
    spread = weights.std(dim=0, correction=0)
    return ReliabilityProfile(head.depths.double().cpu(), weights.mean(dim=0), spread, expected)


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
    from scipy.stats import rankdata

    first, second = (torch.from_numpy(rankdata(matrix.double().cpu().numpy(), axis=1)) for matrix in (before, after))
    first, second = (ranks - ranks.mean(dim=1, keepdim=True) for ranks in (first, second))
    return (first * second).sum(dim=1) / (first.norm(dim=1) * second.norm(dim=1))


@dataclass(frozen=True)
class TaskDrift:
    """How one task moved features. Each figure is None where the run did not keep what it needs.

    `own` is the mean cosine of the task's training images with themselves before the task, `old` that of the test
    images of all earlier tasks. `coordinates` is their mean |Delta s|, by the text embeddings of task 1 from before
    this task. `ranks` is the mean `rank_similarity` of all earlier classes, whose prototypes are means of test
    features. `means` is the mean cosine of these means with themselves before the task, `mapped` with what the linear
    map makes of those from before: where it is larger, the map follows the drift. `foretold` is the mean cosine of the
    earlier classes' prototypes, of the time when they were new, with what the map makes of them.
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
    prototypes = [_class_means(task.closing.features, task.closing.labels) for task in tasks]
    for number, (earlier, task) in enumerate(itertools.pairwise(tasks), 2):
        closing = task.closing
        figures: dict[str, float] = {}
        moved = None
        if closing.before is not None:
            figures["own"] = float(cosines(closing.before, closing.features).mean())
            moved = linear_map(closing.before, closing.features)
            stored = torch.cat(prototypes[: number - 1])
            figures["foretold"] = float(cosines(stored, stored @ moved).mean())
        old = old_test_features(earlier, task)
        if old is not None:
            before, after, truth = old
            were, are = _class_means(before, truth), _class_means(after, truth)
            figures |= {"old": float(cosines(before, after).mean()), "means": float(cosines(were, are).mean())}
            if moved is not None:
                figures["mapped"] = float(cosines(are, were @ moved).mean())
            if earlier.closing.texts is not None:
                texts, first = earlier.closing.texts.double(), len(tasks[0].closing.class_names)
                figures["coordinates"] = float(coordinate_drift(before, after, texts[:first]).mean())
                kept = rank_similarity(were @ texts.T, are @ texts.T).nanmean()
                if not kept.isnan():  # as with a single name
                    figures["ranks"] = float(kept)
        rows.append(TaskDrift(number, **figures))
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


def _class_means(features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Unit mean features of the classes that have images, in the order of their labels, (classes, d), float64."""
    means = [features[labels == label].double().mean(dim=0) for label in labels.unique()]
    return F.normalize(torch.stack(means), dim=1)
