"""MG-CLIP: one LoRA pair for all tasks, trained for as few epochs as keep the wrong classes' logits in place.

    W = W_0 + (alpha / r) B A    A and B trained on from task to task; alpha = 1, A Xavier-uniform and B 0 at first

    n_e: mean logit of the wrong classes over task 1's images after e epochs; n_0 is the untrained model's
    E:   the last epoch before the first one with |n_0 - n_e| / n_0 > 0.1, but at least 1; later tasks train E epochs

Task 1 is trained once and stops after the epoch that crosses the limit, so it may have one epoch more than the later
tasks. E is at most `epochs` of the learner's settings, and is `epochs` where n_0 is not positive: it is 0 for a single
class, and may be negative for a SigLIP model.

Its classifier is a cosine classifier that starts at the class means, mixed with the text classifier:

    p_c = (softmax_c(tau z . e_c) + w softmax_c(cos(z, V_c))) / (1 + w)          w = 4

Reference: "Mind the Gap: Preserving and Compensating for the Modality Gap in CLIP-Based Continual Learning", arXiv
2507.09118, and the authors' public code.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.adapter.linear import Updates
from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.checks import check_directions
from dulbe_peft.papers.fitting import class_means, fit, minibatches, task_generator
from dulbe_peft.strategies.base import Memory, Modes, NewTask, Strategy, replaced_modes
from dulbe_peft.strategies.lora import uniform_bases
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.utils.settings import AtLeastOne, Positive, Seed


@dataclass(frozen=True)
class MgClip(Strategy):
    """One pair (A, B) for all tasks, and a number of epochs that task 1 chooses."""

    name = "mg_clip"
    trains_bases = True
    folds = False
    orthonormal = False
    classifiers = ("visual_agent",)
    target_modules = ("k_proj", "v_proj")
    alpha: Positive = 1.0
    threshold: Positive = 0.1  # how far the mean wrong logit may move, as a part of its value before training

    def plan(self, task: NewTask) -> Modes | None:
        """P = (alpha / r) A' with A Xavier-uniform, so that B P' is the scaled update."""
        if task.index:
            return None

        def bound(name: str, width: int) -> float:
            return self.alpha / task.rank(name) * math.sqrt(6 / (width + task.rank(name)))

        return task.modes(uniform_bases(task, bound))

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[torch.Tensor]]:
        """Train A itself, not P: a step of Adam has the same length whatever the scale of what it trains."""
        adapter, layers = task.adapter_name, task.layers
        scales = {name: self.alpha / task.rank(name) for name in layers}
        downs = {name: (layer.dulbe_P[adapter] / scales[name]).requires_grad_() for name, layer in layers.items()}

        def scaled_pair(name: str) -> Updates:
            return [(scales[name] * downs[name], layers[name].current_up(adapter))]

        with replaced_modes(task, layers, scaled_pair):
            yield list(downs.values())
        for name, down in downs.items():
            layers[name].dulbe_P[adapter] = (scales[name] * down).detach()

    def epochs(self, task: NewTask) -> int:
        if not task.index:
            return task.args.epochs
        assert isinstance(task.memory, dict)
        return int(task.memory["epochs"])

    def stop_early(self, task: NewTask, epoch: int, wrong_logit: Callable[[], float]) -> bool:
        if task.index:
            return False
        if epoch == 0:
            task.notes["start"] = wrong_logit()
            return False
        start = task.notes["start"]
        crossed = start > 0 and abs(start - wrong_logit()) / start > self.threshold
        task.notes["epochs"] = max(1, epoch - 1) if crossed else epoch
        return crossed

    def remember(self, task: NewTask, inputs: OccupationStatistics) -> Memory | None:
        return task.memory if task.index else {"epochs": torch.tensor(int(task.notes["epochs"]))}


def mix(z: torch.Tensor, texts: torch.Tensor, agents: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Scores, (n, C), of unit features z, (n, d): those of the texts mixed with those of the image means."""
    by_text, by_agent = (z @ texts.T).softmax(1), (z @ agents.T).softmax(1)
    return ((by_text + share * by_agent) / (1 + share)).log()


class VisualAgentClassifier(Classifier):
    """logits = log p_c of the mix; the agents V_c of a task are trained when the task is learned, and then stay.

    V_c starts as the mean of the class's unit features, not normalised again. Adam then minimises the cross-entropy of
    the plain cosines over the new classes alone, so old rows get no gradient. A softmax of plain cosines is nearly
    flat; the `weight` of 4 is on that flat distribution. A cosine takes the learning rate to 1 % over a task.

    Reference:
        "Mind the Gap: Preserving and Compensating for the Modality Gap in CLIP-Based Continual Learning", arXiv
        2507.09118; settings from the authors' configuration for CIFAR-100.
    """

    epochs: Annotated[int, Ge(0)] = 3
    batch_size: AtLeastOne = 64
    learning_rate: Positive = 5e-4
    weight: Positive = 4.0
    seed: Seed = 0

    name = "visual_agent"
    summary = "MG-CLIP's rule: class means that are trained further, mixed with the text classifier"
    belongs_to = "mg_clip"
    needs_text = True
    moves = ("agents",)

    def register(self) -> None:
        self.register_rows("agents", self.embed_dim)

    def added(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        labels = labels - len(self._class_names)  # the softmax is over the task's classes
        agents = class_means(images, labels).to(images)
        check_directions(agents, new)
        generator = task_generator(self.seed, len(self._class_names))
        optimizer = torch.optim.Adam([agents.requires_grad_()], lr=self.learning_rate)
        steps, least = self.epochs * -(-len(images) // self.batch_size), 0.01 * self.learning_rate
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps), eta_min=least)

        def loss(_: int, rows: Tensor) -> Tensor:
            return F.cross_entropy(images[rows] @ F.normalize(agents, dim=1).T, labels[rows])

        every = ([rows] for _ in range(self.epochs) for rows in minibatches(images, self.batch_size, generator))
        fit(loss, optimizer, every, schedule)  # the learning rate falls after every step
        return self.with_rows(agents=agents.detach())

    def formula(self) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        return mix, {
            "texts": self.logit_scale * self.text_embeds.float(),
            "agents": F.normalize(self.agents.float(), dim=1),
            "share": torch.tensor(self.weight, device=self.device),
        }
