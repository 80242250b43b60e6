"""MG-CLIP's test rule: a cosine classifier that starts at the class means, mixed with the text classifier.

p_c = (softmax_c(tau z . e_c) + w softmax_c(cos(z, V_c))) / (1 + w)          w = 4
"""

from collections.abc import Callable, Sequence
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.checks import check_directions
from dulbe_peft.classifiers.fitting import class_means, fit, minibatches, task_generator
from dulbe_peft.utils.settings import AtLeastOne, Positive, Seed


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
