"""Two strategies of your own: importing this file registers them."""

from dataclasses import dataclass

import torch

from dulbe_peft import Strategy, register_strategy
from dulbe_peft.strategies.lora import Lora


@register_strategy
@dataclass(frozen=True)
class RandomBases(Strategy):
    """Random orthonormal bases, new ones for every task."""

    name = "random_bases"
    salt: int = 0

    def plan(self, task):
        bases = {}
        for name, layer in task.layers.items():
            noise = torch.randn(layer.in_features, sum(task.ranks), generator=task.generator(self.salt))
            bases[name] = torch.linalg.qr(noise).Q
        return task.modes(bases)


@register_strategy
@dataclass(frozen=True)
class StayClose(Lora):
    """One LoRA pair, which stays close to where the last task left it."""

    name = "stay_close"
    weight: float = 1.0

    def penalty(self, task):
        if task.memory is None:
            return None
        moved = (now(task, name) - up.to(now(task, name)) for name, up in task.memory.items())
        return self.weight * sum(difference.square().sum() for difference in moved)

    def remember(self, task, inputs):
        return {name: now(task, name).detach().cpu().clone() for name in task.layers}


def now(task, name):
    return task.layers[name].current_up(task.adapter_name)
