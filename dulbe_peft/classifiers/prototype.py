"""The nearest-class-mean classifier: each class is the direction of its mean image feature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.checks import check_directions
from dulbe_peft.classifiers.keeping import takes
from dulbe_peft.classifiers.rule import Rule, sums_without
from dulbe_peft.classifiers.state import Fitted, Layout, State, once, per_class


@dataclass(frozen=True)
class PrototypeRule(Rule):
    """Nearest class mean: logits = tau z . v_c, with v_c the normalised sum of the unit features of class c.

    Attributes:
        sums: (C, d), float64, sum of the unit features of each class.
        counts: (C,), int64, number of images of each class.

    Reference:
        Mensink et al., "Distance-Based Image Classification", 2013, section 3, with the cosine as the measure.
    """

    name = "prototype"
    summary = "class means: each class is the mean of its training images; an image goes to the nearest mean"
    can: ClassVar[frozenset[str]] = frozenset({"update", "merge", "forget images", "move", "follow"})

    def tensors(self) -> dict[str, Layout]:
        return {
            "counts": per_class(dtype=torch.int64, adds=True, power=1),
            "sums": per_class(self.embed_dim, dtype=torch.float64, adds=True, power=1),
        }

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        kept, device = state.with_new_rows(len(new)), state.sums.device
        sums = kept["sums"].index_add(0, labels.to(device), images.to(device).double())
        check_directions(sums[len(sums) - len(new) :], new)
        return {"sums": sums, "counts": kept["counts"] + torch.bincount(labels, minlength=len(sums))}

    def without(self, state: State, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return sums_without(state, images, labels)

    def fitted(self, state: State) -> Prototypes:
        return Prototypes.of(self, state)

    def scores(self, state: State, images: Tensor) -> Tensor:
        return self.logit_scale * images @ self.fitted(state).visual_prototypes.T

    def left_out(self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor | None:
        if groups is not None:
            return super().left_out(state, images, labels, groups)
        scores = self.scores(state, images)
        rest = state.sums[labels.to(state.sums.device)] - images.to(state.sums)
        target_scores = self.logit_scale * (images * F.normalize(rest, dim=1).to(images)).sum(dim=1, keepdim=True)
        return scores.scatter(1, labels[:, None], target_scores)

    def moved(self, state: State, matrix: Tensor, lifted: bool = False) -> dict[str, Tensor]:
        """Replace v_c by the direction of v_c M. The length of the sum, and so the weight of new images, is kept."""
        directions = F.normalize(state.sums @ matrix.to(state.sums.device), dim=1)
        return {"sums": directions * state.sums.norm(dim=1, keepdim=True)}


class Prototypes(Fitted):
    """The class means."""

    @once
    def visual_prototypes(self) -> Tensor:
        """v_c, (C, d), float32 unit vectors."""
        return F.normalize(self.state.sums, dim=1).float().to(self.state.device)


class PrototypeClassifier(Classifier, rule=PrototypeRule, example="embed_dim=8"):
    """The cosine with the mean of each class's images; its settings are those of `PrototypeRule`."""

    rule: PrototypeRule
    sums: Tensor
    counts: Tensor

    if TYPE_CHECKING:

        @takes(PrototypeRule)
        def __init__(self) -> None: ...

    @property
    def visual_prototypes(self) -> Tensor:
        """v_c, (C, d), float32 unit vectors."""
        return self.rule.fitted(self.state).visual_prototypes
