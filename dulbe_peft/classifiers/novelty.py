"""The novelty of an image: how unlike all learned classes it is, from three signs with weights from left-out images.

    novelty = w_1 evidence - w_2 log(p / (1 - p)) - w_3 tau max over c of z'e_c

The evidence of `classifiers.evidence` comes from means, counts, scatter and texts. p is the largest probability. The
last sign is the similarity of the image to its nearest text, if every class has a text. No sign is always the best:
texts that describe the classes well recognise unknown classes best, and otherwise, or with few classes, images do.

The weights are Fisher's, with w >= 0: a least-squares fit of -1 to the images of each task as if they had not been
learned, and of 1 to the same images as if their classes had not been learned. The sums are exact, so both cases are
computed from sums without a tenth of the images, or of the classes, at a time. Of a task with more than
`MOST_CLASSES`, only about so many are left out. Images of one class are similar, so all images of a class count as one
observation. A prior counts as a further observation. With few classes, the prior keeps the weights equal in units of a
standard deviation.

Reference:
    Hendrycks and Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural Networks",
    2017 (largest probability); Ming et al., "Delving into Out-of-Distribution Detection with Vision-Language
    Representations", NeurIPS 2022 (the nearest text of CLIP).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import combinations

import numpy as np
import torch
from scipy.special import stdtrit
from torch import Tensor

from dulbe_peft.classifiers.calibration import FADING, KEPT, TaskNovelty, class_shares, evenly, order_statistic
from dulbe_peft.classifiers.evidence import Evidence, Sums
from dulbe_peft.classifiers.groups import together
from dulbe_peft.classifiers.leaving import Left, choose, in_parts
from dulbe_peft.classifiers.rule import Rule
from dulbe_peft.classifiers.state import Fitted, State, once

NEEDED = {"sums", "counts", "scatter", "freedom"}  # buffers, as in `ClassSums`
PARTS = 10  # parts into which images, or classes, are divided to be left out
LEAST_PARTS = 3  # for images, if only some are judged; each part costs a decomposition
MOST_CLASSES = 300  # left-out classes per task, rounded up to whole parts
SURE = 6.0  # limit of the log-odds, either way; few tasks have enough images to support larger ones
# The prior weight: that of a sign in which known and unknown images differ by half a standard deviation. If no class
# has two images, the evidence of known images is assumed to be lower by this much.
USUAL = 0.25
Evidences = tuple[Tensor, Tensor | None]  # of left-out classes, and of left-out images
_known: ContextVar[list[tuple[list[Tensor], Evidences]] | None] = ContextVar(
    "evidence of left-out images", default=None
)
SIGNS = ("known", "unknown", "products")
Side = tuple[Tensor, Tensor, Tensor]  # novelties, weights and labels of images, (n,)


class Known(Fitted):
    """What the evidence for known classes follows from."""

    reads = ("sums", "counts", "scatter", "freedom", "text_embeds", "projection")

    @once
    def sums(self) -> Sums:
        """The sums that evidence needs."""
        state, width = self.state, self.rule.embed_dim
        counts, scatter = state.counts.to(state.sums), state.scatter[:width, :width]
        means = (state.sums / counts[:, None])[:, :width]
        texts = state.get("text_embeds")
        if texts is not None:
            texts = self.rule.logit_scale * texts.to(means) if bool(texts.any(dim=1).all()) else None
        if texts is not None and self.rule.text_dim:  # tau e'W u, which is tau e'z but for the length of W u
            texts = texts @ state.projection.to(texts)
        return Sums(means, counts, scatter, int(state.freedom), texts)

    @once
    def evidence(self) -> Evidence:
        return Evidence(self.sums)


def sums_of(rule: Rule, state: State) -> Sums | None:
    """Return the sums that evidence needs, or None if the rule does not keep them or has learned nothing."""
    return Known.of(rule, state).sums if state.keys() >= NEEDED and state.classes else None


def novelty(rule: Rule, state: State, tasks: Sequence[TaskNovelty], images: Tensor, scores: Tensor) -> Tensor:
    """Return the novelty, (n,), float64, of unit features, (n, d), with their calibrated logits, (n, C)."""
    known = Known.of(rule, state)
    values = signs(known.evidence(images), scores.to(known.sums.means), by_text(images, known.sums))
    return values @ weights_of(tasks).to(values)


def by_text(images: Tensor, sums: Sums) -> Tensor | None:
    """Return tau z'e_c, (n, C), or None if there are no texts."""
    return None if sums.texts is None else images.to(sums.texts) @ sums.texts.T


