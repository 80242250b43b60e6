"""PROOF: the model stays as it is; the classifier `proof`, where its rules stand, learns projections of the features.

Reference: Zhou et al., "Learning without Forgetting for Vision-Language Models", arXiv 2305.19270.
"""

from dataclasses import dataclass

from dulbe_peft.strategies.frozen import Frozen


@dataclass(frozen=True)
class Proof(Frozen):
    """A frozen model, read through PROOF's classifier."""

    name = "proof"
    classifiers = ("proof", "bridge")
