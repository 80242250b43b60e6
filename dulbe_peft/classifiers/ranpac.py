"""RanPAC: the ridge regression of `ridge` on the output of a wide random layer.

h = relu(z R)                  R: (d, M), independent normal entries, drawn from the seed and never stored
logits = tau w_c h' W
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
import torch
from annotated_types import Ge, Le
from torch import Tensor

from dulbe_peft.classifiers.keeping import takes
from dulbe_peft.classifiers.ridge import RidgeClassifier, RidgeRegression
from dulbe_peft.classifiers.state import Fitted, State, computing
from dulbe_peft.utils.settings import Positive
from dulbe_peft.utils.tensors import from_array

MOST_FEATURES = 50_000  # G then takes 9.3 GiB


def random_ridge(z: torch.Tensor, projection: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the scores, (n, C), of unit features z, (n, d), by a random layer and a matrix."""
    return (z @ projection).relu() @ weight


def random_layer(seed: int, width: int, features: int) -> torch.Tensor:
    """Return R, (width, features), float64, which is the same for a seed in every version of NumPy and PyTorch."""
    # RandomState draws the same numbers in all versions of NumPy. PyTorch does not guarantee this for its generators.
    return from_array(np.random.RandomState(seed).standard_normal((width, features)))


class RandomLayer(Fitted):
    """The `layer` of a rule, which depends on its settings alone, in the types and on the devices that are used."""

    reads = ()

    def __init__(self, rule: object, state: State) -> None:
        super().__init__(rule, state)
        self.layers: dict[tuple[torch.dtype, torch.device], Tensor] = {}

    def at(self, images: Tensor) -> Tensor:
        """Return the layer, (d, M), in the type and on the device of the images."""
        kind = images.dtype, images.device
        if kind not in self.layers:
            with computing():
                self.layers[kind] = self.rule.layer().to(images)
        return self.layers[kind]


@dataclass(frozen=True)
class RanpacRule(RidgeRegression):
    """Ridge regression from random ReLU features to one-hot classes.

    For a fixed lambda, the solution is the same as on all data at once, except that G is rounded to float32 after each
    task. `follow` corrects the sums by a linear map of h. `move` does not change them, because a linear map of z does
    not give a linear map of h.

    Args:
        features: M, width of the random layer. The paper uses 10000. G takes 4 M^2 bytes.
        seed: Seed of R.
        ridge: Lambda, positive. "auto" chooses it from 1e-4 M to 100 M on held-out images of each task.

    Attributes:
        gram: G, (M, M), float32.
        sums: C transposed, (C, M), float64. For `counts` and `errors`, see `RidgeRule`.

    Reference:
        McDonnell et al., "RanPAC: Random Projections and Pre-trained Models for Continual Learning", 2023. In the
        paper, features are not normalised, and only the images and classes of the last task choose lambda.
    """

    features: Annotated[int, Ge(1), Le(MOST_FEATURES)] = 2000
    seed: Annotated[int, Ge(0), Le(2**32 - 1)] = 0
    ridge: Positive | Literal["auto"] = "auto"

    can = RidgeRegression.can - {"move"}
    gram_type: ClassVar[torch.dtype] = torch.float32
    name = "ranpac"
    summary = "RanPAC: analytic ridge after a fixed random layer, so that class borders can be curved"

    @property
    def width(self) -> int:
        return self.features

    @property
    def unit(self) -> float:
        return self.features

    def moved(self, state: State, matrix: Tensor, lifted: bool = False) -> dict[str, Tensor]:
        return super().moved(state, matrix, lifted) if lifted else {}

    def lifted(self, state: State, images: Tensor) -> Tensor:
        return (images @ RandomLayer.of(self, state).at(images)).relu()

    def layer(self) -> Tensor:
        """Return R, (embed_dim, M), float64."""
        return random_layer(self.seed, self.embed_dim, self.features)

    def formula(self, state: State) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        weight = self.logit_scale * self.fitted(state).solution
        return random_ridge, {"projection": self.layer().to(weight), "weight": weight}


class RanpacClassifier(RidgeClassifier, rule=RanpacRule, example="embed_dim=8, features=100"):
    """Ridge regression on random features; its settings are those of `RanpacRule`."""

    rule: RanpacRule
    gram: Tensor
    sums: Tensor
    counts: Tensor

    if TYPE_CHECKING:

        @takes(RanpacRule)
        def __init__(self) -> None: ...
