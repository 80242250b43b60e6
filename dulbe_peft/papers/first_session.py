"""First Session Adaptation: plain LoRA is trained on the first task only; later tasks update only the classifiers.

Reference: Panos et al., "First Session Adaptation: A Strong Replay-Free Baseline for Class-Incremental Learning",
arXiv 2303.13199.
"""

from dataclasses import dataclass

from dulbe_peft.strategies.base import NewTask
from dulbe_peft.strategies.lora import Lora


@dataclass(frozen=True)
class FirstSession(Lora):
    """Train LoRA on the first task and freeze both towers afterwards."""

    name = "first_session"
    classifiers = ("lda",)

    def epochs(self, task: NewTask) -> int:
        return 0 if task.index else task.args.epochs
