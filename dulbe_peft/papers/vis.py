"""VIS: features before the projection, mixed on the first task with class tokens of lower blocks; then fixed.

    h     = the pooled output of the vision tower, which the projection would read
    u     = h + U gelu(V [h_l] + b) + c                h_l: class tokens after the blocks at 1/2, 2/3, 5/6 and all of
                                                       the depth, of 12 blocks 6, 8, 10 and 12; U, c start at 0
    z     = u / |u|                                    what classifiers learn

    first task    cross-entropy of a linear head on u + penalty mean |u - h|^2; the head is then dropped
    later tasks   train nothing

The classifier of the paper is `ranpac` with 15,000 random features of u, a bias and targets of +1 and -1. Its answer
is that of targets 1 and 0, except that the bias is regularised.

Reference: "VIS", arXiv 2609.37888: hidden width 256, SGD at 0.01, batches of 64, 5 epochs, penalty 0.01, and features
that are not normalised. The paper's loss of the mixer is not known here, so the linear head is a choice.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dulbe_peft.encoders.encoding import Encoding, Unprojected, hooked, projection_of, vision_modules
from dulbe_peft.encoders.loading import encoder_of, unit_image_embeds
from dulbe_peft.papers.adapters import started
from dulbe_peft.papers.first_session import FirstTaskOnly, Start
from dulbe_peft.papers.linear_head import head_start, linear_head
from dulbe_peft.strategies.base import Memory, NewTask, Step
from dulbe_peft.utils.processes import used_by_all
from dulbe_peft.utils.settings import AtLeastOne, Weight

_BLOCK = re.compile(r"layers?\.\d+$")
SHARES = (1 / 2, 2 / 3, 5 / 6, 1.0)  # depths of the class tokens


def levels_of(clip: nn.Module) -> list[nn.Module]:
    """Return the blocks of the vision tower after which class tokens are read, from the lowest to the last."""
    blocks = [module for name, module in vision_modules(clip) if _BLOCK.search(name)]
    return [blocks[number - 1] for number in sorted({max(1, round(share * len(blocks))) for share in SHARES})]


def mixed(h: Tensor, tokens: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return u = h + U gelu(V t + b) + c, (n, width), for h, (n, width), and t, (n, levels * width)."""
    hidden = F.gelu(F.linear(tokens, tensors["down"], tensors["down_bias"]))
    return h + F.linear(hidden, tensors["up"], tensors["up_bias"])


def outputs(clip: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return h, (n, width), and the class tokens of all levels side by side, (n, levels * width), in float32."""
    read: list[Tensor] = []
    tokens: dict[int, Tensor] = {}

    def keep(level: int) -> Any:
        def hook(_: nn.Module, __: Any, result: Any) -> None:
            tokens[level] = (result[0] if isinstance(result, tuple) else result)[:, 0]

        return hook

    hooks: list[Any] = [(projection_of(clip).register_forward_pre_hook, lambda _, given: read.append(given[0]))]
    hooks += [(block.register_forward_hook, keep(level)) for level, block in enumerate(levels_of(clip))]
    with hooked(*hooks):
        unit_image_embeds(clip, pixels)
    return read[0].float(), torch.cat([tokens[level] for level in sorted(tokens)], dim=1).float()


class Pooled(Unprojected):
    """Encode images with h. Names are not compared with it, because the mixer changes it."""

    names = False

    def projection(self, clip: Any) -> None:
        return None


class Mixed(Pooled):
    """Encode images with u, normalised."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        Encoding.__init__(self, "", tensors)

    def image_embeds(self, clip: Any, pixels: Tensor, queries: Tensor | None) -> Tensor:
        h, tokens = outputs(clip, pixels)
        return F.normalize(mixed(h, tokens, self.tensors), dim=1)


class _Training(Pooled):
    """Return u and h of a batch side by side, neither of them normalised."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        Encoding.__init__(self, "training", tensors)

    def image_embeds(self, clip: Any, pixels: Tensor, queries: Tensor | None) -> Tensor:
        h, tokens = outputs(clip, pixels)
        return torch.cat([mixed(h, tokens, self.tensors), h], dim=1)


@dataclass(frozen=True)
class Vis(FirstTaskOnly):
    """Train a mixer of class tokens on the first task, and learn features before the projection."""

    hidden: AtLeastOne = 256
    penalty_weight: Weight = 0.01  # the paper's

    name = "vis"
    classifiers = ("ranpac", "bayes")

    def encoding(self, memory: Memory | None) -> Encoding:
        return Mixed(memory) if isinstance(memory, dict) else Pooled()

    def trained(self, tensors: Mapping[str, Tensor]) -> Encoding:
        return _Training(tensors)

    def start(self, task: NewTask, clip: Any, generator: torch.Generator) -> Start:
        assert task.images is not None
        if not encoder_of(clip).cls_token:
            raise ValueError(f"the strategy 'vis' reads class tokens, and a {type(clip).__name__} has none")
        width, levels = projection_of(clip).in_features, len(levels_of(clip))
        tensors = {"down": started(generator, self.hidden, levels * width), "down_bias": torch.zeros(self.hidden)}
        tensors |= {"up": torch.zeros(width, self.hidden), "up_bias": torch.zeros(width)}
        return tensors, {"rows": head_start(generator, len(task.images.images.class_names), width)}

    def loss(self, task: NewTask, step: Step) -> Tensor:
        u, h = step.features.chunk(2, dim=1)
        logits = linear_head(F.normalize(u, dim=1), used_by_all(task.notes["head"]["rows"]))
        step.task_loss = F.cross_entropy(logits, step.labels)
        return step.task_loss + self.penalty_weight * (u - h).square().sum(dim=1).mean()
