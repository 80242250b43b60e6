"""Which photographs to label next: half typical of what is not covered yet, half least sure; each with a reason.

Where a classifier expects to be wrong more often than right, the right class is seldom one of its two best: what it is
least sure of is odd rather than useful. Then the second half is drawn at random.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.novelty import sums_of
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.unlabelled import left_out, unlabelled_images
from dulbe_peft.photos.data.inventory import Found, Inventory
from dulbe_peft.utils.extras import installed
from dulbe_peft.utils.settings import check_int
from dulbe_peft.utils.terminal import counted

LOST = 0.05  # share of known images that count as novel
KNOWS = 0.5  # mean probability of the best class, which is the share that a calibrated classifier names right
MANY = 2  # times as many novel ones are not known ones alone
SAME = 1 - 1e-4  # cosine of two images from which the second one adds nothing
MOST_CLUSTERED = 20_000  # images; of more, some are clustered


@dataclass(frozen=True)
class Suggestion:
    """An image to label: its row, why, the number of its group, the class it looks like or "", and its novelty."""

    row: int
    reason: str
    group: int | None = None
    proposed: str = ""
    novelty: float | None = None


def new_photographs(learner: Any, photos: Sequence[str]) -> tuple[LabelledImages, Tensor, list[str]]:
    """The photographs that can be read and that a learner has not learned, their features, and what is left out."""
    images = unlabelled_images(photos)
    rows, twice = learner.state.known.new_rows(images)
    said = [f"left out: {counted(len(which), 'photograph')} {reason}" for reason, which in twice.items()]
    features, problems = learner.readable_embeds(images.at(rows))
    unread = [(Found("", row, images.item_name(rows[row]), ""), why) for row, why in problems.items()]
    said += Inventory({}, unread, left_out(photos)).problems()
    readable = [row for row in range(len(rows)) if row not in problems]
    if not readable:
        raise ValueError("\n".join(["no photograph is left that can be read and was not learned", *said]))
    return images.at([rows[row] for row in readable]), features[readable], said


@torch.no_grad()
def suggestions(features: Tensor, count: int, classifier: Classifier | None = None, seed: int = 0) -> list[Suggestion]:
    """At most `count` images to label, the best first, of which no two are copies; `features`, (n, d), are unit.

    Without a classifier, or with one that has learned nothing: the middles of `count` clusters, the largest first.
    Else in turn the middle of a cluster in which no learned class lies, and the image whose two best classes are
    closest, or any image where the classifier expects to be wrong more often than right. Where many images are novel,
    the clusters are theirs.

    Reference:
        Hacohen et al., "Active Learning on a Budget: Opposite Strategies Suit High and Low Budgets", 2022, for the
        typical ones; Scheffer et al., "Active Hidden Markov Models for Information Extraction", 2001, for the margin.
    """
    count = min(check_int("count", count, 1), len(features))
    every = np.arange(len(features))
    if classifier is None or not classifier.class_names:
        return _apart(features, _typical(features, every, count, seed=seed), count)
    values, places = classifier.probabilities(features).topk(min(2, len(classifier.class_names)), dim=1)
    novelty, novel = classifier.novelty(features).tolist(), _novel(classifier, features)
    margin = (values[:, 0] - values[:, -1]).cpu().numpy()
    many = novel.sum() > MANY * LOST * len(novel)
    names = [[classifier.class_names[place] for place in row] for row in places.tolist()]
    learned = None if many else sums_of(classifier)
    means = None if learned is None else F.normalize(learned.means, dim=1)
    kind = "unlike anything learned" if many else "typical"
    typical = _typical(features, every[novel] if many else every, -(-count // 2), means, kind, seed)
    turns: list[Suggestion] = []
    knows = float(values[:, 0].mean()) >= KNOWS if len(values) else True
    order = margin.argsort(kind="stable") if knows else np.random.default_rng(seed).permutation(every)
    for number, row in enumerate(order.tolist()):
        turns += typical[number : number + 1]
        shares = [f"{name} {share:.0%}" for name, share in zip(names[row], values[row].tolist(), strict=True)]
        turns.append(Suggestion(row, f"{'unsure' if knows else 'at random'}: {' or '.join(shares)}"))
        if len(turns) > 4 * count:
            break
    return [
        replace(one, proposed="" if novel[one.row] else names[one.row][0], novelty=novelty[one.row])
        for one in _apart(features, turns, count)
    ]


def _novel(classifier: Classifier, features: Tensor) -> np.ndarray:
    """Which images are unlike all that was learned, (n,); none where nobody can say."""
    try:
        found: np.ndarray = classifier.refused(features, LOST).cpu().numpy()
    except ValueError:  # too few images were learned to promise the share
        return np.zeros(len(features), dtype=bool)
    return found


def _typical(
    features: Tensor,
    among: np.ndarray,
    count: int,
    learned: Tensor | None = None,
    kind: str = "typical",
    seed: int = 0,
) -> list[Suggestion]:
    """The middle images of clusters, the largest first, of those with no `learned` mean."""
    with installed("choosing images to label"):
        from sklearn.cluster import MiniBatchKMeans

    if not len(among):
        return []
    taken = among[:: -(-len(among) // MOST_CLUSTERED)]
    rows = features[torch.from_numpy(taken).to(features.device)].float().cpu().numpy()
    means = rows[:0] if learned is None else learned.float().cpu().numpy()
    clusters = min(count + len(means), len(rows))
    made = MiniBatchKMeans(clusters, random_state=seed, n_init=1, batch_size=4096).fit(rows)
    sizes = np.bincount(made.labels_, minlength=clusters)
    covered = np.bincount(made.predict(means), minlength=clusters) if len(means) else np.zeros(clusters, dtype=int)
    found: list[Suggestion] = []
    for cluster in sorted(np.flatnonzero(sizes).tolist(), key=lambda one: (covered[one] > 0, -sizes[one])):
        own = np.flatnonzero(made.labels_ == cluster)
        middle = own[np.linalg.norm(rows[own] - rows[own].mean(axis=0), axis=1).argmin()]
        alike = f"{kind}, with {sizes[cluster] - 1} more alike" if sizes[cluster] > 1 else f"{kind}, like no other"
        found.append(Suggestion(int(taken[middle]), alike, len(found) + 1))
    return found[:count]


def _apart(features: Tensor, given: list[Suggestion], count: int) -> list[Suggestion]:
    """The first suggestions, without those whose features are equal to those of one before."""
    kept: list[Suggestion] = []
    for one in given:
        if len(kept) == count:
            break
        before = features[[other.row for other in kept]]
        if not len(before) or float((before @ features[one.row]).max()) < SAME:
            kept.append(one)
    return kept
