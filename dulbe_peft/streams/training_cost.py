"""Measure what training a task cost the old classes: their test accuracy with the training and without it.

Both sides know the same classes and images, so the difference is due to the training and not to the new classes.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from scipy.special import bdtr
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.teaching import ClosingPass, learn_task
from dulbe_peft.encoders.text_encoder import mean_texts
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.metrics.accuracy import percent
from dulbe_peft.metrics.evaluation import Evaluation, answers
from dulbe_peft.metrics.results import Cost
from dulbe_peft.utils.torch_settings import seeded_randomness

LEVEL = 0.01  # significance level of the sign tests of a task, for all classifiers together; a run has many tasks
MUCH = 0.1  # share of predictions that changed from which a warning is printed, and share of losses to be detected
ADVICE = "train with a lower learning rate, or not at all (dulbe-peft run --strategy frozen)"


@dataclass(frozen=True)
class Before:
    """A learner before a task: its classifiers, and its model's text embeddings of old and new classes."""

    classifiers: Mapping[str, Classifier]
    texts: Tensor | None
    each_text: tuple[Tensor, Tensor] | None
    tests: Mapping[int, Evaluation]  # by number of an old task: predictions and features of its test images

    @classmethod
    def of(cls, learner: ClassIncrementalLearner, new: tuple[str, ...], tests: Mapping[int, Evaluation]) -> "Before":
        texts = each = None
        if learner.state.has_names:
            each = learner.encoder.each_text_embeds(new, learner.state.class_texts)
            texts = torch.cat([learner.text_embeds(learner.class_names), mean_texts(len(new), *each)])
        return cls(dict(learner.classifiers), texts, each, tests)

    def untrained(self, closing: ClosingPass, names: Iterable[str], seed: int) -> dict[str, Classifier]:
        """Return classifiers that learn the task from the features that its images had before the training."""
        untrained = replace(closing, features=cast(Tensor, closing.before), before=None, views=None)
        untrained = replace(untrained, texts=self.texts, each_text=self.each_text)
        with seeded_randomness(seed, len(self.tests)):
            return learn_task({name: self.classifiers[name] for name in names}, untrained, drift="none")

    def costs(self, closing: ClosingPass, now: Mapping[int, Evaluation], seed: int) -> dict[str, Cost]:
        """Return what the training cost each classifier; empty if the features before the training are not known."""
        if closing.before is None or not self.tests:
            return {}
        costs, numbers = {}, list(self.tests)
        truth = torch.cat([self.tests[number].truth for number in numbers])
        for name, classifier in self.untrained(closing, self.classifiers, seed).items():
            predictions = answers(
                classifier, [self.tests[number].features.to(classifier.device) for number in numbers]
            )
            before = torch.cat([predicted for predicted, _ in predictions]) == truth
            after = torch.cat([now[number].classifiers[name] for number in numbers]) == truth
            lost, gained = int((before & ~after).sum()), int((after & ~before).sum())
            costs[name] = Cost(images=len(truth), right=int(after.sum()), lost=lost, gained=gained)
        return costs

    @property
    def hardly_tested(self) -> bool:
        """Whether a loss of `MUCH` could stay unseen: most old classes have no test images, or there are few."""
        if not self.tests:
            return True
        truth = torch.cat([test.truth for test in self.tests.values()])
        classes = max(len(classifier.class_names) for classifier in self.classifiers.values())
        # If only losses occur, n of them have the probability 2^-n.
        few = MUCH * len(truth) < math.log2(len(self.classifiers) / LEVEL)
        return few or 2 * len(truth.unique()) < classes

    @torch.no_grad()
    def changed(self, closing: ClosingPass, after: Classifier, seed: int) -> float | None:
        """Return the share of the task's images whose most likely old class was changed by the training."""
        old = len(self.classifiers[after.name].class_names)
        if closing.before is None or old < 2:
            return None
        untrained = self.untrained(closing, [after.name], seed)[after.name]
        before, now = untrained(closing.before)[:, :old], after(closing.features)[:, :old]
        return float((before.argmax(dim=1) != now.argmax(dim=1)).double().mean())


def significant_costs(costs: Mapping[str, Cost]) -> dict[str, Cost]:
    """Return the costs of the classifiers whose loss on old classes is significant by a sign test."""
    level = LEVEL / max(1, len(costs))
    return {
        name: cost
        for name, cost in costs.items()
        if cost.lost > cost.gained and bdtr(cost.gained, cost.lost + cost.gained, 0.5) < level
    }


def fall_line(costs: Mapping[str, Cost], changed: float | None) -> str:
    """Return the warning that a run prints if training a task cost old classes something, or ""."""
    parts = [
        f"{name} {percent((cost.right + cost.lost - cost.gained) / cost.images, 1)} to "
        f"{percent(cost.right / cost.images, 1)} %"
        for name, cost in significant_costs(costs).items()
    ]
    if parts:
        images = next(iter(costs.values())).images
        lowered = f"training this task lowered the accuracy on {images} test images of old classes"
        return f"{lowered}: {', '.join(parts)}; {ADVICE}"
    if changed is not None and changed >= MUCH:
        return (
            f"training changed the most likely old class of {percent(changed, 0)} % of this task's images, and old "
            f"classes have too few test images to show what that means for them: test more of them, {ADVICE}"
        )
    return ""
