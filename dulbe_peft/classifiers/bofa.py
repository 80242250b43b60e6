"""BOFA's prototypes: every class's mean feature and text embedding, mixed with one weight that task 1 chooses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dulbe_peft.classifiers.checks import check_unit_rows
from dulbe_peft.classifiers.prototype import PrototypeClassifier
from dulbe_peft.utils.checks import check_int


class BofaClassifier(PrototypeClassifier):
    """logits = tau z . p_c, with p_c = (1 - lambda) e_c + lambda v_c, not normalised again.

    v_c is the direction of the class's mean unit feature. lambda is the one of `grid` values from 0 to 1 with the best
    accuracy on the first task's own images. Where several are best, the middle one of them is taken: two classes are
    often told apart by any lambda, and then an end of the grid would be no choice. It never changes afterwards.

    The paper makes v_c of old classes anew with each task's projection, from class means of the unprojected feature. A
    classifier sees projected features alone, so here v_c stays as it was when the class came; the learner's setting
    drift="linear" moves it along. The Gaussian discriminant on unprojected features that the published code adds at
    the test is left out for the same reason; the classifier `lda` is the nearest to it. In that code lambda weighs the
    text when it is searched and the image when it is used; here it weighs the image both times, as in the paper.

    Args:
        embed_dim: d, width of the features.
        logit_scale: tau.
        grid: number of values of lambda that are tried.

    Attributes:
        sums: (C, d), float64, sum of each class's unit features.
        counts: (C,), int64, images of each class.
        text_embeds: e_c, (C, d), unit vectors.
        image_weight: lambda, a number.

    Reference:
        "BOFA: Bridge-Layer Orthogonal Low-Rank Fusion for CLIP-Based Class-Incremental Learning", arXiv 2511.11421.
    """

    name = "bofa"
    needs_text = True
    text_embeds: torch.Tensor
    image_weight: torch.Tensor

    def __init__(self, embed_dim: int, logit_scale: float = 100.0, grid: int = 21) -> None:
        super().__init__(embed_dim, logit_scale)
        self.grid = check_int("grid", grid, 2)
        self.register_rows("text_embeds", embed_dim)
        self.register_buffer("image_weight", torch.zeros(()))

    def learn(
        self, names: Sequence[str], images: torch.Tensor, labels: torch.Tensor, texts: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        assert texts is not None
        changes = super().learn(names, images, labels, texts) | {"text_embeds": texts}
        if not self._class_names:
            twin = self.fork()
            twin._install(changes)
            by_text, by_image = images @ texts.T, images @ twin.visual_prototypes.T
            weights = torch.linspace(0, 1, self.grid, device=images.device)
            right = torch.stack([(torch.lerp(by_text, by_image, w).argmax(1) == labels).sum() for w in weights])
            best = (right == right.max()).nonzero()[:, 0]
            changes["image_weight"] = weights[best[len(best) // 2]]
        return changes

    @property
    def prototypes(self) -> torch.Tensor:
        """p_c, (C, d), float32."""
        return torch.lerp(self.text_embeds.float(), self.visual_prototypes, self.image_weight.float())

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        return self.logit_scale * images @ self.prototypes.T

    def check_state(self, state: Mapping[str, torch.Tensor]) -> None:
        super().check_state(state)
        check_unit_rows("text_embeds", state["text_embeds"])
        if not 0 <= state["image_weight"] <= 1:
            raise ValueError(f"image_weight must lie in [0, 1], got {float(state['image_weight'])}")
