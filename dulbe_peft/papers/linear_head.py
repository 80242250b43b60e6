"""A linear head on unit features: the one that a prompt strategy trains with head=linear, or one that is trained here.

x = sqrt(d) z,  score = W x + b

The rows of a task are trained with the cross-entropy over the task's classes, and never change afterwards. With a
strategy that trains them together with the model, those rows are used. Otherwise they are trained on the features.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.rule import Rule
from dulbe_peft.classifiers.state import Layout, State, per_class
from dulbe_peft.papers.fitting import fit, minibatches, task_generator, uniform
from dulbe_peft.utils.settings import AtLeastOne, Positive, Seed


def head_start(generator: torch.Generator, classes: int, width: int) -> Tensor:
    """Return rows [W b], (classes, width + 1), as PyTorch initialises a linear layer."""
    return uniform(generator, width, classes, width + 1)


def linear_head(z: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Return the scores, (n, C), of unit features z, (n, d), by rows [W b], (C, d + 1)."""
    return z.shape[1] ** 0.5 * z @ head[:, :-1].T + head[:, -1]


@dataclass(frozen=True)
class LinearHeadRule(Rule):
    """A linear head, whose rows a strategy with head=linear trains. Its settings are for heads that are trained here.

    Args:
        epochs: Number of passes over a task's features.
        batch_size: Number of image features per step.
        learning_rate: Learning rate of Adam.
        seed: Seed of the start and of the order of the features.
    """

    epochs: AtLeastOne = 20
    batch_size: AtLeastOne = 128
    learning_rate: Positive = 1e-3
    seed: Seed = 0

    name = "linear_head"
    summary = "linear head: one row for each class, trained on its task only, and not changed afterwards"

    def tensors(self) -> dict[str, Layout]:
        return {"head": per_class(self.embed_dim + 1)}

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        if len(state.head) > state.classes:  # the strategy has trained the rows
            return {}
        generator = task_generator(self.seed, state.classes)
        head = head_start(generator, len(new), self.embed_dim).to(images).requires_grad_()

        def loss(_: int, rows: Tensor) -> Tensor:
            return F.cross_entropy(linear_head(images[rows], head), labels[rows] - state.classes)

        batches = (minibatches(images, self.batch_size, generator) for _ in range(self.epochs))
        fit(loss, torch.optim.Adam([head], lr=self.learning_rate), batches)
        return state.with_rows(head=head.detach())

    def formula(self, state: State) -> tuple[Callable[..., Tensor], dict[str, Tensor]]:
        return linear_head, {"head": state.head.float()}
