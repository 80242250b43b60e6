"""Training-free learning: the model stays as it is, and the classifiers learn from its features.

Papers whose rule is a classifier alone add their names here; `classifiers` has the rule and the reference.
"""

from dataclasses import dataclass
from typing import ClassVar

from dulbe_peft.strategies.base import Strategy


@dataclass(frozen=True)
class Frozen(Strategy):
    """Training-free learning; needs no adapter, and one pass over each task's images."""

    name = "frozen"
    adapts = False
    classifiers: ClassVar[tuple[str, ...]] = ("bayes", "lda", "bridge", "prototype")


@dataclass(frozen=True)
class Rapf(Frozen):
    """RAPF: the classifier `rapf` learns a linear map of the features."""

    name = "rapf"
    classifiers = ("rapf", "bridge")


@dataclass(frozen=True)
class Engine(Frozen):
    """ENGINE: the classifier `engine` learns units for both branches."""

    name = "engine"
    classifiers = ("engine", "bridge")


@dataclass(frozen=True)
class Proof(Frozen):
    """PROOF: the classifier `proof` learns projections of the features."""

    name = "proof"
    classifiers = ("proof", "bridge")


@dataclass(frozen=True)
class Clap4Clip(Frozen):
    """CLAP4CLIP: the classifier `clap4clip` learns Gaussians of texts."""

    name = "clap4clip"
    classifiers = ("clap4clip", "bridge")


@dataclass(frozen=True)
class ClgCbm(Frozen):
    """CLG-CBM: the classifier `clg_cbm` learns layers of concepts, the texts of the classes."""

    name = "clg_cbm"
    classifiers = ("clg_cbm", "bridge")
