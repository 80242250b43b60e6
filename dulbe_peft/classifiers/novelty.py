"""How unlike all that was learned an image is: three signs of it, with weights from images that were left out.

    novelty = w_1 evidence - w_2 log(p / (1 - p)) - w_3 tau max over c of z'e_c

The evidence, `classifiers.evidence`, is what means, counts, scatter and texts say; p is the largest probability; the
last sign is the image's nearest text, where every class has one. No sign is the best everywhere: texts that name the
classes well know what is none of them, and where they do not, or classes are few, images know it better.

The weights are Fisher's: least squares of -1 for images of each task as if they had not been learned, and of 1 for
the same ones as if their classes had not been, with w >= 0. The sums are exact, so both are learned anew, a tenth of
the images or of the classes left out at a time. Images of one class are alike, so all of a class count for one. So
does the prior, by which few classes leave the weights equal in units of a standard deviation.

Reference:
    Hendrycks and Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural Networks",
    2017 (largest probability); Ming et al., "Delving into Out-of-Distribution Detection with Vision-Language
    Representations", NeurIPS 2022 (the nearest text of CLIP).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dulbe_peft.classifiers.calibration import (
    FADING,
    KEPT,
    TaskNovelty,
    class_shares,
    evenly,
    order_statistic,
    ranking,
)
from dulbe_peft.classifiers.evidence import Evidence, Sums
from dulbe_peft.classifiers.state import GrowingState

NEEDED = {"sums", "counts", "scatter", "freedom"}  # buffers, as of `ClassSums`
MOST_JUDGED = 1000  # images of a task that are left out
PARTS = 10  # in so many are images, and classes, left out
SURE = 6.0  # of a log-odds, either way: hardly any task has images enough to say more
# Of a sign that tells known from unknown by half a standard deviation; what is assumed of the evidence where no class
# has two images.
USUAL = 0.25
SIGNS = ("known", "unknown", "products")


def sums_of(classifier: GrowingState) -> Sums | None:
    """Return what the evidence needs; None: the classifier does not keep it, or has learned nothing."""
    kept, width = classifier.tensors(), classifier.embed_dim
    if not kept.keys() >= NEEDED or not classifier.class_names:
        return None

    def make() -> Sums:
        counts, scatter = kept["counts"].to(kept["sums"]), kept["scatter"][:width, :width]
        means = (kept["sums"] / counts[:, None])[:, :width]
        texts = kept.get("text_embeds")
        if texts is not None:
            texts = classifier.logit_scale * texts.to(means) if bool(texts.any(dim=1).all()) else None
        return Sums(means, counts, scatter, int(kept["freedom"]), texts)

    found: Sums = classifier.derived("sums of novelty", make)
    return found


def novelty(classifier: GrowingState, images: Tensor, scores: Tensor) -> Tensor:
    """The novelty of unit features, (n, d) to (n,), float64, with their calibrated logits, (n, C)."""
    sums = sums_of(classifier)
    assert sums is not None
    evidence: Evidence = classifier.derived("evidence", lambda: Evidence(sums))
    found = signs(evidence(images), scores.to(sums.means), by_text(images, sums))
    return found @ weights_of(classifier.novelty_tasks).to(found)


def by_text(images: Tensor, sums: Sums) -> Tensor | None:
    """tau z'e_c, (n, C)."""
    return None if sums.texts is None else images.to(sums.texts) @ sums.texts.T


def signs(evidence: Tensor, scores: Tensor, texts: Tensor | None) -> Tensor:
    """The three signs, (n, 3), from evidence (n,), calibrated logits (n, C) and the classes' texts (n, C)."""
    largest = scores.log_softmax(dim=1).amax(dim=1).exp()
    odds = torch.logit(largest, eps=1e-12).clamp(-SURE, SURE)
    nearest = torch.zeros_like(evidence) if texts is None else texts.amax(dim=1)
    return torch.stack([evidence, -odds, -nearest], dim=1)


def weights_of(tasks: Sequence[TaskNovelty]) -> Tensor:
    """The weights of the signs, (3,), float64, the newest tasks counting most; without any, evidence alone.

    With z the signs less their means, in units of their standard deviations, they have the least sum over classes of
    (t - w'z)^2, t = -1 or 1, plus the squared distance from `USUAL`.
    """
    if not tasks:
        return torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    fades = np.array([FADING**age * task.classes for age, task in enumerate(tasks[::-1])][::-1])
    each = [np.average([getattr(task, name) for task in tasks], axis=0, weights=fades) for name in SIGNS]
    known, unknown, products = (torch.from_numpy(part) for part in each)
    products, number = products.reshape(3, 3), float(fades.sum())
    used, found = products.diagonal() > 1e-18, torch.zeros(3, dtype=torch.float64)
    spread = products.diagonal().sqrt().clamp_min(1)  # in nats: less than one is no difference
    while used.any():
        scale = spread[used]
        alike = number * products[used][:, used] / torch.outer(scale, scale)
        target = number * (unknown - known)[used] / 2 / scale + USUAL
        solved = torch.linalg.solve(alike + torch.eye(len(scale)).to(alike), target)
        if (solved >= 0).all():
            found[used] = solved / scale
            break
        used[used.nonzero()[solved < 0, 0]] = False
    return found


