"""Suggest photographs to label next: half are typical of a group not covered yet, half are the most uncertain.

A classifier that expects to be wrong more often than right often hesitates between two wrong classes. Its most
uncertain images are odd rather than informative, so the second half is then drawn at random.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.arguments import Query
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.calibration import HARDLY
from dulbe_peft.classifiers.groups import check_groups, places_among
from dulbe_peft.classifiers.learning import Groups
from dulbe_peft.classifiers.novelty import sums_of
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.unlabelled import unlabelled_images
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.metrics.prediction import Answers
from dulbe_peft.photos.data.inventory import Found, Inventory
from dulbe_peft.utils.extras import installed
from dulbe_peft.utils.settings import check_int
from dulbe_peft.utils.terminal import counted

LOST = 0.05  # share of known images that are mistaken for novel ones
KNOWS = 0.5  # least mean probability of the best class, which estimates the accuracy of a calibrated classifier
MANY = 2  # this many times `LOST` images called novel are hardly all known ones
SAME = 1 - 1e-4  # an image with a higher cosine to another one adds nothing
MOST_CLUSTERED = 20_000  # largest number of images to cluster; of more images, a part is clustered


@dataclass(frozen=True)
class Suggestion:
    """An image to label: its row, the reason, the number of its group, the predicted class or "", and its novelty."""

    row: int
    reason: str
    group: int | None = None
    proposed: str = ""
    novelty: float | None = None


class Fresh(NamedTuple):
    """Photographs that were not learned, perhaps followed by those that were.

    Attributes:
        images: The photographs.
        features: (n, d).
        lines: What was left out, and why.
        labelled: Groups with a label.
        groups: The name of each photograph's group, or ""; empty without groups.
    """

    images: LabelledImages
    features: Tensor
    lines: list[str]
    labelled: frozenset[int]
    groups: list[str]


def new_photographs(
    learner: ClassIncrementalLearner,
    photos: Sequence[str],
    group: str | None = None,
    group_seconds: float | None = None,
    learned_too: bool = False,
) -> Fresh:
    """Return the readable photographs that were not learned; see `splits.grouped` for `group` and `group_seconds`.

    A group has a label if a learned photograph, in `photos` or elsewhere, belongs to it. With `learned_too`, the
    learned photographs follow.
    """
    from dulbe_peft.photos.data.grouping import grouped_photographs

    images, known, names, notes = unlabelled_images(photos), learner.state.known, list[str | None](), list[str]()
    if group is not None or group_seconds is not None:
        images, names, _, _, notes = grouped_photographs(images, group, group_seconds)
    labelled = frozenset(known.groups.values())
    rows, repeated = known.new_rows(images)
    if images.groups is None and known.groups:
        notes = ["learned photographs have groups: give --group as for them, so that each item is suggested once"]
    elif images.groups is not None:
        learned = known.class_of()
        pairs = zip(images.groups.tolist(), images.contents(), strict=True)
        labelled |= {number for number, content in pairs if content in learned}
    if learned_too:
        rows = rows + _different(images, repeated.pop("learned before", []))
    lines = [f"left out: {counted(len(which), 'photograph')} {reason}" for reason, which in repeated.items()]
    features, problems = learner.readable_embeds(images.at(rows))
    unreadable = [(Found("", row, images.item_name(rows[row]), ""), why) for row, why in problems.items()]
    lines += [*Inventory({}, unreadable, [*images.left_out]).problems(), *notes]
    readable = [row for row in range(len(rows)) if row not in problems]
    if not readable:
        raise ValueError("\n".join(["no readable photograph is left that was not learned", *lines]))
    chosen = [rows[row] for row in readable]
    groups = [names[row] or "" for row in chosen] if names else []
    return Fresh(images.at(chosen), features[readable], lines, labelled, groups)


def _different(images: LabelledImages, rows: list[int]) -> list[int]:
    """Return the first of the rows with each content."""
    return [*dict(zip(reversed(images.at(rows).contents()), reversed(rows), strict=True)).values()][::-1]


@torch.no_grad()
def suggestions(
    features: Tensor,
    count: int,
    classifier: Classifier | None = None,
    seed: int = 0,
    groups: Groups | None = None,
    labelled: Collection[int | str] | Tensor = (),
    only: Collection[str] | None = None,
) -> list[Suggestion]:
    """Return at most `count` images to label, the most useful first, without copies.

    Without a classifier, or with one that has learned nothing, these are the central images of `count` clusters, the
    largest cluster first. Otherwise two kinds alternate: the central image of a cluster without a learned class, and
    the image whose two best classes are closest, or a random image if the classifier expects to be wrong more often
    than right. If many images are novel, only the novel ones are clustered.

    Args:
        features: Unit features of the images, (n, d).
        count: Largest number of suggestions.
        classifier: The learner's classifier.
        seed: Seed of the clustering and of random images.
        groups: (n,), texts or integers; images with the same entry show the same item. Its central image stands for
            an item, and further ones are suggested only when no item is left.
        labelled: Groups that have a label; they come after the others.
        only: The classes that are possible; None: all.

    Reference:
        Typical images: Hacohen et al., "Active Learning on a Budget: Opposite Strategies Suit High and Low Budgets",
        2022. Margin: Scheffer et al., "Active Hidden Markov Models for Information Extraction", 2001.
    """
    count = min(check_int("count", count, 1), len(features))
    if groups is None or not count:
        return _suggested(features, count, classifier, seed, only)

    def candidates() -> Iterator[Suggestion]:
        clusters = 0
        for rows in _in_turns(features, groups, labelled):
            found = _suggested(features[rows], min(count, len(rows)), classifier, seed, only) if len(rows) else []
            for s in found:
                yield replace(s, row=int(rows[s.row]), group=s.group and s.group + clusters)
            clusters += max((s.group or 0 for s in found), default=0)
            others = set(range(len(rows))) - {s.row for s in found}  # clustering may give fewer than asked for
            yield from (Suggestion(int(rows[row]), "one of the rest") for row in sorted(others))

    return _without_copies(features, candidates(), count)


def _in_turns(features: Tensor, groups: Groups, labelled: Collection[int | str] | Tensor) -> list[Tensor]:
    """Return the rows of the central image of each group, of those of `labelled` groups, and of all other images."""
    numbers = check_groups(groups, len(features))
    numbers = (torch.arange(len(features)) if numbers is None else numbers).to(features.device)
    sums = torch.zeros_like(features)  # at most as many groups as images
    nearness = (features * sums.index_add(0, numbers, features)[numbers]).sum(dim=1)
    order = nearness.argsort(descending=True, stable=True)
    central = torch.zeros(len(features), dtype=torch.bool, device=features.device)
    central[order] = places_among(numbers[order]) == 0
    entries: list[object] = np.asarray(groups.cpu() if isinstance(groups, Tensor) else groups, dtype=object).tolist()
    known = set(labelled.tolist() if isinstance(labelled, Tensor) else labelled)
    have = torch.tensor([entry in known for entry in entries], dtype=torch.bool, device=central.device)
    return [mask.nonzero()[:, 0].cpu() for mask in (central & ~have, central & have, ~central)]


def _suggested(
    features: Tensor, count: int, classifier: Classifier | None, seed: int, only: Collection[str] | None
) -> list[Suggestion]:
    """Return the suggestions if each image shows an item of its own."""
    every = np.arange(len(features))
    if classifier is None or not classifier.class_names:
        return _without_copies(features, _typical(features, every, count, seed=seed), count)
    answers = Answers(classifier, Query(only=None if only is None else tuple(only)))
    values, labels = answers.probabilities(features).topk(min(2, len(answers.names)), dim=1)
    novelty, novel = classifier.novelty(features).tolist(), _novel(classifier, features)
    margin = (values[:, 0] - values[:, -1]).cpu().numpy()
    many_novel = novel.sum() > MANY * LOST * len(novel)
    names = [[answers.names[label] for label in row] for row in labels.tolist()]
    sums = None if many_novel else sums_of(classifier.rule, classifier.state)
    means = None if sums is None else F.normalize(sums.means, dim=1)
    kind = "unlike anything learned" if many_novel else "typical"
    typical = _typical(features, every[novel] if many_novel else every, -(-count // 2), means, kind, seed)
    # A single class has the probability 1, whatever the image.
    trusted = len(answers.names) > 1 and classifier.calibrated
    knows = trusted and len(values) > 0 and float(values[:, 0].mean()) >= KNOWS
    order = margin.argsort(kind="stable") if knows else np.random.default_rng(seed).permutation(every)

    def candidates() -> Iterator[Suggestion]:
        for number, row in enumerate(order.tolist()):
            yield from typical[number : number + 1]
            shares = [f"{name} {share:.0%}" for name, share in zip(names[row], values[row].tolist(), strict=True)]
            why = "at random:" if not knows else "perhaps unknown, most like" if novel[row] else "unsure:"
            yield Suggestion(row, f"{why} {' or '.join(shares)}")

    return [
        replace(s, proposed="" if novel[s.row] else names[s.row][0], novelty=novelty[s.row])
        for s in _without_copies(features, candidates(), count)
    ]


def _novel(classifier: Classifier, features: Tensor) -> np.ndarray:
    """Return a mask, (n,), of the images that are unlike all learned ones; all False if that cannot be decided."""
    area = classifier.roc_area
    try:
        found = None if area is not None and area < HARDLY else classifier.refused(features, LOST)
    except ValueError:  # too few images were learned to guarantee the share
        found = None
    return np.zeros(len(features), dtype=bool) if found is None else found.cpu().numpy()


def _typical(
    features: Tensor,
    rows: np.ndarray,
    count: int,
    learned: Tensor | None = None,
    kind: str = "typical",
    seed: int = 0,
) -> list[Suggestion]:
    """Return the central images of clusters of `rows`: first clusters without a `learned` mean, then larger ones."""
    with installed("choosing images to label"):
        from sklearn.cluster import MiniBatchKMeans

    if not len(rows):
        return []
    rows = rows[:: -(-len(rows) // MOST_CLUSTERED)]
    points = features[torch.from_numpy(rows).to(features.device)].float().cpu().numpy()
    means = points[:0] if learned is None else learned.float().cpu().numpy()
    clusters = min(count + len(means), len(points))
    k_means = MiniBatchKMeans(clusters, random_state=seed, n_init=1, batch_size=4096).fit(points)
    sizes = np.bincount(k_means.labels_, minlength=clusters)
    covered = np.bincount(k_means.predict(means), minlength=clusters) if len(means) else np.zeros(clusters, dtype=int)
    suggested: list[Suggestion] = []
    for cluster in sorted(np.flatnonzero(sizes).tolist(), key=lambda cluster: (covered[cluster] > 0, -sizes[cluster])):
        members = np.flatnonzero(k_means.labels_ == cluster)
        central = members[np.linalg.norm(points[members] - points[members].mean(axis=0), axis=1).argmin()]
        others = f"{kind}, with {sizes[cluster] - 1} more alike" if sizes[cluster] > 1 else f"{kind}, like no other"
        suggested.append(Suggestion(int(rows[central]), others, len(suggested) + 1))
    return suggested[:count]


def _without_copies(features: Tensor, candidates: Iterable[Suggestion], count: int) -> list[Suggestion]:
    """Return the first `count` candidates, leaving out copies of earlier ones."""
    kept: list[Suggestion] = []
    for candidate in candidates:
        if len(kept) == count:
            break
        earlier = features[[suggestion.row for suggestion in kept]]
        if not len(earlier) or float((earlier @ features[candidate.row]).max()) < SAME:
            kept.append(candidate)
    return kept
