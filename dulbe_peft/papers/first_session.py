"""First Session Adaptation: plain LoRA on the first task alone; later tasks only teach the classifiers.

Reference: Panos et al., "First Session Adaptation: A Strong Replay-Free Baseline for Class-Incremental Learning",
arXiv 2303.13199.
"""

from dataclasses import dataclass

from dulbe_peft.strategies.base import NewTask
from dulbe_peft.strategies.lora import Lora


@dataclass(frozen=True)
class FirstSession(Lora):
    """LoRA on the first task, both towers frozen afterwards."""

    name = "first_session"
    classifiers = ("lda",)

    def epochs(self, task: NewTask) -> int:
        return 0 if task.index else task.args.epochs