def judged(
    classifier: GrowingState,
    images: Tensor,
    labels: Tensor,
    left_out: Callable[[Tensor, Tensor], Tensor | None],
    temperature: float,
) -> tuple[TaskNovelty, ...]:
    """Return the tasks' records with one more, from the (n, d) learned images of a task; as before where none can be.

    `labels` index all classes; `left_out` and `temperature` are the classifier's. Where no class has two images, only
    classes can be left out: then evidence and nearest text have weights, and nothing is said of how novel known images
    are.
    """
    sums, before = sums_of(classifier), classifier.novelty_tasks
    if sums is None or len(sums.counts) < 2:
        return before
    images, labels = images.to(sums.means), labels.to(sums.means.device)
    several = sums.counts[labels] > 1
    rows = (several if several.any() else ~several).nonzero()[:, 0]
    rows = rows[ranking(images[rows]).argsort()][:: -(-len(rows) // MOST_JUDGED)]
    chosen, own = images[rows], labels[rows]
    parts = parted(own, len(sums.counts))
    try:
        unknown = classes_out(sums, images, labels, chosen, own, parts)
        known = images_out(sums, chosen, own) if several.any() else None
    except torch.linalg.LinAlgError:  # views, or a map of old features: the images are not exactly in the sums
        return before
    texts, shares = by_text(chosen, sums), class_shares(own, labels)
    scores = None if known is None else left_out(chosen, own)
    scores = torch.zeros(len(own), len(sums.counts)).to(unknown) if scores is None else scores.to(unknown)
    # Without its class an image has fewer classes to be near to: as many others go where its class stays.
    place = parts[own][:, None]
    here, number = parts == place, int(parts.max()) + 1
    other = parts == (place + 1) % number if number > 1 else here.roll(1, dims=1)
    if known is None:
        known = unknown - unknown.std(correction=0) / 2
    both = [
        signs(
            evidence, without(scores / classifier.temperature, gone), None if texts is None else without(texts, gone)
        )
        for evidence, gone in ((known, other), (unknown, here))
    ]
    means, weights = [shares @ found / shares.sum() for found in both], torch.cat([shares, shares])[:, None]
    away = torch.cat(both) - sum(means) / 2
    products = (weights * away).T @ away / weights.sum()
    said = {name: tuple(part.flatten().tolist()) for name, part in zip(SIGNS, (*means, products), strict=True)}
    task = TaskNovelty(images=len(rows), classes=len(own.unique()), **said)  # type: ignore[arg-type]
    if several.any():
        weights = weights_of((*before, task)).to(unknown)
        found, others = (evenly(each @ weights, shares) for each in both)
        area = (others[:, None] > found).double().mean() + (others[:, None] == found).double().mean() / 2
        task = task.model_copy(update={"novelties": tuple(found.tolist()), "area": float(area)})
    return (*before, task)[-KEPT:]


def without(scores: Tensor, gone: Tensor) -> Tensor:
    """Scores, (n, C), without those of some classes, unless all of an image's would go."""
    return scores.where(~gone | gone.all(dim=1, keepdim=True), torch.tensor(-torch.inf).to(scores))


def parted(labels: Tensor, number: int) -> Tensor:
    """In which of at most `PARTS` parts each class is left out, (C,); -1: it is not."""
    classes = labels.unique()
    parts = torch.full((number,), -1).to(labels)
    parts[classes] = torch.arange(len(classes)).to(labels) % min(PARTS, len(classes))
    return parts


def classes_out(sums: Sums, images: Tensor, labels: Tensor, rows: Tensor, own: Tensor, parts: Tensor) -> Tensor:
    """The evidence of (n, d) `rows` where the classes of their part were not learned, which all `images` are of."""
    found = torch.zeros(len(rows)).to(rows)
    for part in range(int(parts.max()) + 1):
        classes = (parts == part).nonzero()[:, 0]
        of_part, here = torch.isin(labels, classes), torch.isin(own, classes)
        found[here] = Evidence(sums.without(images[of_part], labels[of_part], classes))(rows[here])
    return found


def images_out(sums: Sums, rows: Tensor, own: Tensor) -> Tensor:
    """The evidence of (n, d) learned `rows` where a tenth of them was not learned; of no class all images go."""
    found, order = torch.zeros(len(rows)).to(rows), own.argsort(stable=True)
    for part in range(min(PARTS, len(rows))):
        here = order[part :: min(PARTS, len(rows))]
        found[here] = Evidence(sums.without(rows[here], own[here]))(rows[here])
    return found


def novelty_threshold(tasks: Sequence[TaskNovelty], share: float) -> float:
    """The novelty above which a further image is with at most this chance; as `calibration.threshold`."""
    return -order_statistic([-np.asarray(task.novelties) for task in tasks[::-1]], share)


def roc_area(tasks: Sequence[TaskNovelty]) -> float | None:
    """The mean of what tasks measured, the newest weighing most; None where none did."""
    found = [(FADING**age * task.images, task.area) for age, task in enumerate(tasks[::-1]) if task.area is not None]
    return float(np.average([area for _, area in found], weights=[weight for weight, _ in found])) if found else None