def signs(evidence: Tensor, scores: Tensor, texts: Tensor | None) -> Tensor:
    """Return the three signs, (n, 3), from evidence (n,), calibrated logits (n, C) and text scores (n, C)."""
    largest = scores.log_softmax(dim=1).amax(dim=1).exp()
    odds = torch.logit(largest, eps=1e-12).clamp(-SURE, SURE)
    nearest = torch.zeros_like(evidence) if texts is None else texts.amax(dim=1)
    return torch.stack([evidence, -odds, -nearest], dim=1)


def weights_of(tasks: Sequence[TaskNovelty]) -> Tensor:
    """Return the weights of the signs, (3,), float64; newer tasks count more, and without tasks only evidence counts.

    Let z be the signs minus their means, in units of their standard deviations. The weights w minimise the sum over
    classes of (t - w'z)^2, with t = -1 or 1, plus the squared distance of w from `USUAL`.
    """
    if not tasks:
        return torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64)
    fades = np.array([FADING**age * task.classes for age, task in enumerate(tasks[::-1])][::-1])
    each = [np.average([getattr(task, name) for task in tasks], axis=0, weights=fades) for name in SIGNS]
    known, unknown, products = (torch.from_numpy(part) for part in each)
    products, number = products.reshape(3, 3), float(fades.sum())
    usable = (products.diagonal() > 1e-18).nonzero()[:, 0].tolist()
    spread = products.diagonal().sqrt().clamp_min(1)  # in nats; a difference below one nat means nothing
    best, weights = 0.0, torch.zeros(3, dtype=torch.float64)
    # The minimum with w >= 0 is the unconstrained minimum over one of the seven subsets of the signs.
    for used in (list(each) for size in (3, 2, 1) for each in combinations(usable, size)):
        scale = spread[used]
        alike = number * products[used][:, used] / torch.outer(scale, scale)
        target = number * (unknown - known)[used] / 2 / scale + USUAL
        solved = torch.linalg.solve(alike + torch.eye(len(scale)).to(alike), target)
        if (solved >= 0).all() and (lower := float(target @ solved)) > best:
            best, weights = lower, torch.zeros_like(weights).index_put_((torch.tensor(used),), solved / scale)
    return weights


