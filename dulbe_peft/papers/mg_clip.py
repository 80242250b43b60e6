"""MG-CLIP: one LoRA pair for all tasks; training stops before the logits of the wrong classes move far.

    W = W_0 + (alpha / r) B A    all tasks train the same A and B; at first A is Xavier-uniform and B is 0; alpha = 1

    n_e: mean logit of the wrong classes over task 1's images after e epochs; n_0: the same before training
    E:   the last epoch before the first one with |n_0 - n_e| / n_0 > 0.1, but at least 1; later tasks train E epochs

Task 1 is trained once and stops after the epoch that crosses the limit, so it may train one epoch more than later
tasks. E is at most `epochs` of the learner's settings, and equals `epochs` if n_0 is not positive: n_0 is 0 for a
single class and may be negative for a SigLIP model.

The classifier is a cosine classifier, initialised with the class means and mixed with the text classifier:

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
from dulbe_peft.classifiers.checks import check_directions
from dulbe_peft.classifiers.rule import Rule
from dulbe_peft.classifiers.state import Layout, State, per_class
from dulbe_peft.papers.fitting import class_means, fit, minibatches, task_generator
from dulbe_peft.strategies.base import Memory, Modes, NewTask, Strategy, replaced_modes
from dulbe_peft.strategies.lora import uniform_bases
from dulbe_peft.subspaces.occupation import OccupationStatistics
from dulbe_peft.utils.settings import AtLeastOne, Positive, Seed


@dataclass(frozen=True)
class MgClip(Strategy):
    """Train one pair (A, B) in all tasks, for a number of epochs that is chosen on task 1."""

    name = "mg_clip"
    memory_kind = dict
    trains_bases = True
    folds = False
    orthonormal = False
    classifiers = ("visual_agent",)
    target_modules = ("k_proj", "v_proj")
    alpha: Positive = 1.0
    threshold: Positive = 0.1  # allowed change of the mean wrong logit, relative to its value before training

    def plan(self, task: NewTask) -> Modes | None:
        """Return P = (alpha / r) A' with A Xavier-uniform, so that B P' is the scaled update."""
        if task.index:
            return None

        def bound(name: str, width: int) -> float:
            return self.alpha / task.rank(name) * math.sqrt(6 / (width + task.rank(name)))

        return task.modes(uniform_bases(task, bound))

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[torch.Tensor]]:
        """Train A itself instead of P, because the length of Adam's steps does not depend on the parameter's scale."""
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
    """Return the scores, (n, C), of unit features z, (n, d): text scores mixed with those of the visual agents."""
    by_text, by_agent = (z @ texts.T).softmax(1), (z @ agents.T).softmax(1)
    return ((by_text + share * by_agent) / (1 + share)).log()


@dataclass(frozen=True)
class VisualAgentRule(Rule):
    """MG-CLIP's classifier: logits = log p_c. The agents V_c of a task are trained with the task and then fixed.

    V_c starts as the mean of the class's unit features, not normalised again. Adam then minimises the cross-entropy of
    unscaled cosines over the new classes only, so old agents get no gradient. A softmax of unscaled cosines is nearly
    uniform, which is why its `weight` is as large as 4. The learning rate decays on a cosine to 1 % over a task.

    Args:
        epochs: Number of passes over a task's features.
        batch_size: Features per step.
        learning_rate: Learning rate of Adam at the start of each task.
        weight: Weight of the agents' probabilities beside those of the texts.
        seed: Seed of the order of the features.

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
    summary = "MG-CLIP's rule: class means that are trained further and mixed with the text classifier"
    belongs_to = "mg_clip"
    needs_text = True
    can = frozenset({"move", "follow"})

    def tensors(self) -> dict[str, Layout]:
        return {"agents": per_class(self.embed_dim, moves=True)}

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        labels = labels - state.classes  # the softmax covers the new classes only
        agents = class_means(images, labels).to(images)
        check_directions(agents, new)
        generator = task_generator(self.seed, state.classes)
        optimizer = torch.optim.Adam([agents.requires_grad_()], lr=self.learning_rate)
        steps, least = self.epochs * -(-len(images) // self.batch_size), 0.01 * self.learning_rate
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps), eta_min=least)

        def loss(_: int, rows: Tensor) -> Tensor:
            return F.cross_entropy(images[rows] @ F.normalize(agents, dim=1).T, labels[rows])

        batches = ([rows] for _ in range(self.epochs) for rows in minibatches(images, self.batch_size, generator))
        fit(loss, optimizer, batches, schedule)  # each batch counts as an epoch, so the schedule advances every step
        return state.with_rows(agents=agents.detach())

    def formula(self, state: State) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        return mix, {
            "texts": self.logit_scale * state.text_embeds.float(),
            "agents": F.normalize(state.agents.float(), dim=1),
            "share": torch.tensor(self.weight, device=state.device),
        }
