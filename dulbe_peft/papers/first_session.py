"""First Session Adaptation: plain LoRA is trained on the first task only; later tasks update only the classifiers.

`FirstTaskOnly` is the same for strategies that train tensors of their own, which change how images are encoded.

Reference: Panos et al., "First Session Adaptation: A Strong Replay-Free Baseline for Class-Incremental Learning",
arXiv 2303.13199.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dulbe_peft.encoders.encoding import Encoding
from dulbe_peft.strategies.base import Memory, NewTask, Strategy
from dulbe_peft.strategies.lora import Lora
from dulbe_peft.subspaces.occupation import OccupationStatistics

Start = tuple[dict[str, Tensor], dict[str, Tensor]]  # the tensors and the head, by name


@dataclass(frozen=True)
class FirstSession(Lora):
    """Train LoRA on the first task and freeze both towers afterwards."""

    name = "first_session"
    classifiers = ("lda",)

    def epochs(self, task: NewTask) -> int:
        return 0 if task.index else task.args.epochs


@dataclass(frozen=True)
class FirstTaskOnly(Strategy):
    """Train tensors, and a head that is dropped afterwards, on the first task, and keep the tensors as they are."""

    trains_adapter = False
    memory_kind = dict
    published_rate = 1e-3  # of Adam; both papers' 0.01 is that of SGD

    def start(self, task: NewTask, clip: Any, generator: torch.Generator) -> Start:
        """Return the tensors and the head from which training starts, on the CPU."""
        raise NotImplementedError

    def trained(self, tensors: Mapping[str, Tensor]) -> Encoding:
        """Return how images are encoded while the tensors are trained."""
        raise NotImplementedError

    def epochs(self, task: NewTask) -> int:
        return 0 if task.index else task.args.epochs

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[Tensor]]:
        if task.index:
            yield []
            return
        assert task.encoder is not None
        device, start = task.encoder.device, self.start(task, task.encoder.clip, task.generator(salt=2))
        for kind, tensors in zip(("tensors", "head"), start, strict=True):
            task.notes[kind] = {name: value.to(device).requires_grad_() for name, value in tensors.items()}
        with task.encoder.encoding_by(self.trained(task.notes["tensors"])):
            yield [*task.notes["tensors"].values(), *task.notes["head"].values()]

    def remember(self, task: NewTask, inputs: OccupationStatistics) -> Memory | None:
        if task.index:
            return task.memory
        return {name: tensor.detach() for name, tensor in task.notes["tensors"].items()}
