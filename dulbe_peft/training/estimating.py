"""Estimate the accuracy of a learner without test images, from left-out training images.

A classifier that keeps exact sums is fitted again without a tenth of the images, ten times. Settings that were chosen
on left-out images, such as kappa and rho of `bayes`, stay the same. Other classifiers use their closed form, if any.

If an image is left out, its class has only n - 1 images, so the image is classified correctly less often than a test
image. The mean m' of n - 1 images of a Gaussian class is further from the image x than a mean of n images is from a
test image: x - m' has the covariance (1 + 1 / (n - 1)) S, instead of (1 + 1 / n) S. With

    x - r (x - m') as the mean of n images        r^2 = (1 + 1 / n) / (1 + 1 / (n - 1))

the distance is that from a mean of n images. But this mean depends on the image itself, which helps outliers, so the
image is classified correctly more often than a test image. The true accuracy is expected between the two, and the
estimate is their midpoint. The interval reaches from the lower end of the first interval to the upper end of the
second. If a part contains several images of a class, the class keeps nine or more. Then r is nearly 1, and no
correction is made.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dulbe_peft.classifiers import confusion
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.bayes import BayesClassifier
from dulbe_peft.classifiers.class_sums import ClassSums
from dulbe_peft.classifiers.evidence import Sums
from dulbe_peft.classifiers.groups import (
    ENOUGH,
    MANY_ALIKE,
    check_groups,
    few_items,
    groups_of_classes,
    share_alike,
    sums_of_groups,
    together,
)
from dulbe_peft.classifiers.leaving import by_content, in_parts
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.training.state import LEAST_WRONG, Estimates, LearnerState

Shares = tuple[float, float, float]  # a share and the ends of its interval
PARTS = 10  # parts into which images are divided to be left out
NORMAL = 1.959963984540054  # the normal quantile for a 95 % interval


class Scores(NamedTuple):
    """Two sets of scores of left-out images, (n, C), see `refitted`; the images' labels and groups, (n,)."""

    fewer: Tensor
    as_many: Tensor
    labels: Tensor
    groups: Tensor | None


def estimates_of(state: LearnerState, encoder: Encoder, fresh: Mapping[bytes, Tensor]) -> Estimates:
    """Estimate the accuracy of every classifier of a state on learned images, as if each had not been learned.

    `fresh` are the features of the newest images by content. Features of earlier images come from the feature store;
    classes without stored features are not part of the estimate. If the model was trained on the images or learned
    several views of them, there is no estimate, because it would be too optimistic.
    """
    now = Estimates(tasks=len(state.tasks), updates=len(state.updates))
    if bayes := next((each for each in state.classifiers.values() if isinstance(each, BayesClassifier)), None):
        now = now.model_copy(update={"misnamed": tuple(bayes.misnamed), "exchanged": tuple(bayes.exchanged)})
    if state.trained or any(views > 1 for _, views in state.known.ways):
        return now
    known, place = state.known, {name: row for row, name in enumerate(state.class_names)}
    group_of, owner = known.groups, _rows_of(by_content(known.learned, known.groups), place)
    features = {content: row for content, row in fresh.items() if content in owner}
    stored = encoder.stored([content for content in owner if content not in features])
    features |= {content: torch.from_numpy(np.array(row)).to(encoder.device) for content, row in stored.items()}
    alike = not group_of and many_alike(fresh or features, _rows_of(known.class_of(), place))
    now = now.model_copy(update={"alike": alike})
    if not features or len(place) < 2:
        return now
    rows = torch.stack(list(features.values())).float()
    labels = torch.tensor([owner[content] for content in features], device=rows.device)
    groups = None
    if group_of:
        own = {content: group_of.get(content, -1 - number) for number, content in enumerate(features)}
        groups = check_groups([own[content] for content in features], len(rows))
    counts = torch.tensor([len(known.learned.get(name, ())) for name in place])
    several = counts.to(labels)[labels] > together(labels, groups)
    rows, labels, groups = rows[several], labels[several], None if groups is None else groups.to(labels)[several]
    if not len(rows):
        return now
    left = {name: scores_left_out(each, rows, labels, groups) for name, each in state.classifiers.items()}
    classes = tuple(state.class_names[label] for label in labels.unique().tolist())
    shares = {name: share_of(scores) for name, scores in left.items() if scores is not None}
    if (wrong := surely_wrong(state.classifiers.values())) is not None:
        shares = {name: corrected(share, wrong, len(place)) for name, share in shares.items()}
    few = few_items(labels, groups)
    items = 0 if groups is None else len(groups.unique())
    facts = {"images": len(rows), "items": items, "few_items": few, "wrong": wrong}
    facts["doubted"] = None if few else doubted(state.classifiers, left)
    return now.model_copy(update=facts | {"classes": classes, "shares": shares})


