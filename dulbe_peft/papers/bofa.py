"""BOFA: only the visual projection learns, each task along the input directions that earlier tasks used least.

    dW_t = B P'                         P: the r eigenvectors of least eigenvalue of S_<t = sum of x x', x the
                                        projection's input over all images of earlier tasks; B trained from 0
    W = W_0 + (1 / t) sum over s <= t of dW_s

Each task is trained on W_0 alone; the earlier updates are switched off meanwhile. The input of the projection is
frozen, so S never goes stale.

Its classifier mixes every class's mean feature and text embedding with one weight that task 1 chooses.

Reference: "BOFA: Bridge-Layer Orthogonal Low-Rank Fusion for CLIP-Based Class-Incremental Learning", arXiv 2511.11421.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.prototype import PrototypeClassifier
from dulbe_peft.strategies.base import Modes, NewTask
from dulbe_peft.strategies.occupation import OccupationStrategy, old_statistic
from dulbe_peft.subspaces.decompositions import eigh, fix_signs


def least_directions(statistic: torch.Tensor, count: int, name: str = "S") -> torch.Tensor:
    """The eigenvectors of S, (d, d) in float64, of the `count` smallest eigenvalues, the smallest first."""
    _, vectors = eigh(statistic, name)
    return fix_signs(vectors.flip(1)[:, :count])


@dataclass(frozen=True)
class Bofa(OccupationStrategy):
    """The mean of updates that start from the same weight, each in the directions used least before it."""

    name = "bofa"
    classifiers = ("bofa", "lda")
    target_modules = ("visual_projection",)

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
        names = () if task.index else None  # the first task trains P, too
        with task.adapter.scaled_history(0), task.adapter.trained_bases(names) as bases:
            yield bases

    def finish(self, task: NewTask) -> None:
        """The old updates' mean over t - 1 tasks becomes their part of the mean over t, and so does the new update."""
        adapter, part = task.adapter_name, 1 / (task.index + 1)
        for layer in task.layers.values():
            layer.dulbe_history_B[adapter] = (1 - part) * layer.dulbe_history_B[adapter]
            layer.set_up_projections(adapter, part * layer.current_up(adapter))


class BofaClassifier(PrototypeClassifier):
    """logits = tau z . p_c, with p_c = (1 - lambda) e_c + lambda v_c, not normalised again.

    v_c is the direction of the class's mean unit feature. lambda is the one of `grid` values from 0 to 1 with the best
    accuracy on the first task's own images, and the middle one of these where several are best. It never changes.

    The paper makes v_c of old classes anew with each task's projection, from unprojected class means. A classifier
    sees projected features alone, so here v_c stays, unless drift="linear" moves it along. The published code's
    Gaussian discriminant is left out for the same reason. In that code lambda weighs the text when it is searched and
    the image when it is used; here it weighs the image both times, as in the paper.

    Reference:
        "BOFA: Bridge-Layer Orthogonal Low-Rank Fusion for CLIP-Based Class-Incremental Learning", arXiv 2511.11421.
    """

    grid: Annotated[int, Ge(2)] = 21

    name = "bofa"
    summary = "BOFA's rule: class means and text classifier, mixed"
    belongs_to = "bofa"
    needs_text = True
    adds_up = None  # two sides have chosen two weights

    def register(self) -> None:
        super().register()
        self.register_buffer("image_weight", torch.zeros(()))

    def added(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        changes = super().added(images, labels, new)
        if not self._class_names:
            by_text = images @ self.text_embeds.float().T
            by_image = images @ F.normalize(changes["sums"], dim=1).to(images).T
            weights = torch.linspace(0, 1, self.grid, device=images.device)
            right = torch.stack([(torch.lerp(by_text, by_image, w).argmax(1) == labels).sum() for w in weights])
            best = (right == right.max()).nonzero()[:, 0]
            changes["image_weight"] = weights[best[len(best) // 2]]
        return changes

    @property
    def prototypes(self) -> Tensor:
        """p_c, (C, d), float32."""
        return torch.lerp(self.text_embeds.float(), self.visual_prototypes, self.image_weight.float())

    def logits(self, images: Tensor) -> Tensor:
        return self.logit_scale * images @ self.prototypes.T

    def left_out(self, images: Tensor, labels: Tensor) -> Tensor:
        """As of class means, with the text's share of the own class; lambda is held as it is."""
        scores, own = super().left_out(images, labels), labels[:, None]
        by_text = self.logit_scale * (images * self.text_embeds[labels].to(images)).sum(dim=1, keepdim=True)
        return scores.scatter(1, own, torch.lerp(by_text, scores.gather(1, own), self.image_weight.to(scores)))
