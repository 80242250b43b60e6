"""BOFA: only the visual projection is trained, each task along the input directions that earlier tasks used least.

    dW_t = B P'                         P: the r eigenvectors of S_<t with the smallest eigenvalues; B starts at 0
                                        S_<t = sum of x x', where x are the projection's inputs in earlier tasks
    W = W_0 + (1 / t) sum over s <= t of dW_s

Each task is trained on W_0 alone; earlier updates are switched off during training. The layers before the projection
are frozen, so S never goes stale.

The classifier mixes each class's mean feature and text embedding. Its single mixing weight is chosen on task 1.

Reference: "BOFA: Bridge-Layer Orthogonal Low-Rank Fusion for CLIP-Based Class-Incremental Learning", arXiv 2511.11421.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.keeping import takes
from dulbe_peft.classifiers.prototype import PrototypeClassifier, PrototypeRule
from dulbe_peft.classifiers.state import Layout, State, shared
from dulbe_peft.strategies.base import Modes, NewTask
from dulbe_peft.strategies.occupation import OccupationStrategy, old_statistic
from dulbe_peft.subspaces.decompositions import eigh, fix_signs


def least_directions(statistic: torch.Tensor, count: int, name: str = "S") -> torch.Tensor:
    """Return the eigenvectors of S, (d, d) in float64, with the `count` smallest eigenvalues, smallest first."""
    _, vectors = eigh(statistic, name)
    return fix_signs(vectors.flip(1)[:, :count])


@dataclass(frozen=True)
class Bofa(OccupationStrategy):
    """Average updates that all start from the same weight, each along the directions that earlier tasks used least."""

    name = "bofa"
    classifiers = ("bofa", "lda")
    target_modules = ("visual_projection",)
    shares = False  # the update is already the mean over tasks

    def plan(self, task: NewTask) -> Modes:
        generator, bases = task.generator(), {}
        for name, layer in task.layers.items():
            old = old_statistic(task, name)
            if old is not None:
                bases[name] = least_directions(old, task.rank(name), f"statistics of layer {name!r}")
            else:
                bases[name] = torch.linalg.qr(torch.randn(layer.in_features, task.rank(name), generator=generator)).Q
        return task.modes(bases)

    @contextmanager
    def training(self, task: NewTask) -> Iterator[list[torch.Tensor]]:
        names = () if task.index else None  # only the first task also trains P
        with task.adapter.scaled_history(0), task.adapter.trained_bases(names) as bases:
            yield bases

    def finish(self, task: NewTask) -> None:
        """Update the mean over tasks: scale old updates by (t - 1) / t and the new one by 1 / t."""
        adapter, part = task.adapter_name, 1 / (task.index + 1)
        for layer in task.layers.values():
            layer.dulbe_history_B[adapter] = (1 - part) * layer.dulbe_history_B[adapter]
            layer.set_up_projections(adapter, part * layer.current_up(adapter))


@dataclass(frozen=True)
class BofaRule(PrototypeRule):
    """BOFA's classifier: logits = tau z . p_c, where p_c = (1 - lambda) e_c + lambda v_c is not normalised again.

    v_c is the direction of the class's mean unit feature. lambda is chosen once, from `grid` values between 0 and 1,
    by the accuracy on the training images of the first task; if several values tie, the middle one is taken.

    The paper recomputes v_c of old classes after each task, by applying the new projection to unprojected class means.
    A classifier here sees only projected features, so v_c stays as it is unless drift="linear" moves it. The Gaussian
    discriminant of the published code is left out for the same reason. In that code lambda weights the text during the
    search and the image afterwards; here it weights the image both times, as in the paper.

    Args:
        grid: Number of values of lambda that are compared.

    Reference:
        "BOFA: Bridge-Layer Orthogonal Low-Rank Fusion for CLIP-Based Class-Incremental Learning", arXiv 2511.11421.
    """

    grid: Annotated[int, Ge(2)] = 21

    name = "bofa"
    summary = "BOFA's rule: a mixture of class means and the text classifier"
    belongs_to = "bofa"
    needs_text = True
    can = PrototypeRule.can - {"merge"}  # each learner has chosen its own weight

    def tensors(self) -> dict[str, Layout]:
        return super().tensors() | {"image_weight": shared()}

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        changes = super().added(state, images, labels, new)
        if not state.classes:
            by_text = images @ state.text_embeds.float().T
            by_image = images @ F.normalize(changes["sums"], dim=1).to(images).T
            weights = torch.linspace(0, 1, self.grid, device=images.device)
            right = torch.stack([(torch.lerp(by_text, by_image, w).argmax(1) == labels).sum() for w in weights])
            best = (right == right.max()).nonzero()[:, 0]
            changes["image_weight"] = weights[best[len(best) // 2]]
        return changes

    def prototypes(self, state: State) -> Tensor:
        """Return p_c, (C, d), float32."""
        return torch.lerp(state.text_embeds.float(), self.fitted(state).visual_prototypes, state.image_weight.float())

    def scores(self, state: State, images: Tensor) -> Tensor:
        return self.logit_scale * images @ self.prototypes(state).T

    def left_out(self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor | None:
        """Return leave-one-out scores of class means, mixed with the text score of the true class; lambda is fixed."""
        scores, columns = super().left_out(state, images, labels, groups), labels[:, None]
        if groups is not None or scores is None:
            return scores
        by_text = self.logit_scale * (images * state.text_embeds[labels].to(images)).sum(dim=1, keepdim=True)
        return scores.scatter(
            1, columns, torch.lerp(by_text, scores.gather(1, columns), state.image_weight.to(scores))
        )


class BofaClassifier(PrototypeClassifier, rule=BofaRule):
    """The cosine with a mean of each class's text and images; its settings are those of `BofaRule`."""

    rule: BofaRule

    if TYPE_CHECKING:

        @takes(BofaRule)
        def __init__(self) -> None: ...

    @property
    def prototypes(self) -> Tensor:
        """p_c, (C, d), float32."""
        return self.rule.prototypes(self.state)
