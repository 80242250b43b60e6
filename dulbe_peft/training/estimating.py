"""How many images a learner classifies correctly, without test images: by training images that are left out.

A classifier that keeps exact sums is fitted anew without a tenth of the images at a time; what was chosen by left-out
images, as kappa and rho of `bayes`, stays. Others use their closed form, if they have one.

An image that is left out leaves its class n - 1 images, whose mean m' is further away than that of n: x - m' has
covariance (1 + 1 / (n - 1)) S, and of a test image (1 + 1 / n) S. So its class gets

    x - r (x - m') as the mean of n images        r^2 = (1 + 1 / n) / (1 + 1 / (n - 1))

A tenth that holds several images of a class leaves it ten or more, where r is 1 for all that matters.
"""

import math
from collections import Counter
from collections.abc import Mapping
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.class_sums import ClassSums
from dulbe_peft.classifiers.evidence import Sums
from dulbe_peft.encoders.encoder import Encoder
from dulbe_peft.training.state import Estimates, LearnerState

MOST_LEFT_OUT = 1000  # images
PARTS = 10  # in so many they are left out
NORMAL = 1.959964  # of a 95 % interval


def estimates_of(state: LearnerState, encoder: Encoder, fresh: Mapping[bytes, Tensor]) -> Estimates:
    """What every classifier of a state names right of learned images, each as if it had not been learned.

    `fresh` are the features of the newest images by content; the feature store has those of earlier ones, or nothing
    is said of their classes. Where the model was trained on the images, or saw several views, it would be too much.
    """
    now = Estimates(tasks=len(state.tasks), updates=len(state.updates))
    if state.trained or any(views > 1 for _, views in state.known.ways):
        return now
    learned, place = state.known.learned, {name: row for row, name in enumerate(state.class_names)}
    times = Counter(chain.from_iterable(learned.values()))
    share, owner = max(1, MOST_LEFT_OUT // max(1, len(learned))), dict[bytes, int]()
    for name, contents in learned.items():
        once = sorted(content for content in contents if times[content] == 1)[:share]
        owner |= dict.fromkeys(once if len(contents) > 1 and name in place else (), place.get(name, -1))
    features = {content: row for content, row in fresh.items() if content in owner}
    stored = encoder.stored([content for content in owner if content not in features])
    features |= {content: torch.from_numpy(np.array(row)).to(encoder.device) for content, row in stored.items()}
    if not features or len(place) < 2:
        return now
    rows = torch.stack(list(features.values())).float()
    labels = torch.tensor([owner[content] for content in features], device=rows.device)
    shares = {name: left_out_share(classifier, rows, labels) for name, classifier in state.classifiers.items()}
    classes = tuple(state.class_names[label] for label in labels.unique().tolist())
    known = {name: share for name, share in shares.items() if share is not None}
    return now.model_copy(update={"images": len(rows), "classes": classes, "shares": known})


@torch.no_grad()
def left_out_share(classifier: Classifier, images: Tensor, labels: Tensor) -> tuple[float, float, float] | None:
    """Return the accuracy on learned images that are left out, each class alike, and its 95 % interval.

    Args:
        classifier: what learned the images.
        images: (n, d), unit features of learned images. Copies of one image are no further images: leave them away.
        labels: (n,), the place of each image's class in `classifier.class_names`; each class has learned two images.

    Returns:
        The accuracy and Wilson's interval for as many images as the unequal classes are worth, 0 to 1. None: the
        classifier cannot leave an image out.
    """
    if isinstance(classifier, ClassSums):
        scores: Tensor | None = refitted(classifier, images, labels)
    else:
        scores = classifier.left_out(images, labels)
    if scores is None:
        return None
    right = (scores.argmax(dim=1) == labels.to(scores.device)).double()
    labels, counts = labels.unique(return_inverse=True, return_counts=True)[1:]
    shares = torch.zeros(len(counts)).to(right).index_add(0, labels.to(right.device), right) / counts.to(right)
    p, n = float(shares.mean()), len(counts) ** 2 / float((1 / counts).sum())
    z = NORMAL**2 / n
    middle, half = (p + z / 2) / (1 + z), math.sqrt(z * p * (1 - p) + z * z / 4) / (1 + z)
    return p, max(0.0, middle - half), min(1.0, middle + half)


def refitted(classifier: ClassSums, images: Tensor, labels: Tensor) -> Tensor:
    """The scores, (n, C), of learned images, (n, d), by classifiers that have not learned them."""
    rows, labels = classifier.lifted(images.to(classifier.sums)), labels.to(classifier.sums.device)
    counts = classifier.counts.to(rows)
    sums = Sums(classifier.sums / counts[:, None], counts, classifier.scatter, int(classifier.freedom))
    found, order = torch.zeros(len(rows), len(counts)), labels.argsort(stable=True)
    for part in range(min(PARTS, len(rows))):
        here = order[part :: min(PARTS, len(rows))]
        left = sums.without(rows[here], labels[here])
        means, numbers = left.means.clone(), left.counts.clone()
        alone = labels[here].bincount(minlength=len(counts))[labels[here]] == 1
        one, own = rows[here][alone], labels[here][alone]
        n = counts[own]
        ratio = ((1 + 1 / n) / (1 + 1 / (n - 1))).sqrt()[:, None]
        means[own], numbers[own] = one - ratio * (one - means[own]), n
        fork, freedom = classifier.fork(), torch.full_like(classifier.freedom, left.freedom)
        changes = {"sums": means * numbers[:, None], "counts": numbers.to(classifier.counts)}
        fork.install(changes | {"scatter": left.scatter, "freedom": freedom})
        found[here.cpu()] = fork.logits(images[here].float().to(classifier.device)).cpu().float()
    return found
