"""SLCA: the base learns slowly, and the classifier `slca`, where its rules stand, is aligned anew after each task.

    W = W_0 + B A    one pair for all tasks, trained on as `lora` does, at a small learning rate

Reference: Zhang et al., "SLCA: Slow Learner with Classifier Alignment for Continual Learning on a Pre-trained Model",
arXiv 2303.05118; with LoRA as in its successor SLCA++, arXiv 2408.08295.
"""

from dataclasses import dataclass

from dulbe_peft.strategies.lora import Lora


@dataclass(frozen=True)
class Slca(Lora):
    """LoRA for all tasks, read through SLCA's classifier."""

    name = "slca"
    classifiers = ("slca", "bridge")
