"""The text classifier: a class is its name's embedding, as in zero-shot CLIP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from torch import Tensor

from dulbe_peft.classifiers.base import Classifier


class TextClassifier(Classifier):
    """logits = tau z . e_c, with e_c the unit text embedding of class c. It learns nothing from images.

    Reference:
        Radford et al., "Learning Transferable Visual Models From Natural Language Supervision", 2021, section 3.1.2.
    """

    name = "text"
    needs_text = True

    def __init__(self, embed_dim: int, logit_scale: float = 100.0) -> None:
        super().__init__(embed_dim, logit_scale)
        self.register_rows("text_embeds", embed_dim)

    def learn(self, names: Sequence[str], images: Tensor, labels: Tensor, texts: Tensor | None) -> dict[str, Tensor]:
        assert texts is not None
        return {"text_embeds": texts}

    def learn_more(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {}

    def merged(self, other: Self, places: Tensor) -> dict[str, Tensor]:
        return {}

    def logits(self, images: Tensor) -> Tensor:
        return self.logit_scale * images @ self.text_embeds.float().T
