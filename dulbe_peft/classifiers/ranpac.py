"""RanPAC: ridge regression on a wide random layer.

h = relu(z R)                  R: (d, M), independent normal entries, made from the seed and never stored
W = (G + lambda I)^-1 C        G = sum of h h',   column c of C = sum of h over the images of class c
logits = tau w_c h' W                              w_c = (mean n / n_c)^3/4, as in `ridge`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from dulbe_peft.classifiers.ridge import RidgeRegression
from dulbe_peft.classifiers.sums import random_layer
from dulbe_peft.utils.checks import check_int


def random_ridge(z: torch.Tensor, projection: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (z @ projection).relu() @ weight


class RanpacClassifier(RidgeRegression):
    """Ridge regression from random ReLU features to one-hot classes.

    G and C are sums, so the solution for a lambda is the one on all data at once, but for the rounding of G to
    float32 when a task ends. `move` leaves it as it is: G is of features behind a ReLU.

    Args:
        features: M, width of the random layer. The paper has 10000; G takes 4 M^2 bytes.
        seed: of R.
        ridge: lambda, positive. "auto": chosen on held-back images of each task, from 1e-4 M to 100 M.

    Reference:
        McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for Continual Learning", 2023. There the
        features are not normalised, and the last task alone chooses lambda, by its own images and classes.
    """

    name = "ranpac"
    gram: Tensor
    sums: Tensor
    counts: Tensor
    errors: Tensor

    def __init__(
        self,
        embed_dim: int,
        logit_scale: float = 100.0,
        features: int = 2000,
        seed: int = 0,
        ridge: float | Literal["auto"] = "auto",
    ) -> None:
        super().__init__(embed_dim, logit_scale)
        self.features = check_int("features", features, 1, 10**6)
        self.seed = check_int("seed", seed, 0, 2**32 - 1)
        self.unit = self.features
        self._keep_sums(features, torch.float32, ridge)

    def lifted(self, images: Tensor) -> Tensor:
        """h of unit features z, (n, d) to (n, M), in the type of `images`."""
        layer = self.derived("layer", lambda: random_layer(self.embed_dim, self.features, self.seed))
        return (images @ self.derived(f"layer {images.dtype} {images.device}", lambda: layer.to(images))).relu()

    def formula(self) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        weight = self.logit_scale * self.derived("solution", self._solve)
        layer = random_layer(self.embed_dim, self.features, self.seed)
        return random_ridge, {"projection": layer.to(weight), "weight": weight}
