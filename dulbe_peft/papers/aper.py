"""APER with adapters: the first task trains small networks beside the MLPs; features of both towers are then joined.

    x'  = x + MLP(norm(x)) + 0.1 (U relu(D x + b) + c)     in each block, for the tokens x before the norm;
                                                           D (bottleneck, width), U (width, bottleneck) and b, c from 0
    z   = [z_0; z_1] / sqrt(2)                      z_0: the untouched tower, z_1: with these networks
    class c: the mean of its z; an image goes to the class with the largest cosine: the classifier `prototype`

Only the first task trains. Its loss is the cross-entropy over the task's names, or with head=cosine, as in the paper,
over sigma cos(z_1, w_c) with w and sigma, from 1 on, trained with the task and then dropped.

Reference: Zhou et al., "Revisiting Class-Incremental Learning with Pre-Trained Models: Generalizability and
Adaptivity are All You Need", arXiv 2303.07338 (IJCV 2025), and its public toolbox: bottleneck 64, 1,189,632
parameters on ViT-B, dropout 0.1 behind the relu, SGD at 0.01 with momentum 0.9, a decay of 5e-4, batches of 48, and 20
epochs. Here Adam has 1e-3 as its rate. The paper joins features that are not normalised.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.encoders.encoding import Encoding
from dulbe_peft.encoders.loading import embed_dim, unit_image_embeds
from dulbe_peft.papers.adapters import beside_mlps, bottleneck, mlp_blocks, started, width_of_mlps
from dulbe_peft.papers.first_session import FirstTaskOnly, Start
from dulbe_peft.papers.fitting import uniform
from dulbe_peft.papers.two_towers import TwoTowers
from dulbe_peft.strategies.base import Memory, NewTask, Step
from dulbe_peft.utils.processes import used_by_all
from dulbe_peft.utils.settings import AtLeastOne, Positive

NAMES = ("down", "up", "down_bias", "up_bias")


class Adapted(Encoding):
    """Encode images with networks beside the MLPs of the vision tower."""

    def __init__(self, tensors: Mapping[str, Tensor], scale: float, dropout: float = 0.0) -> None:
        super().__init__(str(scale), tensors)
        self.scale, self.dropout = scale, dropout  # dropout in training only

    def image_embeds(self, clip: Any, pixels: Tensor, queries: Tensor | None) -> Tensor:
        def update(block: int, x: Tensor) -> Tensor:
            network = (self.tensors[name][block] for name in NAMES)
            return self.scale * bottleneck(x, *network, dropout=self.dropout)

        with beside_mlps(mlp_blocks(clip), update):
            return unit_image_embeds(clip, pixels)


@dataclass(frozen=True)
class Aper(FirstTaskOnly):
    """Train networks beside the MLPs on the first task, and join the features of both towers."""

    bottleneck: AtLeastOne = 64
    scale: Positive = 0.1
    dropout: Annotated[float, Ge(0), Lt(1)] = 0.1
    head: Literal["text", "cosine"] = "text"

    name = "aper"
    classifiers = ("prototype", "bayes")

    @property
    def needs_names(self) -> bool:
        return self.head == "text"

    def encoding(self, memory: Memory | None) -> Encoding:
        return TwoTowers(Adapted(memory, self.scale) if isinstance(memory, dict) else None)

    def trained(self, tensors: Mapping[str, Tensor]) -> Encoding:
        return Adapted(tensors, self.scale, self.dropout)

    def start(self, task: NewTask, clip: Any, generator: torch.Generator) -> Start:
        assert task.images is not None
        blocks, width, r = len(mlp_blocks(clip)), width_of_mlps(clip), self.bottleneck
        tensors = {"down": started(generator, blocks, r, width), "up": torch.zeros(blocks, width, r)}
        tensors |= {"down_bias": torch.zeros(blocks, r), "up_bias": torch.zeros(blocks, width)}
        if self.head == "text":
            return tensors, {}
        classes, d = len(task.images.images.class_names), embed_dim(clip)
        return tensors, {"rows": uniform(generator, d, classes, d), "sigma": torch.ones(())}

    def loss(self, task: NewTask, step: Step) -> Tensor:
        if head := task.notes["head"]:
            rows, sigma = F.normalize(used_by_all(head["rows"]), dim=1), used_by_all(head["sigma"])
            step.task_loss = F.cross_entropy(sigma * step.features @ rows.T, step.labels)
        return step.task_loss