def judged(
    rule: Rule,
    state: State,
    before: tuple[TaskNovelty, ...],
    images: Tensor,
    labels: Tensor,
    temperature: float,
    groups: Tensor | None = None,
    known_scores: Left | None = None,
) -> tuple[TaskNovelty, ...]:
    """Return the records of the tasks, with one added for learned `images`, (n, d), if it can be computed.

    `before` are the records of earlier tasks, `labels` index all classes, and `temperature` is the classifier's.
    `known_scores` are left-out scores, which are used if they are those of the same images.
    Images are left out together with their group, (n,). If this is possible for no class, because no class has two
    images or groups, only classes are left out. Evidence and nearest text then get weights, and the novelties of known
    images stay empty.
    """
    sums = sums_of(rule, state)
    if sums is None or len(sums.counts) < 2:
        return before
    images, labels = images.to(sums.means), labels.to(sums.means.device)
    groups = None if groups is None else groups.to(labels)
    several = bool((sums.counts[labels] > together(labels, groups)).any())
    counts = sums.counts if several else sums.counts + len(labels)  # then any image is taken, since none is left out
    left = choose(images, labels, groups, counts)
    # If only some images are judged, fewer parts suffice to leave out at most a tenth of all images at a time.
    number = max(LEAST_PARTS, -(-PARTS * len(left.rows) // len(labels)))
    out = in_parts(left.labels, left.groups, min(number, len(left.rows)), counts)
    left, out = Left.of(left.rows[out >= 0], labels, groups), out[out >= 0]
    parts = parted(left.labels, len(sums.counts))
    classes, number = len(left.labels.unique()), int(parts.max()) + 1
    missed = parts[left.labels] < -(-MOST_CLASSES * number // classes)  # images that are judged without their class
    if not several:
        left, out, missed = Left.of(left.rows[missed], labels, groups), out[missed], missed[missed]
    chosen, own = images[left.rows], left.labels

    def evidences() -> Evidences:
        unknown = classes_out(sums, images, labels, chosen[missed], own[missed], parts)
        return unknown, images_out(sums, chosen, own, out) if several else None

    try:
        unknown, known = _shared(evidences, [*_tensors(sums), images, labels, chosen, own, out])
    except torch.linalg.LinAlgError:  # with views or mapped features, the sums do not contain these images exactly
        return before
    texts, shares, scores = by_text(chosen, sums), class_shares(own, labels), None
    if several:
        same = known_scores is not None and torch.equal(known_scores.rows, left.rows)
        scores = known_scores.scores if known_scores and same else rule.left_out(state, chosen, own, left.groups)
    # An image whose class is left out can be near to fewer classes. For a fair comparison, the same number of other
    # classes is left out when the image's own class stays.
    place = parts[own][:, None]
    here = parts == place
    other = parts == (place + 1) % number if number > 1 else here.roll(1, dims=1)
    if known is None:
        known = unknown - unknown.std(correction=0) / 2
    nothing = torch.zeros(len(own), 1).to(unknown)  # the same odds for all images, so that they get no weight
    logits = nothing if scores is None else scores.to(unknown) / temperature

    def side(rows: Tensor, evidence: Tensor, gone: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        kept = logits[rows] if scores is None else without(logits[rows], gone[rows])
        found = signs(evidence, kept, None if texts is None else without(texts[rows], gone[rows]))
        return found, shares[rows], own[rows], None if left.groups is None else left.groups[rows]

    both = [side(torch.ones_like(missed), known, other), side(missed, unknown, here)]
    return (*before, recorded(before, both, len(chosen), classes, several))[-KEPT:]


def recorded(
    before: Sequence[TaskNovelty],
    both: Sequence[tuple[Tensor, Tensor, Tensor, Tensor | None]],
    images: int,
    classes: int,
    several: bool,
) -> TaskNovelty:
    """Return the record of a task from signs, (n, 3), shares, labels and groups, (n,), of known and of unknown images.

    Without `several` images of any class, novelties and area stay unknown.
    """
    weights = [shares / shares.sum() / 2 for _, shares, *_ in both]
    means = [2 * part @ values for part, (values, *_) in zip(weights, both, strict=True)]
    away = torch.cat([values for values, *_ in both]) - sum(means) / 2
    products = (torch.cat(weights)[:, None] * away).T @ away
    fields = {name: tuple(part.flatten().tolist()) for name, part in zip(SIGNS, (*means, products), strict=True)}
    task = TaskNovelty(images=images, classes=classes, **fields)  # type: ignore[arg-type]
    if not several:
        return task
    combined = weights_of((*before, task)).to(away)
    known, unknown = ((values @ combined, shares, labels) for values, shares, labels, _ in both)
    kept = [tuple(evenly(values @ combined, shares, groups).tolist()) for values, shares, _, groups in both]
    area, between = area_by_classes(known, unknown)
    changes = {"novelties": kept[0], "unfamiliar": kept[1], "area": area, "between": between}
    return task.model_copy(update=changes)


def area_by_classes(known: Side, unknown: Side) -> tuple[float, float]:
    """Return the ROC area A from the novelties, weights and labels, (n,), of images, and how classes differ.

    A is the mean of k(u, v), 1 if u is more novel than v, 1/2 if they are equal, and 0 otherwise, over all unknown
    images u and known images v. A class c is drawn as a whole: with it, A changes by D_c / C, where

        D_c = C (sum of w_v (A_v - A) over its known images v + sum of w_u (A_u - A) over its unknown images u)

    A_v and A_u are the means of k for one image, the weights w of each side sum to 1, and C is the number of classes.
    Images and items of one class are alike, so they are no further observations.

    Returns:
        A, and the sum of D_c^2 over the classes.

    Reference:
        DeLong et al., "Comparing the Areas Under Two or More Correlated Receiver Operating Characteristic Curves",
        1988; Obuchowski, "Nonparametric Analysis of Clustered ROC Curve Data", 1997.
    """
    (seen, of_seen, labels), (new, of_new, other) = known, unknown
    of_seen, of_new = of_seen / of_seen.sum(), of_new / of_new.sum()
    wins = (new[:, None] > seen).double() + (new[:, None] == seen).double() / 2
    area = float(of_new @ wins @ of_seen)
    by_class = torch.zeros(int(labels.max()) + 1).to(wins)
    by_class.index_add_(0, labels, of_seen * (of_new @ wins - area))
    by_class.index_add_(0, other, of_new * (wins @ of_seen - area))
    return min(1.0, area), len(labels.unique()) ** 2 * float(by_class.square().sum())


@contextmanager
def sharing() -> Iterator[None]:
    """Let classifiers that learn the same images in the block share the evidence of left-out images."""
    token = _known.set([])
    try:
        yield
    finally:
        _known.reset(token)


def _tensors(sums: Sums) -> list[Tensor]:
    texts = [] if sums.texts is None else [sums.texts]
    return [sums.means, sums.counts, sums.scatter, torch.tensor(sums.freedom), *texts]


def _shared(make: Callable[[], Evidences], of: list[Tensor]) -> Evidences:
    """Return what `make` computes, once for all calls with equal tensors `of` inside a block of `sharing`."""
    known = _known.get()
    for tensors, made in known or ():
        if len(tensors) == len(of) and all(map(torch.equal, tensors, of)):
            return made
    made = make()
    if known is not None:
        known.append((of, made))
    return made


def without(scores: Tensor, gone: Tensor) -> Tensor:
    """Return scores, (n, C), that are -inf for the `gone` classes, except in rows where all classes are gone."""
    return scores.where(~gone | gone.all(dim=1, keepdim=True), torch.tensor(-torch.inf).to(scores))


def parted(labels: Tensor, number: int) -> Tensor:
    """Return the part, of at most `PARTS`, in which each class is left out, (C,); -1 for classes that stay."""
    classes = labels.unique()
    parts = torch.full((number,), -1).to(labels)
    parts[classes] = torch.arange(len(classes)).to(labels) % min(PARTS, len(classes))
    return parts


def classes_out(sums: Sums, images: Tensor, labels: Tensor, rows: Tensor, row_labels: Tensor, parts: Tensor) -> Tensor:
    """Return the evidence, (n,), of `rows`, (n, d), as if the classes of each row's part had not been learned.

    `images` and `labels` are all of the task's; `row_labels`, (n,), are the classes of `rows`.
    """
    evidence = torch.zeros(len(rows)).to(rows)
    for part in parts[row_labels].unique():
        classes = (parts == part).nonzero()[:, 0]
        of_part, here = torch.isin(labels, classes), torch.isin(row_labels, classes)
        evidence[here] = Evidence(sums.without(images[of_part], labels[of_part], classes))(rows[here])
    return evidence


def images_out(sums: Sums, rows: Tensor, row_labels: Tensor, parts: Tensor) -> Tensor:
    """Return the evidence, (n,), of learned `rows`, (n, d), each as if its part, (n,), had not been learned.

    Each class has images outside of each part.
    """
    evidence = torch.zeros(len(rows)).to(rows)
    for part in parts.unique():
        here = (parts == part).nonzero()[:, 0]
        evidence[here] = Evidence(sums.without(rows[here], row_labels[here]))(rows[here])
    return evidence


def novelty_threshold(tasks: Sequence[TaskNovelty], share: float) -> float:
    """Return the novelty that a further image of a known class exceeds with at most the probability `share`.

    It is an order statistic, as in `calibration.threshold`.
    """
    return -order_statistic([-np.asarray(task.novelties) for task in tasks[::-1]], share)


def roc_area(tasks: Sequence[TaskNovelty]) -> float | None:
    """Return the mean of the tasks' ROC areas, with larger weights for newer tasks, or None if there is none."""
    return _mean([(FADING**age * task.images, task.area) for age, task in enumerate(tasks[::-1])])


def roc_interval(tasks: Sequence[TaskNovelty]) -> tuple[float, float] | None:
    """Return the 95 % interval of `roc_area`, for classes that are drawn like the learned ones, or None if unknown.

    All classes of all tasks are assumed to differ equally: the variance s^2 of a class's D_c is estimated with the
    sum of C_t - 1 degrees of freedom, and the tasks are weighted as in `roc_area`. One further class counts, which
    novelty does not tell (1/2): otherwise, the interval has no width if novelty separates few classes perfectly.
    """
    each = [(FADING**age * task.images, task) for age, task in enumerate(tasks[::-1])]
    area, judged = roc_area(tasks), [(weight, task) for weight, task in each if task.area is not None]
    if area is None or any(task.between is None for _, task in judged):
        return None
    freedom = sum(task.classes - 1 for _, task in judged)
    if freedom < 1:
        return None
    variance = sum(task.between for _, task in judged if task.between) / freedom
    classes = sum(weight for weight, _ in judged) ** 2 / sum(weight**2 / task.classes for weight, task in judged)
    error = (variance / classes + ((area - 1 / 2) / (classes + 1)) ** 2) ** 0.5
    away = float(stdtrit(freedom, 0.975)) * error  # Student's quantile
    return max(0.0, area - away), min(1.0, area + away)


def found(tasks: Sequence[TaskNovelty], share: float) -> float | None:
    """Return the share of images of left-out classes that are above the threshold of `share`, or None if unknown.

    It is the mean of the tasks' shares, with larger weights for newer tasks.
    """
    try:
        threshold = novelty_threshold(tasks, share)
    except ValueError:  # too few images for this share
        return None
    above = [(task.images, np.asarray(task.unfamiliar) > threshold) for task in tasks[::-1]]
    return _mean([(FADING**age * n, float(part.mean()) if len(part) else None) for age, (n, part) in enumerate(above)])


def _mean(each: Sequence[tuple[float, float | None]]) -> float | None:
    """Return the mean of values with their weights, (weight, value), without those that are None."""
    known = [(weight, value) for weight, value in each if value is not None]
    return float(np.average([value for _, value in known], weights=[weight for weight, _ in known])) if known else None
