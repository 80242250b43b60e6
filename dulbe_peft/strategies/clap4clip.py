"""CLAP4CLIP: the model stays as it is; the classifier `clap4clip`, where its rules stand, learns Gaussians of texts.

Reference: Jha et al., "CLAP4CLIP: Continual Learning with Probabilistic Finetuning for Vision-Language Models", arXiv
2403.19137.
"""

from dataclasses import dataclass

from dulbe_peft.strategies.frozen import Frozen


@dataclass(frozen=True)
class Clap4Clip(Frozen):
    """A frozen model, read through CLAP4CLIP's classifier."""

    name = "clap4clip"
    classifiers = ("clap4clip", "bridge")
