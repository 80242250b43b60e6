"""MoE-Adapters: experts beside the MLP of every block, in both towers, mixed by a router.

    x     = the tokens of a block after its attention, before the norm that its MLP reads
    s     = x_0 W + noise (softplus(x_0 W_n) + 0.01)     x_0: the first token; noise: standard normal, in training
    g     = softmax of the `top` largest s, 0 elsewhere
    x'    = x + MLP(norm(x)) + scale sum_i g_i (U_i relu(D_i x + b_i) + c_i)
            D_i (bottleneck, width); U_i (width, bottleneck), b_i, c_i from 0

All tasks train the same experts and router with the cross-entropy over the task's names. With as many experts as
`top`, the published setting, nothing is sparse. In a causal text tower, x_0 is the start token, whose state is the
same for every text, so the gates of texts are constants. Towers without a class token have the mean token as x_0.

Reference: Yu et al., "Boosting Continual Learning of Vision-Language Models via Mixture-of-Experts Adapters", arXiv
2403.11549, and the class-incremental part of the authors' public code: one router, 2 experts, both taken, bottleneck
64, scale 0.1, dropout 0.1, AdamW at 1e-3 without decay, batches of 128, one epoch, and the prompt "a bad photo of a
{}."; 2.42 million parameters in the vision tower of ViT-B and 1.61 million in the text tower. The task routers and
autoencoders of the paper are for its stream of 11 data sets. That code also adds the noise when it predicts; here it
does not, so that an image has one feature.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge, Lt
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.encoders.encoding import Encoding
from dulbe_peft.encoders.loading import encoder_of, unit_image_embeds, unit_text_embeds
from dulbe_peft.papers.adapters import beside_mlps, mlp_blocks, started, width_of_mlps
from dulbe_peft.strategies.base import Memory, NewTask, Strategy
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.utils.settings import AtLeastOne, Positive

TOWERS = ("vision", "text")
NAMES = ("router", "noise", "down", "up", "down_bias", "up_bias")
LEAST_NOISE = 0.01


def gates(scores: Tensor, top: int) -> Tensor:
    """Return the softmax of the `top` largest scores of each row, and 0 elsewhere, (n, experts)."""
    best = scores.topk(min(top, scores.shape[1]), dim=1)
    return torch.zeros_like(scores).scatter(1, best.indices, best.values.softmax(dim=1))


def mixture(
    x: Tensor, share: Tensor, down: Tensor, up: Tensor, down_bias: Tensor, up_bias: Tensor, *, dropout: float = 0.0
) -> Tensor:
    """Return sum_i g_i (U_i relu(D_i x + b_i) + c_i), (n, tokens, width).

    Args:
        x: (n, tokens, width).
        share: g, (n, experts).
        down: D, (experts, r, width).
        up: U, (experts, width, r).
        down_bias: b, (experts, r).
        up_bias: c, (experts, width).
        dropout: Share of the hidden values that are set to 0; the others are scaled up.
    """
    hidden = (torch.einsum("ntw,erw->nter", x, down) + down_bias).relu()
    hidden = F.dropout(hidden, dropout, training=dropout > 0)
    return torch.einsum("nter,ewr,ne->ntw", hidden, up, share) + (share @ up_bias)[:, None]


class Experts(Encoding):
    """Encode images and texts with experts beside the MLPs of both towers."""

    def __init__(self, strategy: "MoeAdapters", tensors: Mapping[str, Tensor], training: bool = False) -> None:
        super().__init__(str(strategy), tensors)
        self.strategy, self.training = strategy, training

    def image_embeds(self, clip: object, pixels: Tensor, queries: Tensor | None) -> Tensor:
        with self._beside(clip, "vision"):
            return unit_image_embeds(clip, pixels)

    def text_embeds(self, clip: object, tokens: dict[str, Tensor]) -> Tensor:
        with self._beside(clip, "text"):
            return unit_text_embeds(clip, tokens)

    def _beside(self, clip: Any, tower: str) -> AbstractContextManager[None]:
        strategy, text = self.strategy, tower == "text"

        def update(block: int, x: Tensor) -> Tensor:
            router, noise, *networks = (self.tensors[f"{tower}.{name}"][block] for name in NAMES)
            first = x[:, 0] if text or encoder_of(clip).cls_token else x.mean(dim=1)
            scores = first @ router
            if self.training:
                scores = scores + torch.randn_like(scores) * (F.softplus(first @ noise) + LEAST_NOISE)
            dropout = strategy.dropout if self.training else 0.0
            return strategy.scale * mixture(x, gates(scores, strategy.top), *networks, dropout=dropout)

        return beside_mlps(mlp_blocks(clip, text), update)


@dataclass(frozen=True)
class MoeAdapters(Strategy):
    """Train experts and a router beside every MLP of both towers."""

    experts: AtLeastOne = 2
    top: AtLeastOne = 2
    bottleneck: AtLeastOne = 64
    scale: Positive = 0.1
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.1

    name = "moe_adapters"
    memory_kind = dict
    trains_adapter = False
    published_rate = 1e-3
    classifiers = ("text", "bayes")

    def encoding(self, memory: Memory | None) -> Encoding | None:
        return Experts(self, memory) if isinstance(memory, dict) else None

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[Tensor]]:
        assert task.encoder is not None
        old = task.memory
        if isinstance(old, dict):
            tensors = {name: tensor.clone() for name, tensor in old.items()}
        else:
            tensors = self._start(task.encoder.clip, task.generator(salt=2))
        made = {name: tensor.to(task.encoder.device).requires_grad_() for name, tensor in tensors.items()}
        task.notes["tensors"] = made
        with task.encoder.encoding_by(Experts(self, made, training=True)):
            yield list(made.values())

    def _start(self, clip: Any, generator: torch.Generator) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for tower in TOWERS:
            blocks, width = len(mlp_blocks(clip, tower == "text")), width_of_mlps(clip, tower == "text")
            each = blocks, self.experts
            tensors |= {
                f"{tower}.router": torch.zeros(blocks, width, self.experts),
                f"{tower}.noise": torch.zeros(blocks, width, self.experts),
                f"{tower}.down": started(generator, *each, self.bottleneck, width),
                f"{tower}.up": torch.zeros(*each, width, self.bottleneck),
                f"{tower}.down_bias": torch.zeros(*each, self.bottleneck),
                f"{tower}.up_bias": torch.zeros(*each, width),
            }
        return tensors

    def remember(self, task: NewTask, inputs: OccupationStatistics) -> Memory:
        return {name: tensor.detach() for name, tensor in task.notes["tensors"].items()}
