"""What training a task did to the classes before it: their test images, as if it had not been trained, and as it was.

Both sides know the same classes and images. So nothing but the training lies between them, and no class that came.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.closing import ClosingPass, learn_task
from dulbe_peft.encoders.loading import has_text
from dulbe_peft.encoders.text_encoder import mean_texts
from dulbe_peft.metrics.accuracy import percent
from dulbe_peft.metrics.evaluation import Evaluation, answers
from dulbe_peft.streams.learning import StreamLearner
from dulbe_peft.utils.devices import own_randomness
from dulbe_peft.utils.records import Count, Record

LEVEL = 0.05  # of the sign test, over all classifiers together
MUCH = 0.1  # a share of images, below which nothing is said of answers that changed
ADVICE = "lower --learning-rate, or train nothing (--strategy frozen)"


class Cost(Record):
    """Test images of old classes: those right with the task's training, those lost by it, and those gained."""

    images: Count
    right: Count
    lost: Count
    gained: Count

    @property
    def points(self) -> float:
        """How many percent of the images were lost, less those gained."""
        return 100 * (self.lost - self.gained) / self.images


@dataclass(frozen=True)
class Before:
    """A learner before a task: its classifiers, and the texts of old and new classes by its model."""

    classifiers: Mapping[str, Classifier]
    texts: Tensor | None
    each_text: tuple[Tensor, Tensor] | None
    tests: Mapping[int, Evaluation]  # what it said of the old tasks' test images, with their features

    @classmethod
    def of(cls, learner: StreamLearner, new: tuple[str, ...], tests: Mapping[int, Evaluation]) -> "Before":
        texts = each = None
        if has_text(learner.state.base):
            each = learner.encoder.each_text_embeds(new, learner.state.class_texts)
            texts = torch.cat([learner.text_embeds(learner.class_names), mean_texts(len(new), *each)])
        return cls(dict(learner.classifiers), texts, each, tests)

    def untrained(self, closing: ClosingPass, names: Iterable[str], seed: int) -> dict[str, Classifier]:
        """The classifiers with the task's classes as its images were before the training."""
        still = replace(closing, features=cast(Tensor, closing.before), before=None, views=None)
        still = replace(still, texts=self.texts, each_text=self.each_text)
        with own_randomness(seed, len(self.tests)):
            return learn_task({name: self.classifiers[name] for name in names}, still, drift="none")

    def costs(self, closing: ClosingPass, now: Mapping[int, Evaluation], seed: int) -> dict[str, Cost]:
        """What the training cost each classifier of the old classes; nothing where features before are not known."""
        if closing.before is None or not self.tests:
            return {}
        found, numbers = {}, list(self.tests)
        truth = torch.cat([self.tests[number].truth for number in numbers])
        for name, classifier in self.untrained(closing, self.classifiers, seed).items():
            said = answers(classifier, [self.tests[number].features.to(classifier.device) for number in numbers])
            before = torch.cat([predicted for predicted, _ in said]) == truth
            after = torch.cat([now[number].classifiers[name] for number in numbers]) == truth
            lost, gained = int((before & ~after).sum()), int((after & ~before).sum())
            found[name] = Cost(images=len(truth), right=int(after.sum()), lost=lost, gained=gained)
        return found

    @torch.no_grad()
    def changed(self, closing: ClosingPass, after: Classifier, seed: int) -> float | None:
        """The share of the task's images that `after` takes for another old class than it would without training."""
        old = len(self.classifiers[after.name].class_names)
        if closing.before is None or old < 2:
            return None
        untrained = self.untrained(closing, [after.name], seed)[after.name]
        before, now = untrained(closing.before)[:, :old], after(closing.features)[:, :old]
        return float((before.argmax(dim=1) != now.argmax(dim=1)).double().mean())


def fallen(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """The classifiers that lose more of the old classes' test images than chance explains, by a sign test."""
    from scipy.stats import binomtest

    level = LEVEL / max(1, len(costs))
    return {
        name: cost
        for name, cost in costs.items()
        if cost.lost > cost.gained
        and binomtest(cost.lost, cost.lost + cost.gained, alternative="greater").pvalue < level
    }


def fall_line(costs: Mapping[str, Cost], changed: float | None) -> str:
    """What a run prints after a task whose training cost old classes something, or ""."""
    parts = [
        f"{name} {percent((cost.right + cost.lost - cost.gained) / cost.images, 1)} to "
        f"{percent(cost.right / cost.images, 1)} %"
        for name, cost in fallen(costs).items()
    ]
    if parts:
        images = next(iter(costs.values())).images
        return f"training this task cost old classes, of {images} test images: {', '.join(parts)}; {ADVICE}"
    if changed is not None and changed >= MUCH:
        return (
            f"no old class has test images; {percent(changed, 0)} % of this task's look like another old class than "
            f"before its training, so old classes may have suffered: test them, {ADVICE}"
        )
    return ""
