"""Which labels are wrong, if wrong labels go to classes that look like the right one.

    p(y | x) = (1 - w) q_y + w sum over k of q_k M_ky                 q = softmax(log p / T)

w is the share of wrong labels, p, (C,), are the probabilities of an image that was left out, and M_ky is how often a
wrong label of an image of class k is y. People confuse the classes that a model confuses too, so M follows p:

    M_ky = (1 - u) J_ky / sum over c != k of J_kc + u / (C - 1)       J_ky = sum of p_k over the images labelled y

with u = `ANY`, and without the image itself: otherwise, with few images, each image that looks like another class
would be evidence that its class is confused with that class, and 17 % of right labels of textures looked wrong. w and
T maximise the likelihood of the labels. T is part of it, because wrong labels made the temperature of p too large. As
elsewhere, log T has a normal prior, w the prior 1 - w, and w > 0 costs log(n) / 2.

If each other class were equally likely, as in `calibration.log_likelihoods`, wrong labels that go to a similar class
would look like images that are hard to tell, and w would be near 0. The confident joint of Northcutt et al. finds
them, but with right labels it counts the errors of the classifier: 34 % of textures.

`research.benchmarks.doubts` counts wrong labels beside those that are said. On five sets with a tenth of the labels
wrong, 3 to 10 are expected among the first ten doubtful ones where 5 to 10 are (means of two draws). Single draws can
be far off: on clothes, 10 and 0 are expected where 5 and 6 are. The image itself was left out of J after the model had
failed on textures and photographs.

A classifier that is too sure of some confusions looks as if labels were wrong. So the lower end of the interval is
lowered by `SURE` times the share of the images that look like another class.

Reference:
    Northcutt et al., "Confident Learning: Estimating Uncertainty in Dataset Labels", JAIR 2021.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from dulbe_peft.classifiers.calibration import WRONG, interval_of_wrong, penalties

ANY = 0.1  # u, the share of the wrong labels that can be any class
# Chosen on textures, flowers and clothes with 8 images a class. Without it, 6 of 15 intervals contain the right share,
# and with it, 13.
SURE = 0.1
TEMPERATURES = tuple(2.0 ** (half / 2) for half in range(-14, 3))


class WrongLabels(NamedTuple):
    """w and the ends of its 95 % interval, the best T for each of the three, and J, (C, C) in float64."""

    shares: tuple[float, float, float]
    temperatures: tuple[float, float, float]
    joint: Tensor

    def of(self, probabilities: Tensor, labels: Tensor) -> Tensor:
        """Return the probability that the labels, (n,), of images with p, (n, C), are wrong, (n, 3), for each w."""
        found = []
        for share, temperature in zip(self.shares, self.temperatures, strict=True):
            own, other = sides(probabilities, labels, self.joint, temperature)
            found.append(share * other / ((1 - share) * own + share * other).clamp_min(1e-300))
        return torch.stack(found, dim=1)


def wrong_labels(probabilities: Tensor, labels: Tensor) -> WrongLabels:
    """Fit the model above to left-out probabilities, (n, C), of images with labels, (n,); in float64.

    w and its interval are those of `calibration.interval_of_wrong`, with `SURE`, but w is 0 if w > 0 explains the
    labels hardly better, by the penalty above.
    """
    classes, wrong = probabilities.shape[1], torch.tensor(WRONG, dtype=torch.float64)
    joint = torch.zeros(classes, classes, dtype=torch.float64).index_add(0, labels, probabilities.double()).T
    joint = joint.clone().fill_diagonal_(0)
    table = []
    for temperature in TEMPERATURES:
        own, other = sides(probabilities, labels, joint, temperature)
        mixed = (1 - wrong) * own[:, None] + wrong * other[:, None]
        table.append(mixed.clamp_min(1e-300).log().sum(dim=0) - math.log(temperature) ** 2 / 2)
    told = torch.stack(table)
    likelihoods = told.amax(dim=0)
    place = int((likelihoods - penalties(WRONG, len(labels))).argmax())
    share, low, high = interval_of_wrong(likelihoods.numpy())
    share = share if place else 0.0
    errors = float((probabilities.argmax(dim=1) != labels).double().mean())
    shares = share, max(0.0, min(share, low - SURE * errors)), high
    nearest = [int((wrong - each).abs().argmin()) for each in shares]
    best = [TEMPERATURES[int(told[:, column].argmax())] for column in (place, *nearest[1:])]
    return WrongLabels(shares, (best[0], best[1], best[2]), joint)


def by_item(probabilities: Tensor, labels: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Return p and the label of each item: the images of one of `groups`, (n,), with the same label.

    Its log p are the means of those of its images, because their labels are wrong together.
    """
    keys, places = torch.stack([groups, labels], dim=1).unique(dim=0, return_inverse=True)
    logs = probabilities.double().clamp_min(1e-300).log()
    sums = torch.zeros(len(keys), logs.shape[1], dtype=torch.float64).index_add(0, places, logs)
    return (sums / places.bincount()[:, None]).softmax(dim=1), keys[:, 1]


def sides(probabilities: Tensor, labels: Tensor, joint: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return q_y, and the probability of y as a wrong label, both (n,) in float64."""
    p, own = probabilities.double(), labels[:, None]
    likely, others = (p.clamp_min(1e-300).log() / temperature).softmax(dim=1), p.scatter(1, own, 0)
    to_label, whole = (joint.T[labels] - others).clamp_min(0), (joint.sum(dim=1) - others).clamp_min(1e-12)
    confused = ((1 - ANY) * to_label / whole + ANY / (len(joint) - 1)).scatter(1, own, 0)
    return likely.gather(1, own)[:, 0], (likely * confused).sum(dim=1)
