"""RanPAC: ridge regression on a wide random layer.

h = relu(z R)                  R: (d, M), independent normal entries, made from the seed and never stored
W = (G + lambda I)^-1 C        G = sum of h h',   column c of C = sum of h over the images of class c
logits = tau h' W
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.sums import RIDGES, RegressionSums, best_ridge, check_ridge, random_layer
from dulbe_peft.utils.checks import check_int


def random_ridge(z: torch.Tensor, projection: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (z @ projection).relu() @ weight


class RanpacClassifier(Classifier):
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
        self.ridge = check_ridge(ridge, ["auto"])
        RegressionSums.register(self, features, torch.float32)
        self.register_buffer("errors", torch.zeros(len(RIDGES), dtype=torch.float64))

    def lifted(self, images: Tensor) -> Tensor:
        """h of unit features z, (n, d) to (n, M), in the type of `images`."""
        layer = self.derived("layer", lambda: random_layer(self.embed_dim, self.features, self.seed))
        return (images @ self.derived(f"layer {images.dtype} {images.device}", lambda: layer.to(images))).relu()

    def _kept(self) -> RegressionSums:
        return RegressionSums(self.gram, self.sums, self.counts, self.lifted)

    def learn(self, names: Sequence[str], images: Tensor, labels: Tensor, texts: Tensor | None) -> dict[str, Tensor]:
        return self._kept().added(images, labels + len(self._class_names), len(names))

    def learn_more(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return self._kept().added(images, labels)

    def choose(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Add the held-back squared error of every ridge, a multiple of M."""
        ridges = [ridge * self.features for ridge in RIDGES]
        return {} if self.ridge != "auto" else {"errors": self.errors + self._kept().errors(images, labels, ridges)}

    def strength(self) -> float:
        """lambda."""
        return self.features * best_ridge(self.errors) if self.ridge == "auto" else float(self.ridge)

    def logits(self, images: Tensor) -> Tensor:
        return self.logit_scale * self.lifted(images) @ self.derived("solution", self._solve)

    def _solve(self) -> Tensor:
        return self._kept().solution(self.strength()).float().to(self.device)

    def formula(self) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        weight = self.logit_scale * self.derived("solution", self._solve)
        layer = random_layer(self.embed_dim, self.features, self.seed)
        return random_ridge, {"projection": layer.to(weight), "weight": weight}
