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
    classifiers: ClassVar[tuple[str, ...]] = ("bayes", "lda")


def _read_by(title: str, name: str) -> type[Frozen]:
    """The strategy of a paper whose rule is the classifier of the same name."""
    said = f"Training-free learning that the classifier `{name}` reads; see there for the rule and its paper."
    kind: type[Frozen] = type(title, (Frozen,), {"name": name, "classifiers": (name,), "__doc__": said})
    return dataclass(frozen=True)(kind)


Rapf = _read_by("Rapf", "rapf")
Engine = _read_by("Engine", "engine")
Proof = _read_by("Proof", "proof")
Clap4Clip = _read_by("Clap4Clip", "clap4clip")
ClgCbm = _read_by("ClgCbm", "clg_cbm")
