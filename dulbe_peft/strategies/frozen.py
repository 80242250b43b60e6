"""Training-free learning: the model does not change, and the classifiers learn from its features."""

from dataclasses import dataclass
from typing import ClassVar

from dulbe_peft.strategies.base import Strategy


@dataclass(frozen=True)
class Frozen(Strategy):
    """Training-free learning. It needs no adapter and makes one pass over the images of each task."""

    name = "frozen"
    adapts = False
    classifiers: ClassVar[tuple[str, ...]] = ("bayes", "lda")
