"""RanPAC: the regression of `ridge` on a wide random layer.

h = relu(z R)                  R: (d, M), independent normal entries, made from the seed and never stored
logits = tau w_c h' W
"""

from collections.abc import Callable
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor

from dulbe_peft.classifiers.ridge import RidgeRegression
from dulbe_peft.utils.settings import Positive

MOST_FEATURES = 50_000  # G then takes 9.3 GiB


def random_ridge(z: torch.Tensor, projection: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Scores, (n, C), of unit features z, (n, d): a random layer, and a matrix behind it."""
    return (z @ projection).relu() @ weight


def random_layer(seed: int, width: int, features: int) -> torch.Tensor:
    """R, (width, features), float64; the same for a seed in every version of the libraries."""
    # RandomState gives the same numbers in all versions of numpy; torch promises that for none of its generators.
    return torch.from_numpy(np.random.RandomState(seed).standard_normal((width, features)))


class RanpacClassifier(RidgeRegression):
    """Ridge regression from random ReLU features to one-hot classes.

    For a fixed lambda the solution is the one on all data at once, but for the rounding of G to float32 when a task
    ends. `follow` moves its sums by a map of h; `move` leaves them as they are, for no map of z is one of h.

    Args:
        features: M, width of the random layer. The paper has 10000; G takes 4 M^2 bytes.
        seed: of R.
        ridge: lambda, positive. "auto": chosen on held-back images of each task, from 1e-4 M to 100 M.

    Attributes:
        gram, sums, counts, errors: as for `RidgeClassifier`; `gram` is float32.

    Reference:
        McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for Continual Learning", 2023. There the
        features are not normalised, and the last task alone chooses lambda, by its own images and classes.
    """

    features: Annotated[int, Ge(1), Le(MOST_FEATURES)] = 2000
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = 0
    ridge: Positive | Literal["auto"] = "auto"

    name = "ranpac"
    summary = "RanPAC: analytic ridge after a fixed random layer, which lets it draw curved borders"

    def register(self) -> None:
        self.unit = self.features
        self._keep_sums(self.features, torch.float32)

    @classmethod
    def follows_drift(cls, drift: str = "auto") -> bool:
        return drift == "auto"

    def moved(self, matrix: Tensor) -> dict[str, Tensor]:
        return {}

    def lifted(self, images: Tensor) -> Tensor:
        layer = self.derived(f"layer {images.dtype} {images.device}", lambda: self._layer().to(images))
        return (images @ layer).relu()

    def _layer(self) -> Tensor:
        return random_layer(self.seed, self.embed_dim, self.features)

    def formula(self) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        weight = self.logit_scale * self.derived("solution", self._solve)
        return random_ridge, {"projection": self._layer().to(weight), "weight": weight}
