"""The two strategies that train nothing of the model: the classifiers learn, from the features of the model as it is.

    frozen   any classifiers
    rapf     the classifier `rapf`, which learns a linear map of the features; its rules and settings stand there

Reference of RAPF: "Class-Incremental Learning with CLIP: Adaptive Representation Adjustment and Parameter Fusion",
arXiv 2407.14143.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from dulbe_peft.strategies.base import Strategy


@dataclass(frozen=True)
class Frozen(Strategy):
    """Training-free learning; needs no adapter, and one pass over each task's images."""

    name = "frozen"
    adapts = False
    classifiers: ClassVar[tuple[str, ...]] = ("bayes", "ranpac", "lda", "bridge", "prototype")


@dataclass(frozen=True)
class Rapf(Frozen):
    """A frozen model, read through RAPF's classifier."""

    name = "rapf"
    classifiers = ("rapf", "bridge")
