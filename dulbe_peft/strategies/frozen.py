"""Training-free learning: the model stays as it is, and the classifiers learn from its features."""

from dataclasses import dataclass
from typing import ClassVar

from dulbe_peft.strategies.base import Strategy


@dataclass(frozen=True)
class Frozen(Strategy):
    """Training-free learning; needs no adapter, and one pass over each task's images."""

    name = "frozen"
    adapts = False
    classifiers: ClassVar[tuple[str, ...]] = ("bayes", "lda")
