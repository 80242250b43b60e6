"""The nearest-class-mean classifier: each class is the direction of its mean image feature."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.checks import check_directions


class PrototypeClassifier(Classifier):
    """Nearest class mean: logits = tau z . v_c, with v_c the normalised sum of the unit features of class c.

    Attributes:
        sums: (C, d), float64, sum of the unit features of each class.
        counts: (C,), int64, number of images of each class.

    Reference:
        Mensink et al., "Distance-Based Image Classification", 2013, section 3, with the cosine as the measure.
    """

    name = "prototype"
    summary = "class means: each class is the mean of its training images; an image goes to the nearest mean"
    updates = True
    adds_up: ClassVar[tuple[str, ...] | None] = ("counts", "sums")

    def register(self) -> None:
        self.register_rows("counts", dtype=torch.int64)
        self.register_rows("sums", self.embed_dim, dtype=torch.float64)

    def added(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        kept, device = self.with_new_rows(len(new)), self.sums.device
        sums = kept["sums"].index_add(0, labels.to(device), images.to(device).double())
        check_directions(sums[len(sums) - len(new) :], new)
        return {"sums": sums, "counts": kept["counts"] + torch.bincount(labels, minlength=len(sums))}

    def without_image(self, image: Tensor, label: int) -> dict[str, Tensor]:
        changes = self.sums_without(image, label)
        check_directions(changes["sums"][[label]], [self._class_names[label]])
        return changes

    @property
    def visual_prototypes(self) -> Tensor:
        """v_c, (C, d), float32 unit vectors."""
        return self.derived("prototypes", lambda: F.normalize(self.sums, dim=1).float().to(self.device))

    def logits(self, images: Tensor) -> Tensor:
        return self.logit_scale * images @ self.visual_prototypes.T

    def left_out(self, images: Tensor, labels: Tensor) -> Tensor:
        scores = self.logits(images)
        rest = self.sums[labels.to(self.sums.device)] - images.to(self.sums)
        target_scores = self.logit_scale * (images * F.normalize(rest, dim=1).to(images)).sum(dim=1, keepdim=True)
        return scores.scatter(1, labels[:, None], target_scores)

    def moved(self, matrix: Tensor) -> dict[str, Tensor]:
        """Replace v_c by the direction of v_c M. The length of the sum, and so the weight of new images, is kept."""
        directions = F.normalize(self.sums @ matrix.to(self.sums.device), dim=1)
        return {"sums": directions * self.sums.norm(dim=1, keepdim=True)}
