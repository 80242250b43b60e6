"""GDA-CLIP: linear discriminant analysis beside the text classifier, with one weight between the two.

score = tau z' e_c + alpha (z' P m_c - m_c' P m_c / 2)        m_c and P = Sigma^-1: those of `lda`

alpha is the one of a grid with the least log-loss on images that are left out one at a time. Without an image z of
class c, with u = z - mu_c and n = n_c, and with Sigma's shrinkage as it is,

mu_c is mu_c - u / (n - 1)        Sigma is Sigma - b u u',  b = (1 - s) n / ((n - 1) f)
P is P + g P u u' P,  g = b / (1 - b u' P u)                                       (Sherman and Morrison)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.checks import positive
from dulbe_peft.classifiers.covariance import oas_shrinkage
from dulbe_peft.classifiers.lda import LdaClassifier
from dulbe_peft.classifiers.sums import CHUNK

ALPHAS = [10.0 ** (exponent / 3) for exponent in range(-9, 7)]
TEMPERATURES = [2.0**exponent for exponent in range(-2, 8)]
ONE_IMAGE = 0.18  # alpha where nothing can be left out; chosen on training images of three streams


class GdaClassifier(LdaClassifier):
    """LDA's scores, weighted by alpha, added to the text classifier's.

    Means and scatter are `lda`'s, and as exact. alpha depends on the tasks: each task's images are left out while the
    classes seen so far compete.

    Args:
        alpha: weight of the images, positive. "auto": from 1e-3 to 100, by images that are left out.
        shrinkage, prior_images: as for `LdaClassifier`.

    Attributes:
        losses: (16, 10), float64, log-loss of each alpha at each of 10 temperatures, over all images left out.
        text_embeds: e_c, (C, d), unit vectors.

    Reference:
        Wang et al., "A Hard-to-Beat Baseline for Training-Free CLIP-Based Adaptation", ICLR 2024, where validation
        images choose alpha.
    """

    name = "gda"
    needs_text = True

    def __init__(
        self,
        embed_dim: int,
        logit_scale: float = 100.0,
        alpha: float | Literal["auto"] = "auto",
        shrinkage: float | Literal["oas"] = "oas",
        prior_images: float = 1.0,
    ) -> None:
        super().__init__(embed_dim, logit_scale, shrinkage, prior_images)
        if isinstance(alpha, str) and alpha != "auto":
            raise ValueError(f"alpha must be a positive number or 'auto', got {alpha!r:.100}")
        self.alpha = alpha if isinstance(alpha, str) else positive("alpha", alpha)
        self.register_rows("text_embeds", embed_dim)
        self.register_buffer("losses", torch.zeros(len(ALPHAS), len(TEMPERATURES), dtype=torch.float64))

    def learn(self, names: Sequence[str], images: Tensor, labels: Tensor, texts: Tensor | None) -> dict[str, Tensor]:
        assert texts is not None
        changes = super().learn(names, images, labels, texts) | {"text_embeds": texts}
        return self._with_losses(changes, images, labels + len(self._class_names))

    def learn_more(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return self._with_losses(super().learn_more(images, labels), images, labels)

    def merged(self, other: Self, places: Tensor) -> dict[str, Tensor]:
        losses = self.losses + other.losses.to(self.losses.device)
        return super().merged(other, places) | {"losses": losses}

    def weight(self) -> float:
        """alpha."""
        if self.alpha != "auto":
            return float(self.alpha)
        best = self.losses.amin(dim=1).argmin()
        return ALPHAS[int(best)] if self.losses.any() else ONE_IMAGE

    def logits(self, images: Tensor) -> Tensor:
        return self.logit_scale * images @ self.text_embeds.float().T + self.weight() * super().logits(images)

    def _with_losses(self, changes: dict[str, Tensor], images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """The table with the losses of these images, each left out of the new sums."""
        twin = self.fork()
        twin.install(changes)
        images, labels = images.to(twin.means.device).double(), labels.to(twin.means.device)
        several = twin.counts.to(labels.device)[labels] > 1
        if not several.any():
            return changes
        losses = self.losses.clone()
        for rows, own in zip(images[several].split(CHUNK), labels[several].split(CHUNK), strict=True):
            by_text, by_image = self.logit_scale * rows @ twin.text_embeds.to(rows).T, twin.left_out(rows, own)
            for row, alpha in enumerate(ALPHAS):
                scores = (by_text + alpha * by_image).float()
                found = [F.cross_entropy(scores / (t * max(1, alpha)), own, reduction="sum") for t in TEMPERATURES]
                losses[row] += torch.stack(found).to(losses)
        return changes | {"losses": losses}

    def left_out(self, images: Tensor, labels: Tensor) -> Tensor:
        """LDA's scores of (n, d) images, each as if it had not been learned, (n, C), float64."""
        freedom, n = int(self.freedom), self.counts.to(labels.device)[labels].double()
        share = oas_shrinkage(self.scatter / freedom, freedom) if self.shrinkage == "oas" else float(self.shrinkage)
        inverse = torch.linalg.inv(self.covariance())
        middle, means, away = self.means.mean(dim=0), self.drawn_means(), images - self.means[labels]
        # The mean of the class without the image, drawn to the middle as one of n - 1 images.
        left = middle + self.confidence(n - 1)[:, None] * (self.means[labels] - away / (n - 1)[:, None] - middle)
        by_image, by_away = images @ inverse, away @ inverse
        across, turned, squares = by_image @ means.T, by_away @ means.T, (means @ inverse * means).sum(dim=1)
        squares = squares.expand_as(across).clone()
        own = torch.arange(len(labels)), labels
        across[own], turned[own] = (by_image * left).sum(dim=1), (by_away * left).sum(dim=1)
        squares[own] = (left @ inverse * left).sum(dim=1)
        length, along = (by_away * away).sum(dim=1), (by_away * images).sum(dim=1)
        shift = (1 - share) / freedom * n / (n - 1)
        gain = (shift / (1 - shift * length))[:, None]
        return across + gain * along[:, None] * turned - (squares + gain * turned.square()) / 2
