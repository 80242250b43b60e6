"""RanPAC: ridge regression on a wide random layer.

h = relu(z R)      R: (d, M), independent normal entries, made from the seed and never stored
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from dulbe_peft.classifiers.ridge import RidgeSums
from dulbe_peft.utils.checks import check_int


class RanpacClassifier(RidgeSums):
    """Ridge regression from random ReLU features to one-hot classes.

    G and C are sums, so the solution for a lambda is the one on all data at once, but for the rounding of G to
    float32 when a task ends.

    A linear map of the features cannot move what is stored, for G is of features behind a ReLU; `move` leaves it.

    Args:
        embed_dim: d, width of the features.
        logit_scale: tau.
        features: M, width of the random layer. The paper has 10000; G takes 4 M^2 bytes.
        seed: of R.
        ridge: lambda, positive. "auto": chosen on held-back images of each task, from 1e-4 M to 100 M.

    Attributes:
        gram: G, (M, M), float32.
        sums: C transposed, (C, M), float64.
        counts: (C,), int64, images of each class.
        errors: held-back squared error of each ridge of the grid, over all tasks, float64.

    Reference:
        McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for Continual Learning", 2023. There the
        features are not normalised, and the last task alone chooses lambda, by its own images and classes.
    """

    name = "ranpac"

    def __init__(
        self,
        embed_dim: int,
        logit_scale: float = 100.0,
        features: int = 2000,
        seed: int = 0,
        ridge: float | Literal["auto"] = "auto",
    ) -> None:
        super().__init__(
            embed_dim, logit_scale, check_int("features", features, 1, 10**6), torch.float32, float(features), ridge
        )
        self.features = features
        self.seed = check_int("seed", seed, 0, 2**32 - 1)

    def lifted(self, images: torch.Tensor) -> torch.Tensor:
        projection = self.derived("projection", self._projection)
        kept = self.derived(f"projection {images.dtype} {images.device}", lambda: projection.to(images))
        return (images @ kept).relu()

    def formula(self) -> tuple[str, dict[str, torch.Tensor]]:
        weight = self.logit_scale * self.derived("solution", self._solve)
        return '(z @ t["projection"]).relu() @ t["weight"]', {
            "projection": self._projection().to(weight),
            "weight": weight,
        }

    def _projection(self) -> torch.Tensor:
        return random_layer(self.embed_dim, self.features, self.seed)


def random_layer(embed_dim: int, features: int, seed: int) -> torch.Tensor:
    """R, (d, M), float64, independent normal entries; the same for a seed in every version of the libraries."""
    # RandomState gives the same numbers in all versions of numpy; torch promises that for none of its generators.
    return torch.from_numpy(np.random.RandomState(seed).standard_normal((embed_dim, features)))
