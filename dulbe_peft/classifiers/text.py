"""The text classifier: each class is the text embedding of its name, as in zero-shot CLIP."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.keeping import takes
from dulbe_peft.classifiers.rule import Rule, TextDim, projected, projected_and_linear
from dulbe_peft.classifiers.state import State


@dataclass(frozen=True)
class TextRule(Rule):
    """Text classifier: logits = tau z . e_c, with e_c the unit text embedding of class c. It ignores training images.

    Args:
        text_dim: Width of the texts, if they are compared with z = W u / |W u| of features u; 0 if with the features.

    Attributes:
        text_embeds: e_c, (C, `text_dim` or `embed_dim`), unit vectors.
        projection: W, (text_dim, embed_dim), if `text_dim` is not 0. Set it before the first class is learned.

    Reference:
        Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021, section 3.1.2.
    """

    text_dim: TextDim = 0

    name = "text"
    summary = "text classifier: the model after training, which compares images only with the names of the classes"
    needs_text = True
    can = frozenset({"update", "merge", "forget images"})

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        return {}

    def without(self, state: State, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {}

    def left_out(self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor:
        return self.scores(state, images)

    def scores(self, state: State, images: Tensor) -> Tensor:
        z = projected(state, images) if self.text_dim else images
        return self.logit_scale * z @ state.text_embeds.float().T

    def formula(self, state: State) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        if not self.text_dim:
            return super().formula(state)
        weight = self.logit_scale * state.text_embeds.float()
        return projected_and_linear, {"projection": state.projection, "weight": weight}


class TextClassifier(Classifier, rule=TextRule, example="embed_dim=8"):
    """The cosine with each class's text, without any image; its settings are those of `TextRule`."""

    rule: TextRule
    text_embeds: Tensor

    if TYPE_CHECKING:

        @takes(TextRule)
        def __init__(self) -> None: ...
