"""RAPF: the model stays as it is; the classifier `rapf`, where its rules stand, learns a linear map of the features.

Reference: "Class-Incremental Learning with CLIP: Adaptive Representation Adjustment and Parameter Fusion",
arXiv 2407.14143.
"""

from dataclasses import dataclass

from dulbe_peft.strategies.frozen import Frozen


@dataclass(frozen=True)
class Rapf(Frozen):
    """A frozen model, read through RAPF's classifier."""

    name = "rapf"
    classifiers = ("rapf", "bridge")
