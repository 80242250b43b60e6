"""How a classifier answers: scores, probabilities, prediction sets, and whether an image is of a known class."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dulbe_peft.classifiers.checks import check_share
from dulbe_peft.classifiers.keeping import Kept
from dulbe_peft.classifiers.rule import Rule
from dulbe_peft.classifiers.state import State
from dulbe_peft.utils.tensors import has_values
from dulbe_peft.utils.torch_settings import without_autocast

if TYPE_CHECKING:
    from dulbe_peft.classifiers.calibration import TaskTemperature

# Share of the classes that must have left-out images. With 1 to 3 of 100 classes, sets of 90 % held 40 to 61 %.
LEAST_JUDGED = 1 / 3


class Answering(Kept):
    """The answers of a classifier."""

    if TYPE_CHECKING:  # that of nn.Module returns Any

        def __call__(self, image_embeds: Tensor | np.ndarray, sizes: Sequence[int] | None = None) -> Tensor: ...

    def forward(self, image_embeds: Tensor | np.ndarray, sizes: Sequence[int] | None = None) -> Tensor:
        """Normalise features, (n, d), and return the logits of all seen classes, (n, C) in float32.

        With `sizes`, the logits are those that separate calls with parts of so many rows would compute. A matrix
        product rounds differently for another batch size, so the parts are not multiplied together.
        """
        if not self._class_names:
            raise ValueError(f"the {self.name!r} classifier has no class yet: call add_classes first")
        images = self._unit(image_embeds, "image_embeds")
        with without_autocast(images):
            logits = self.logits(images) if sizes is None else torch.cat([*map(self.logits, images.split([*sizes]))])
        if has_values() and not torch.isfinite(logits).all():
            raise ValueError(f"the scores of the {self.name!r} classifier are not finite: it is damaged")
        return logits

    def logits(self, images: Tensor) -> Tensor:
        """Return the logits, (n, C) in float32, of unit features, (n, d) in float32, without checks."""
        return self._scores(self.state, images)

    def _scores(self, state: State, images: Tensor) -> Tensor:
        scores = self.rule.scores(state, images)
        if has_values() and scores.shape != (expected := (len(images), state.classes)):
            raise ValueError(f"the scores of {self.rule_type.__name__} must be {expected}, got {tuple(scores.shape)}")
        return scores

    def left_out(self, images: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor | None:
        """Return the logits of learned images without their groups, or None; see `Rule.left_out`."""
        return self.rule.left_out(self.state, images, labels, groups)

    def formula(self) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        """Return the logits as a function in plain PyTorch and its tensors; see `Rule.formula`."""
        return self.rule.formula(self.state)

    def probabilities(self, image_embeds: Tensor | np.ndarray) -> Tensor:
        """Return the probabilities of all seen classes, softmax(logits / `temperature`), (n, C) in float32.

        They can be far off if `calibrated` is False.
        """
        return (self(image_embeds) / self.temperature).softmax(dim=1)

    @property
    def temperature(self) -> float:
        """T of `probabilities`; 1 if no image could be held out to fit it."""
        return temperature(self.rule, self.state, self.calibration)

    @property
    def calibrated(self) -> bool:
        """Whether images that the scores had not learned determined `temperature`; True for a single class.

        `bayes` is calibrated, too, if its texts explain some of the labels.
        """
        known = bool(self.calibration) or len(self._class_names) < 2 or self.rule.fitted(self.state).calibrated
        return known and not self._few()

    def _few(self) -> str:
        """Return "3 of 100 classes" if fewer than a third of the classes have images that were left out, or ""."""
        classes, judged = len(self._class_names), len(self._class_names)
        if not self.calibration or classes < 2:
            return ""
        from dulbe_peft.classifiers.calibration import KEPT

        if "counts" in self.state:
            judged = int((self.counts > 1).sum())
        if len(self.calibration) < KEPT and all(task.judged for task in self.calibration):
            judged = min(judged, sum(task.judged for task in self.calibration))
        return f"{judged} of {classes} classes" if judged < LEAST_JUDGED * classes else ""

    def _check_many(self, what: str) -> None:
        """Raise a `ValueError` that says `what` is not possible if few classes would speak for all."""
        if self._few():
            raise ValueError(f"{what}: {self.doubt}")

    @property
    def wrong_labels(self) -> tuple[float, float, float] | None:
        """The share of the learned labels that look wrong and the ends of its 95 % interval, from 0 to 1.

        It is estimated from images that were left out: a label is wrong with this probability, and then each other
        class is equally likely. Labels that go to a similar class look like images that are hard to tell, and hardly
        count; `classifiers.confusion` tells them. None if no image could be left out.
        """
        from dulbe_peft.classifiers.calibration import share_of_wrong_labels

        return share_of_wrong_labels(self.calibration)

    @property
    def doubt(self) -> str:
        """A sentence that says why the probabilities can be far off, or "" if they are calibrated."""
        if self.calibrated:
            return ""
        if few := self._few():
            return (
                f"only {few} have images that could be left out to calibrate the probabilities of the {self.name!r} "
                "classifier, so they can be far off for the others: learn at least two images of more classes"
            )
        return (
            f"no image could be left out to calibrate the probabilities of the {self.name!r} classifier, so they can "
            "be far off: learn a class with two images or more beside another class"
        )

    @torch.no_grad()
    def novelty(self, image_embeds: Tensor | np.ndarray) -> Tensor:
        """Return the novelty of each image, (n,) in float64: the larger, the less it resembles the known classes.

        Classifiers that keep means, counts and scatter, such as `lda`, `gda` and `bayes`, compute it as described in
        `classifiers.novelty`. For others it is 1 minus the largest probability.
        """
        from dulbe_peft.classifiers.novelty import novelty, sums_of

        if sums_of(self.rule, self.state) is None:
            return 1 - self.probabilities(image_embeds).amax(dim=1).double()
        images = self._unit(image_embeds, "image_embeds")
        return novelty(self.rule, self.state, self.novelty_tasks, images, self(image_embeds) / self.temperature)

    def refused(self, image_embeds: Tensor | np.ndarray, share: float) -> Tensor:
        """Return which images are rejected because their novelty is too large, (n,) in bool.

        An image of a known class, drawn like those of the newest tasks, is rejected with a probability of about
        `share` or less, see `calibration.threshold`.

        Raises:
            ValueError: If the newest tasks have too few images for this, or few classes would speak for all, see
                `doubt`. The message says what is needed.
        """
        from dulbe_peft.classifiers.novelty import novelty_threshold, sums_of

        share = check_share("reject", share, 0.05)
        self._check_many("no image can be rejected")
        if sums_of(self.rule, self.state) is None or not any(task.novelties for task in self.novelty_tasks):
            return self.probabilities(image_embeds).amax(dim=1) < self.rejection_threshold(share)
        return self.novelty(image_embeds) > novelty_threshold(self.novelty_tasks, share)

    @property
    def roc_area(self) -> float | None:
        """Area under the ROC curve: how often an image of an unknown class is more novel than one of a known class.

        It is estimated by leaving out each class in turn. 1/2 means that novelty does not separate them. None if it
        is not known, or if few classes would speak for all, see `doubt`.
        """
        from dulbe_peft.classifiers.novelty import roc_area

        return None if self._few() else roc_area(self.novelty_tasks)

    @property
    def roc_interval(self) -> tuple[float, float] | None:
        """The ends of the 95 % interval of `roc_area`, for unknown classes that differ as the learned ones do.

        It is computed from how much the area differs between the left-out classes. It does not contain that the new
        classes may be of another kind: on published features, where the area is 3 points too high on average, it
        contains the right one in 64 of 81 draws (`research.benchmarks.rejection`). None if it is not known.
        """
        from dulbe_peft.classifiers.novelty import roc_interval

        return None if self._few() else roc_interval(self.novelty_tasks)

    def rejection_threshold(self, share: float) -> float:
        """Return the threshold of the largest probability for rejecting at most a fraction `share` of known images.

        An image of a known class, drawn like those of the newest tasks, is below it with a probability of about
        `share` or less, see `calibration.threshold`.

        Reference:
            Hendrycks and Gimpel, "A Baseline for Detecting Misclassified and Out-of-Distribution Examples in Neural
            Networks", 2017: the largest softmax probability as the score.
        """
        from dulbe_peft.classifiers.calibration import threshold

        share = check_share("reject", share, 0.05)
        self._check_many("no image can be rejected")
        return threshold(self.calibration, "largest", share)

    def prediction_sets(self, image_embeds: Tensor | np.ndarray, coverage: float) -> Tensor:
        """Return the prediction set of each image, (n, C) in bool, by conformal prediction.

        For images of known classes, drawn like those of the newest tasks, it contains the true class with a
        probability of about `coverage` or more, see `calibration.threshold`. It always contains the most likely class.

        Raises:
            ValueError: If the newest tasks have too few images for this, or few classes would speak for all, see
                `doubt`. The message says what is needed.
        """
        from dulbe_peft.classifiers.calibration import threshold

        missed = 1 - check_share("coverage", coverage, 0.95)
        self._check_many("no prediction sets are possible")
        least = threshold(self.calibration, "own", missed)
        probabilities = self.probabilities(image_embeds)
        return (probabilities >= least) | (probabilities == probabilities.amax(dim=1, keepdim=True))


def temperature(rule: Rule, state: State, tasks: Sequence["TaskTemperature"]) -> float:
    """Return T of the probabilities: that of the rule, or else that which follows from the records of the tasks."""
    from dulbe_peft.classifiers import calibration

    own = rule.fitted(state).temperature
    return calibration.temperature(tasks, state.classes) if own is None else own
