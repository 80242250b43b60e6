"""GDA-CLIP: a weighted sum of the text classifier and linear discriminant analysis.

logits = (tau z' e_c + alpha times the score of `lda`) / max(1, alpha)      the denominator keeps their scale
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.calibration import log_likelihoods, penalties
from dulbe_peft.classifiers.keeping import takes
from dulbe_peft.classifiers.lda import LdaClassifier, LdaRule
from dulbe_peft.classifiers.leaving import Left, choose
from dulbe_peft.classifiers.state import Layout, State, shared
from dulbe_peft.utils.settings import Positive

ALPHAS = [10.0 ** (exponent / 3) for exponent in range(-9, 7)]
TEMPERATURES = [2.0**exponent for exponent in range(-2, 8)]
WRONG = tuple(0.9 * (step / 10) ** 2 for step in range(11))  # shares of wrong labels
ONE_IMAGE = 0.18  # alpha if no image can be left out; chosen on training images of three streams


@dataclass(frozen=True)
class GdaRule(LdaRule):
    """Text classifier plus alpha times linear discriminant analysis.

    Args:
        alpha: Weight of the images, positive. "auto" chooses it from 1e-3 to 100, by the leave-one-out log-loss of
            each task's images over the classes seen so far.
        shrinkage: See `LdaRule`.
        prior_images: See `LdaRule`.

    Attributes:
        losses: (16, 10, wrong), float64, leave-one-out log-loss of each alpha, temperature and share of wrong labels,
            summed over images.
        text_embeds: e_c, (C, d), unit vectors.

    Reference:
        Wang et al., "A Hard-to-Beat Baseline for Training-Free CLIP-Based Adaptation", ICLR 2024, where validation
        images choose alpha.
    """

    alpha: Positive | Literal["auto"] = "auto"

    name = "gda"
    summary = "GDA-CLIP: linear discriminant analysis and the text classifier, added up with one weight"
    needs_text = True

    def tensors(self) -> dict[str, Layout]:
        sizes = len(ALPHAS), len(TEMPERATURES), len(WRONG)
        return super().tensors() | {"losses": shared(*sizes, dtype=torch.float64, adds=True)}

    def judged(
        self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None
    ) -> tuple[State, Left | None]:
        """Add the leave-one-out log-loss of every alpha to `losses`; return the leave-one-out scores and labels."""
        left = choose(images := images.to(state.sums), labels, groups, state.counts)
        if not len(left.rows) or state.classes < 2:
            return state, None
        images, labels = images[left.rows], left.labels
        by_text, by_image = self._by_text(state, images), super().left_out(state, images, labels, left.groups)
        losses = state.losses.clone()
        for row, alpha in enumerate(ALPHAS):
            scores = _mixed(by_text, by_image, alpha).float()
            own = -torch.stack([F.cross_entropy(scores / t, labels, reduction="none") for t in TEMPERATURES])
            losses[row] -= log_likelihoods(own, state.classes, WRONG).sum(dim=1).to(losses)
        state = state.replaced({"losses": losses})
        return state, replace(left, scores=_mixed(by_text, by_image, self.weight(state)))

    def left_out(self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor:
        """Return the leave-one-out scores with the present alpha."""
        by_text = self._by_text(state, images.to(state.sums))
        return _mixed(by_text, super().left_out(state, images, labels, groups), self.weight(state))

    def weight(self, state: State) -> float:
        """Return alpha."""
        if self.alpha != "auto":
            return float(self.alpha)
        if not state.losses.any():
            return ONE_IMAGE
        losses = state.losses + penalties(WRONG, int(state.counts.sum())).to(state.losses)
        return ALPHAS[int(losses.amin(dim=(1, 2)).argmin())]

    def scores(self, state: State, images: Tensor) -> Tensor:
        return _mixed(self._by_text(state, images), super().scores(state, images), self.weight(state))

    def _by_text(self, state: State, images: Tensor) -> Tensor:
        return self.logit_scale * images @ state.text_embeds.to(images).T


def _mixed(by_text: Tensor, by_image: Tensor, alpha: float) -> Tensor:
    return (by_text + alpha * by_image) / max(1, alpha)


class GdaClassifier(LdaClassifier, rule=GdaRule, example="embed_dim=8"):
    """`lda` and the text classifier with one weight; its settings are those of `GdaRule`."""

    rule: GdaRule
    text_embeds: Tensor
    sums: Tensor
    counts: Tensor

    if TYPE_CHECKING:

        @takes(GdaRule)
        def __init__(self) -> None: ...

    def weight(self) -> float:
        """Return alpha."""
        return self.rule.weight(self.state)