def doubted(classifiers: Mapping[str, Classifier], left: Mapping[str, Scores | None]) -> Shares | None:
    """Return the share of wrong labels and its interval by `confusion.wrong_labels`, of items if there are groups.

    Only `bayes` is asked. `left` are the scores of all classifiers. None if those of `bayes` are of fewer than two
    classes.
    """
    name = next((name for name, each in classifiers.items() if isinstance(each, BayesClassifier)), None)
    scores = None if name is None else left[name]
    if name is None or scores is None:
        return None
    own, labels = scores.labels.cpu().unique(return_inverse=True)  # other classes have no label that could be wrong
    if len(own) < 2:
        return None
    found = (scores.fewer.cpu()[:, own].double() / classifiers[name].temperature).softmax(dim=1)
    if scores.groups is not None:
        found, labels = confusion.by_item(found, labels, scores.groups.cpu())
    return confusion.wrong_labels(found, labels).shares


def surely_wrong(classifiers: Iterable[Classifier]) -> tuple[float, float, float] | None:
    """Return the share of wrong labels with its interval, or None if it may be less than `LEAST_WRONG`.

    Only `bayes` is asked. The errors of `lda` are more extreme than one temperature describes: on textures with right
    labels, it found 2 to 12 % wrong ones in four draws of four, with intervals above 0.9 %, and `bayes` 0 to 3 %.
    """
    wrong = next((each.wrong_labels for each in classifiers if isinstance(each, BayesClassifier)), None)
    return wrong if wrong is not None and wrong[1] >= LEAST_WRONG else None


def corrected(
    share: tuple[float, float, float], wrong: tuple[float, float, float], classes: int
) -> tuple[float, float, float]:
    """Return the accuracy and its interval from the agreement with labels, of which a share w is wrong.

    A right answer agrees with a right label, and a wrong answer with a wrong label one in C - 1 times, so that

        agreement = (1 - w) accuracy + w (1 - accuracy) / (C - 1)

    The lower end is that of the agreement for the smallest w, and the upper end that for the largest.
    """

    def accuracy(agreement: float, w: float) -> float:
        return min(1.0, max(0.0, (agreement - w / (classes - 1)) / max(1e-9, 1 - w * classes / (classes - 1))))

    middle, low, high = (accuracy(agreement, w) for agreement, w in zip(share, wrong, strict=True))
    return middle, min(low, middle), max(high, middle)


def _rows_of(class_of: Mapping[bytes, str], place: Mapping[str, int]) -> dict[bytes, int]:
    return {content: place[name] for content, name in class_of.items() if name in place}


def many_alike(features: Mapping[bytes, Tensor], owner: Mapping[bytes, int]) -> bool:
    """Return whether many images look like one another, see `groups.share_alike`."""
    known = [content for content in features if content in owner]
    if len(known) < ENOUGH:
        return False
    rows = torch.stack([features[content] for content in known]).float()
    return share_alike(rows, torch.tensor([owner[content] for content in known], device=rows.device)) > MANY_ALIKE


def left_out_share(
    classifier: Classifier, images: Tensor, labels: Tensor, groups: Tensor | None = None
) -> Shares | None:
    """Return `share_of` the `scores_left_out`, or None if the classifier cannot leave an image out."""
    left = scores_left_out(classifier, images, labels, groups)
    return None if left is None else share_of(left)


@torch.no_grad()
def scores_left_out(
    classifier: Classifier, images: Tensor, labels: Tensor, groups: Tensor | None = None
) -> Scores | None:
    """Return the scores of learned images by the classifier as if it had not learned them, if it can leave them out.

    Args:
        classifier: The classifier that learned the images.
        images: (n, d), unit features of learned images, without copies of an image.
        labels: (n,), the index of each image's class in `classifier.class_names`; each class must have learned at
            least two images, or an image outside of each group.
        groups: (n,), the groups of the images, which are left out together, or None. All of each group is given.
    """
    if isinstance(classifier.rule, ClassSums):
        fewer, as_many = refitted(classifier, images, labels, groups)
        kept = ~fewer.isnan().any(dim=1)
        groups = None if groups is None else groups[kept.to(groups.device)]
        return Scores(fewer[kept], as_many[kept], labels[kept.to(labels.device)], groups)
    if (closed := classifier.left_out(images, labels, groups)) is not None:
        return Scores(closed, closed, labels, groups)
    return None


