"""BOFA's prototypes: every class's mean feature and text embedding, mixed with one weight that task 1 chooses."""

from collections.abc import Sequence
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.prototype import PrototypeClassifier


class BofaClassifier(PrototypeClassifier):
    """logits = tau z . p_c, with p_c = (1 - lambda) e_c + lambda v_c, not normalised again.

    v_c is the direction of the class's mean unit feature. lambda is the one of `grid` values from 0 to 1 with the best
    accuracy on the first task's own images, and the middle one of these where several are best. It never changes.

    The paper makes v_c of old classes anew with each task's projection, from unprojected class means. A classifier
    sees projected features alone, so here v_c stays, unless drift="linear" moves it along. The published code's
    Gaussian discriminant is left out for the same reason. In that code lambda weighs the text when it is searched and
    the image when it is used; here it weighs the image both times, as in the paper.

    Reference:
        "BOFA: Bridge-Layer Orthogonal Low-Rank Fusion for CLIP-Based Class-Incremental Learning", arXiv 2511.11421.
    """

    grid: Annotated[int, Ge(2)] = 21

    name = "bofa"
    summary = "BOFA's rule: class means and text classifier, mixed"
    belongs_to = "bofa"
    needs_text = True
    adds_up = None  # two sides have chosen two weights

    def register(self) -> None:
        super().register()
        self.register_buffer("image_weight", torch.zeros(()))

    def added(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        changes = super().added(images, labels, new)
        if not self._class_names:
            by_text = images @ self.text_embeds.float().T
            by_image = images @ F.normalize(changes["sums"], dim=1).to(images).T
            weights = torch.linspace(0, 1, self.grid, device=images.device)
            right = torch.stack([(torch.lerp(by_text, by_image, w).argmax(1) == labels).sum() for w in weights])
            best = (right == right.max()).nonzero()[:, 0]
            changes["image_weight"] = weights[best[len(best) // 2]]
        return changes

    @property
    def prototypes(self) -> Tensor:
        """p_c, (C, d), float32."""
        return torch.lerp(self.text_embeds.float(), self.visual_prototypes, self.image_weight.float())

    def logits(self, images: Tensor) -> Tensor:
        return self.logit_scale * images @ self.prototypes.T

    def left_out(self, images: Tensor, labels: Tensor) -> Tensor:
        """As of class means, with the text's share of the own class; lambda is held as it is."""
        scores, own = super().left_out(images, labels), labels[:, None]
        by_text = self.logit_scale * (images * self.text_embeds[labels].to(images)).sum(dim=1, keepdim=True)
        return scores.scatter(1, own, torch.lerp(by_text, scores.gather(1, own), self.image_weight.to(scores)))
