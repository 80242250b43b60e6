"""ENGINE: the model stays as it is; the classifier `engine`, where its rules stand, learns units for both branches.

Reference: Zhou et al., "External Knowledge Injection for CLIP-Based Class-Incremental Learning", ICCV 2025, arXiv
2503.08510.
"""

from dataclasses import dataclass

from dulbe_peft.strategies.frozen import Frozen


@dataclass(frozen=True)
class Engine(Frozen):
    """A frozen model, read through ENGINE's classifier."""

    name = "engine"
    classifiers = ("engine", "bridge")
