"""GDA-CLIP: a weighted sum of the text classifier and linear discriminant analysis.

logits = (tau z' e_c + alpha times the score of `lda`) / max(1, alpha)      the denominator keeps their scale
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.lda import LdaClassifier
from dulbe_peft.utils.settings import Positive

ALPHAS = [10.0 ** (exponent / 3) for exponent in range(-9, 7)]
TEMPERATURES = [2.0**exponent for exponent in range(-2, 8)]
ONE_IMAGE = 0.18  # alpha if no image can be left out; chosen on training images of three streams


class GdaClassifier(LdaClassifier):
    """Text classifier plus alpha times linear discriminant analysis.

    Args:
        alpha: Weight of the images, positive. "auto" chooses it from 1e-3 to 100, by the leave-one-out log-loss of
            each task's images over the classes seen so far.
        shrinkage: See `LdaClassifier`.
        prior_images: See `LdaClassifier`.

    Attributes:
        losses: (16, 10), float64, leave-one-out log-loss of each alpha at each of 10 temperatures, summed over images.
        text_embeds: e_c, (C, d), unit vectors.

    Reference:
        Wang et al., "A Hard-to-Beat Baseline for Training-Free CLIP-Based Adaptation", ICLR 2024, where validation
        images choose alpha.
    """

    alpha: Positive | Literal["auto"] = "auto"

    name = "gda"
    summary = "GDA-CLIP: linear discriminant analysis and the text classifier, added up with one weight"
    needs_text = True
    adds_up = ("losses",)

    def register(self) -> None:
        super().register()
        self.register_buffer("losses", torch.zeros(len(ALPHAS), len(TEMPERATURES), dtype=torch.float64))

    def judge(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        """Add the leave-one-out log-loss of every alpha to `losses`; return the leave-one-out scores and labels."""
        images, labels = self.repeated(images, labels)
        if not len(images) or len(self.means) < 2:
            return None
        by_text, by_image = self._by_text(images), super().left_out(images, labels)
        losses = self.losses.clone()
        for row, alpha in enumerate(ALPHAS):
            scores = _mixed(by_text, by_image, alpha).float()
            each = [F.cross_entropy(scores / t, labels, reduction="sum") for t in TEMPERATURES]
            losses[row] += torch.stack(each).to(losses)
        self._buffers |= {"losses": losses}
        return _mixed(by_text, by_image, self.weight()), labels

    def left_out(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return the leave-one-out scores with the present alpha."""
        return _mixed(self._by_text(images.to(self.means)), super().left_out(images, labels), self.weight())

    def weight(self) -> float:
        """Return alpha."""
        if self.alpha != "auto":
            return float(self.alpha)
        return ALPHAS[int(self.losses.amin(dim=1).argmin())] if self.losses.any() else ONE_IMAGE

    def logits(self, images: Tensor) -> Tensor:
        return _mixed(self._by_text(images), super().logits(images), self.weight())

    def _by_text(self, images: Tensor) -> Tensor:
        return self.logit_scale * images @ self.text_embeds.to(images).T


def _mixed(by_text: Tensor, by_image: Tensor, alpha: float) -> Tensor:
    return (by_text + alpha * by_image) / max(1, alpha)
