"""The bridge ensemble: for each class, points on the geodesic from its visual prototype to its text embedding.

v_c ----b_c(a_2)----b_c(a_3)---- ... ----e_c      K_b points on the great circle, weighted by pi_c
w_c = sum_k pi_c(a_k) b_c(a_k)                    one vector per class: logits = tau z W'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import torch
from annotated_types import Ge, Gt, Le, Len
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.checks import check_directions
from dulbe_peft.classifiers.geodesics import bridge_prototypes, reliability
from dulbe_peft.classifiers.keeping import takes
from dulbe_peft.classifiers.rule import LogitScale, Rule
from dulbe_peft.classifiers.state import Fitted, Layout, State, once, per_class, shared
from dulbe_peft.utils.settings import MOST

MAX_DEPTHS = 1000
MOST_OUTVOTED, MOST_SHARE = 2, 0.1  # number and fraction of classes that may be outvoted without a warning
Depths = Annotated[Sequence[Annotated[float, Ge(0), Le(1)]], Len(1, MAX_DEPTHS)]


@dataclass(frozen=True)
class BridgeRule(Rule):
    """Reliability-guided bridge-prototype ensemble over a growing set of classes, by the paper's equation.

    It fails if images are closer to images of other classes than to the texts of their own class, as with the features
    of published CLIP models, and if the reliable depths differ between classes. A class with weight near its text then
    has smaller scores than a class with weight near its images, whatever an image shows, and is hardly ever predicted.
    The head warns once if it detects this. `PooledBridgeHead`, which the strategy `dulbe` uses, has the same weights
    for all classes.

    Args:
        logit_scale: tau, the factor of the cosines (not its logarithm); 100 for CLIP.
        num_depths: K_b, the number of depths, which are evenly spaced from 0 to 1, both included.
        depths: The depths themselves, each in [0, 1]. If given, `num_depths` has no effect.
        reliability_temperature: beta.

    Attributes:
        visual_prototypes: v_c, (C, d), unit vectors.
        text_embeds: e_c, (C, d), unit vectors.
        reliability: pi_c, (C, K_b), rows sum to 1.
        counts: n_c, (C,), number of images of each class.
        lengths: l_c, (C,), length of the sum of the unit features of each class.
        depths: alpha_k, (K_b,); 0 is the visual end.

    Reference:
        Section "Reliability-Guided Bridge-Prototype Ensemble".
    """

    logit_scale: LogitScale = field(default=100.0, kw_only=True)
    num_depths: Annotated[int, Ge(2), Le(MAX_DEPTHS)] = 10
    depths: Depths | None = None
    reliability_temperature: Annotated[float, Gt(0), Le(MOST)] = 0.05

    name = "bridge"
    summary = (
        "bridge-prototype head: between the mean of a class's training images and its name, at the depths "
        "that recognised its training images best"
    )
    needs_text = True
    can = frozenset({"update", "move", "follow"})
    file_stem = "head"

    def tensors(self) -> dict[str, Layout]:
        depths = torch.linspace(0, 1, self.num_depths, device="cpu")
        if self.depths is not None:
            depths = torch.tensor(self.depths, dtype=torch.float32, device="cpu")
        return {
            "visual_prototypes": per_class(self.embed_dim, unit=True),
            **self.weights(len(depths)),
            "counts": per_class(dtype=torch.int64, power=1),
            "lengths": per_class(dtype=torch.float64, power=1),
            "depths": shared(start=depths),
        }

    def weights(self, depths: int) -> dict[str, Layout]:
        """Return the layouts of the tensors that determine the weights of the depths."""
        return {"reliability": per_class(depths)}

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        """Update v_c and pi_c of the classes that have images here. The other classes do not change.

            v_c   direction of l_c v_c + sum of the new unit features            exact
            pi_c  softmax over the depths of (n_c log pi_c + m_c rho_c / beta) / (n_c + m_c)

        m_c is the number of new images, and rho_c is measured on them, with the new v_c, over all seen classes. The
        old pi_c was measured with the prototypes, texts and competing classes of that time. The update is exact if
        those have not changed.
        """
        kept, changes, present, rows = self.with_prototypes(state, images, labels, new)
        visual = changes["visual_prototypes"]
        old, more = kept["counts"][present], torch.bincount(rows).to(state.counts)
        # `reliability` expects the measured classes last. The order does not change the probabilities.
        others = torch.ones(len(visual), dtype=torch.bool, device=labels.device).index_fill(0, present, False)
        order = torch.cat([others.nonzero()[:, 0], present])
        bridges = bridge_prototypes(visual[order], state.text_embeds.float()[order], state.depths.float())
        first = len(order) - len(present)
        rho = reliability(images, rows + first, bridges, self.logit_scale, first_class=first)
        before = kept["reliability"][present].float().clamp_min(torch.finfo(torch.float32).tiny).log()
        share = (old / (old + more)).to(before)[:, None]
        # beta may round to 0 in the tensor's type. With the maximum subtracted, rho / beta is then 0 or -inf, not NaN.
        beta = max(self.reliability_temperature, torch.finfo(rho.dtype).tiny)
        over = (rho - rho.amax(dim=1, keepdim=True)) / beta
        weights = kept["reliability"].float()
        weights[present] = (share * before + (1 - share) * over).softmax(dim=1)
        return changes | {"reliability": weights}

    def with_prototypes(
        self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]:
        """Update v_c, n_c and l_c with further images.

        Returns:
            The old rows with zeros for `new` classes, the new values, the classes that have images here, and the index
            of each image's class among these.
        """
        kept, names = state.with_new_rows(len(new)), [*state.class_names, *new]
        present, rows = labels.unique(return_inverse=True)
        device = state.lengths.device
        features, place = images.to(device).double(), present.to(device)
        sums = kept["visual_prototypes"][present].to(device).double() * kept["lengths"][place, None]
        sums = sums.index_add(0, rows.to(device), features)
        check_directions(sums, [names[index] for index in present.tolist()])
        visual = kept["visual_prototypes"].float().clone()
        visual[present] = F.normalize(sums, dim=1).to(visual)
        counts = kept["counts"][present] + torch.bincount(rows).to(state.counts)
        changes = {
            "visual_prototypes": visual,
            "counts": kept["counts"].index_copy(0, present, counts),
            "lengths": kept["lengths"].index_copy(0, place, sums.norm(dim=1)),
        }
        return kept, changes, present, rows

    def fitted(self, state: State) -> Ensemble:
        return Ensemble.of(self, state)

    def scores(self, state: State, images: Tensor) -> Tensor:
        """Return tau z . w_c. It is linear in z, so the sum over the depths is folded into one vector per class."""
        return self.logit_scale * images @ self.fitted(state).ensemble.T

    def without(self, state: State, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return v_c, n_c and l_c without the images; the reliabilities do not change."""
        places = labels.to(state.lengths.device)
        sums = state.visual_prototypes.to(places.device).double() * state.lengths[:, None]
        sums = sums.index_add(0, places, -images.to(sums))
        rest = {"visual_prototypes": F.normalize(sums, dim=1), "lengths": sums.norm(dim=1)}
        counts = state.counts - labels.bincount(minlength=len(sums)).to(state.counts)
        return rest | {"counts": counts}

    def left_out(self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor | None:
        """Return the scores with v_c recomputed without the image; the reliabilities do not change."""
        if groups is not None:
            return super().left_out(state, images, labels, groups)
        lengths = state.lengths[labels.to(state.lengths.device), None].to(images)
        visual = F.normalize(state.visual_prototypes[labels].float() * lengths - images, dim=1)
        bridges = bridge_prototypes(visual, state.text_embeds[labels].float(), state.depths.float())
        ensemble = (self.fitted(state).reliability[labels].float()[:, :, None] * bridges).sum(dim=1)
        scores = self.logit_scale * (images * ensemble).sum(dim=1, keepdim=True)
        return self.scores(state, images).scatter(1, labels[:, None], scores)

    def moved(self, state: State, matrix: Tensor, lifted: bool = False) -> dict[str, Tensor]:
        """Replace v_c by the direction of v_c M. Texts, reliabilities, counts and lengths do not change."""
        return {"visual_prototypes": F.normalize(state.visual_prototypes.double().cpu() @ matrix, dim=1)}


class Ensemble(Fitted):
    """The vectors of the classes, and how many of these can hardly win."""

    rule: BridgeRule

    @once
    def reliability(self) -> Tensor:
        """pi_c, (C, K_b)."""
        return self.state.reliability

    @once
    def ensemble(self) -> Tensor:
        """w_c, (C, d), float32."""
        return (self.reliability.float()[:, :, None] * self.bridges()).sum(dim=1)

    def bridges(self) -> Tensor:
        """Return b_c(alpha_k), (C, K_b, d), unit vectors in float32."""
        state = self.state
        return bridge_prototypes(state.visual_prototypes.float(), state.text_embeds.float(), state.depths.float())

    @once
    def outvoted(self) -> int:
        """How many classes' typical image is misclassified now, but classified correctly with the mean weights.

        The typical image of a class is half-way between its v_c and the mean of all v_c. The count is 0 if images are
        not closer to images of other classes than to the texts of their own, because scores of different depths are
        then similar in size.
        """
        visual, classes = self.state.visual_prototypes.float(), self.state.classes
        own_text = (visual * self.state.text_embeds.float()).sum(dim=1).mean()
        others = (visual.sum(dim=0).square().sum() - classes) / max(1, classes * (classes - 1))
        if others <= own_text:
            return 0
        typical, labels = (visual + visual.mean(dim=0)) / 2, torch.arange(classes, device=visual.device)
        pooled = (self.reliability.float().mean(dim=0)[:, None] * self.bridges()).sum(dim=1)
        wins, would_win = ((typical @ w.T).argmax(dim=1) == labels for w in (self.ensemble, pooled))
        return int((~wins & would_win).sum())

    @once
    def warning(self) -> str:
        if self.outvoted <= max(MOST_OUTVOTED, MOST_SHARE * self.state.classes):
            return ""
        return (
            f"{self.outvoted} of {self.state.classes} classes can hardly be predicted: their reliable depths differ, "
            "and images are closer to images than to texts. Use the classifier 'pooled_bridge' (PooledBridgeHead), "
            "which has the same weights for all classes"
        )


class BridgeEnsembleHead(Classifier, rule=BridgeRule, example="embed_dim=8"):
    """The paper's head: prototypes between images and texts; its settings are those of `BridgeRule`."""

    rule: BridgeRule
    visual_prototypes: Tensor
    text_embeds: Tensor
    counts: Tensor
    lengths: Tensor
    depths: Tensor
    reliability: Tensor

    if TYPE_CHECKING:

        @takes(BridgeRule)
        def __init__(self) -> None: ...

    @property
    def num_depths(self) -> int:
        """K_b, the number of depths."""
        return len(self.depths)

    def settings(self) -> dict[str, object]:
        """Return the settings, with `num_depths` if the depths are evenly spaced, and else with a list of `depths`."""
        values, count = self.depths.float().cpu(), self.num_depths
        even = count > 1 and torch.equal(values, torch.linspace(0, 1, count))
        # NumPy prints the shortest decimal number that gives the same float32.
        depths = {"num_depths": count} if even else {"depths": [float(str(depth)) for depth in values.numpy()]}
        return {**depths, "reliability_temperature": self.rule.reliability_temperature}

    @torch.no_grad()
    def outvoted(self) -> int:
        """Count the classes that can hardly be predicted; see `bridge.Ensemble`."""
        return self.rule.fitted(self.state).outvoted

    @property
    def ensemble_prototypes(self) -> Tensor:
        """w_c = sum_k pi_c(alpha_k) b_c(alpha_k), (C, d), float32; shorter than 1 by design."""
        return self.rule.fitted(self.state).ensemble

    @torch.no_grad()
    def bridge_prototypes(self) -> Tensor:
        """Return b_c(alpha_k), (C, K_b, d), unit vectors in float32."""
        return self.rule.fitted(self.state).bridges()

    @torch.no_grad()
    def expected_depth(self) -> Tensor:
        """Return sum_k pi_c(alpha_k) alpha_k, (C,) in float32: 0 is the visual prototype, 1 the text embedding."""
        return (self.reliability.float() * self.depths.float()).sum(dim=1)
