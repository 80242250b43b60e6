"""APER with adapters: the first task trains small networks beside the MLPs; features of both towers are then joined.

    y   = MLP(x) + 0.1 (U relu(D x + b) + c)       in each block; D (bottleneck, width), U (width, bottleneck) from 0
    z   = [z_0; z_1] / sqrt(2)                      z_0: the untouched tower, z_1: with these networks
    class c: the mean of its z; an image goes to the class with the largest cosine: the classifier `prototype`

Only the first task trains. Its loss is the cross-entropy over the task's names, or with head=cosine, as in the paper,
over sigma cos(z_1, w_c) with w and sigma, from 1 on, trained with the task and then dropped.

Reference: Zhou et al., "Revisiting Class-Incremental Learning with Pre-Trained Models: Generalizability and
Adaptivity are All You Need", arXiv 2303.07338 (IJCV 2025), and its public toolbox: bottleneck 64, 1,189,632
parameters on ViT-B, SGD at 0.01 with momentum 0.9, a decay of 5e-4, batches of 48, and 20 epochs. Here Adam has 1e-3
as its rate. The paper joins features that are not normalised.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.encoders.encoding import Encoding
from dulbe_peft.encoders.loading import embed_dim, unit_image_embeds
from dulbe_peft.papers.adapters import beside_mlps, bottleneck, mlps_of, started, width_of_mlps
from dulbe_peft.papers.fitting import uniform
from dulbe_peft.papers.two_towers import TwoTowers
from dulbe_peft.strategies.base import Memory, NewTask, Step, Strategy
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.utils.processes import used_by_all
from dulbe_peft.utils.settings import AtLeastOne, Positive

NAMES = ("down", "up", "down_bias", "up_bias")


class Adapted(Encoding):
    """Encode images with networks beside the MLPs of the vision tower."""

    def __init__(self, tensors: Mapping[str, Tensor], scale: float) -> None:
        super().__init__(str(scale), tensors)
        self.scale = scale

    def image_embeds(self, clip: Any, pixels: Tensor, queries: Tensor | None) -> Tensor:
        def update(block: int, x: Tensor) -> Tensor:
            return self.scale * bottleneck(x, *(self.tensors[name][block] for name in NAMES))

        with beside_mlps(mlps_of(clip), update):
            return unit_image_embeds(clip, pixels)


@dataclass(frozen=True)
class Aper(Strategy):
    """Train networks beside the MLPs on the first task, and join the features of both towers."""

    bottleneck: AtLeastOne = 64
    scale: Positive = 0.1
    head: Literal["text", "cosine"] = "text"

    name = "aper"
    trains_adapter = False
    published_rate = 1e-3
    classifiers = ("prototype", "bayes")

    def encoding(self, memory: Memory | None) -> Encoding:
        return TwoTowers(Adapted(memory, self.scale) if isinstance(memory, dict) else None)

    def plan(self, task: NewTask) -> None:
        """Keep the modes, which stay at 0."""

    def epochs(self, task: NewTask) -> int:
        return 0 if task.index else task.args.epochs

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[Tensor]]:
        if task.index:
            yield []
            return
        assert task.encoder is not None and task.images is not None
        clip, device, generator = task.encoder.clip, task.encoder.device, task.generator(salt=2)
        blocks, width, r = len(mlps_of(clip)), width_of_mlps(clip), self.bottleneck
        tensors = {"down": started(generator, blocks, r, width), "up": torch.zeros(blocks, width, r)}
        tensors |= {"down_bias": torch.zeros(blocks, r), "up_bias": torch.zeros(blocks, width)}
        head = {}
        if self.head == "cosine":
            classes, d = len(task.images.images.class_names), embed_dim(clip)
            head = {"rows": uniform(generator, d, classes, d), "sigma": torch.ones(())}
        made = {name: tensor.to(device).requires_grad_() for name, tensor in (tensors | head).items()}
        task.notes["tensors"] = {name: made[name] for name in NAMES}
        task.notes["head"] = {name: made[name] for name in head}
        with task.encoder.encoding_by(Adapted(task.notes["tensors"], self.scale)):
            yield list(made.values())

    def loss(self, task: NewTask, step: Step) -> Tensor:
        if head := task.notes["head"]:
            rows, sigma = F.normalize(used_by_all(head["rows"]), dim=1), used_by_all(head["sigma"])
            step.task_loss = F.cross_entropy(sigma * step.features @ rows.T, step.labels)
        return step.task_loss

    def remember(self, task: NewTask, inputs: OccupationStatistics) -> Memory | None:
        if task.index:
            return task.memory
        return {name: tensor.detach() for name, tensor in task.notes["tensors"].items()}