def share_of(scores: Scores) -> Shares:
    """Return the accuracy on left-out images, with equal weights for all classes, and its 95 % interval, from 0 to 1.

    The ends are the outer ones of the two Wilson intervals, for the effective number of images in classes of unequal
    size.
    """
    labels, groups = scores.labels, scores.groups
    places, counts = labels.unique(return_inverse=True, return_counts=True)[1:]
    number = counts if groups is None else groups_of_classes(places, groups, len(counts))
    worth, bounds = len(counts) ** 2 / float((1 / number).sum()), []
    for each in (scores.fewer, scores.as_many):
        right = (each.argmax(dim=1) == labels.to(each.device)).double()
        shares = torch.zeros(len(counts)).to(right).index_add(0, places.to(right.device), right) / counts.to(right)
        bounds.append(wilson(float(shares.mean()), worth))
    (fewer, low, _), (more, _, high) = sorted(bounds)
    return (fewer + more) / 2, low, high


def wilson(share: float, number: float) -> tuple[float, float, float]:
    """Return a share of `number` images and the ends of its 95 % interval."""
    z = NORMAL**2 / number
    middle = (share + z / 2) / (1 + z)
    half = math.sqrt(z * share * (1 - share) + z * z / 4) / (1 + z)
    return share, middle - half if share > 0 else 0.0, middle + half if share < 1 else 1.0


def refitted(
    classifier: Classifier, images: Tensor, labels: Tensor, groups: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return two sets of scores, (n, C), of learned images, (n, d), by classifiers that have not learned them.

    For the first scores, the image is missing from its class. For the second, the mean of its class is also moved to
    the distance of a mean of n images. With groups, n is the number of groups of the class. If a class has no image
    outside of the parts in which its groups are, its images have NaN.
    """
    state = classifier.state
    rows, labels = classifier.rule.lifted(state, images.to(state.sums)), labels.to(state.sums.device)
    counts = state.counts.to(rows)
    sums = Sums(state.sums / counts[:, None], counts, state.scatter, int(state.freedom))
    parts = in_parts(labels, groups, min(PARTS, len(rows)), state.counts)
    groups = groups if groups is None else groups.to(labels)
    size, total = together(labels, groups).to(rows), sums_of_groups(rows, labels, groups)
    several = groups_of_classes(labels, groups, len(counts)).to(rows) * counts / labels.bincount(minlength=len(counts))
    fewer = torch.full((len(rows), len(counts)), torch.nan)
    as_many = fewer.clone()
    for part in range(min(PARTS, len(rows))):
        here = (parts == part).nonzero()[:, 0]
        if not len(here):
            continue
        left, places = sums.without(rows[here], labels[here]), here.cpu()
        without = state.replaced(
            changed(left) | {"scatter": left.scatter, "freedom": torch.full_like(state.freedom, left.freedom)}
        )
        fitted, tested = classifier.rule.fitted(state).after(without), images[here].float().to(state.device)
        fewer[places] = as_many[places] = classifier.rule.scores(without, tested).cpu().float()
        alone = labels[here].bincount(minlength=len(counts))[labels[here]] == size[here]
        if alone.any():
            own = labels[here][alone]
            one, n = (total[here] / size[here, None])[alone], several[own].clamp_min(2)
            means, numbers = left.means.clone(), left.counts.clone()
            ratio = ((1 + 1 / n) / (1 + 1 / (n - 1))).sqrt()[:, None]
            means[own], numbers[own] = one - ratio * (one - means[own]), counts[own]
            moved = without.replaced(changed(replace(left, means=means, counts=numbers)))
            fitted.beside(moved)
            as_many[places] = classifier.rule.scores(moved, tested).cpu().float()
    return fewer, as_many


def changed(sums: Sums) -> dict[str, Tensor]:
    """Return the sums and numbers of images of each class as the tensors of a `ClassSums` by name."""
    return {"sums": sums.means * sums.counts[:, None], "counts": sums.counts}
