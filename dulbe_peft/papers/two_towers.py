"""Two towers: the features of the untouched and of the adapted model, side by side.

    z = [z_0; z_1] / sqrt(2)      e = [e_0; e_1] / sqrt(2)      0: the untouched model, 1: the adapted one
    tau z . e_c = (tau z_0 . e_0c + tau z_1 . e_1c) / 2         so names are compared by the mean of both scores

All classifiers learn vectors of this double width. The features of the untouched model come from the user's store.
"""

import math
from typing import Any

import torch
from torch import Tensor

from dulbe_peft.encoders.encoding import Encoding, untouched
from dulbe_peft.encoders.loading import embed_dim


def joined(first: Tensor, second: Tensor) -> Tensor:
    """Return unit vectors, (n, 2 d), from two unit vectors, (n, d), for each row."""
    return torch.cat([first, second], dim=1) / math.sqrt(2)


class TwoTowers(Encoding):
    """Join the features of the untouched model and of another encoding; None is the adapted model as it is."""

    queries = True

    def __init__(self, second: Encoding | None = None) -> None:
        given = second or Encoding("", {})
        super().__init__(f"{type(given).__name__} {given.settings}", given.tensors)
        self.second = given

    def image_embeds(self, clip: object, pixels: Tensor, queries: Tensor | None) -> Tensor:
        assert queries is not None
        return joined(queries, self.second.image_embeds(clip, pixels, queries))

    def width(self, clip: Any) -> int:
        return 2 * embed_dim(clip)

    def text_embeds(self, clip: Any, tokens: dict[str, Tensor]) -> Tensor:
        with untouched(clip):
            first = Encoding("", {}).text_embeds(clip, tokens)
        return joined(first, self.second.text_embeds(clip, tokens))
