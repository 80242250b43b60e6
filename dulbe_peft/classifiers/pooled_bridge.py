"""The bridge ensemble with one set of depth weights for all classes, computed from left-out images.

The paper's head has depth weights for each class. With CLIP's own features, a score tau z'b_c(alpha) is about 80 at
the depth of the images and 30 at the depth of the texts. A class that relies on its text therefore loses to one that
relies on its images, whatever the image shows. The softmax p_alpha at a single depth does not have this problem,
because it compares all classes at the same depth. Neither does an ensemble whose weights are the same for all classes:

    s_c = sum_k pi(alpha_k) tau z'b_c(alpha_k) = sum_k pi(alpha_k) log p_alpha_k(c | x) + a term equal for all classes

The score is linear in z, with the weights w_c = sum_k pi(alpha_k) b_c(alpha_k) as in the paper's head, without a bias.

    pi = softmax over the depths of rho / (beta max_k rho)         rho = mean over the classes of rho_c

rho_c is the paper's reliability, the mean probability of class c over its images, except that each image is left out
of the prototype of its class. With l_c the length of the sum of the n_c unit features of the class, the score is

    tau z'(A u + B e_c)      u = n_c / (n_c - 1) (l_c v_c - z) / l_c      A = sin((1 - alpha) theta) / sin(theta)
                                                                          B = sin(alpha theta) / sin(theta)

where theta is the angle between u and e_c. The length of u is not 1. The squared length of a mean of n images is that
of its expectation plus 1/n of the images' variance. The normalised mean v_c is therefore nearer to every image the
more images it has, and the other classes have all of their images. To correct for this, the mean without z is divided
by the length of the mean with z. With length 1, classes with two images would look much worse at the depth of the
images than they are.

If a class has one image, no image can be left out. Its text embedding does not depend on the image, so t_c, the
probability of the class by the texts alone, is unbiased. Let t be the mean of t_c over the classes. The usual depth
alpha_0 for one image per class is the share of log C that the texts explain, and the usual reliability is

    rho_usual(alpha) = h exp(-4 (alpha - alpha_0)^2)          alpha_0 = max(0, 1 + log t / log C)

where h is the value for which rho_usual(1) = t, but at most 1. The usual reliability counts as one image of every
class. With r_c the sum of the probabilities of the m_c left-out images,

    rho_c = (r_c + rho_usual) / (m_c + 1)

Images of early tasks were compared with few other classes. A mean probability p among C' classes is converted to
p / (p + q (1 - p)), with q = (C - 1) / (C' - 1), among the present C classes, as if the further classes were like the
earlier ones.

If all classes are alike and have many images, and one depth classifies them with certainty, this is the paper's head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.bridge import BridgeEnsembleHead, BridgeRule, Ensemble
from dulbe_peft.classifiers.geodesics import own_probabilities
from dulbe_peft.classifiers.groups import sums_of_groups, together
from dulbe_peft.classifiers.keeping import takes
from dulbe_peft.classifiers.leaving import Left, choose
from dulbe_peft.classifiers.state import Layout, State, once, per_class

# Chosen on held-out training images of Cars, ImageNet, CIFAR-10, DTD and Aircraft with CLIP's features.
USUAL_DECLINE = 4.0  # decline of the reliability away from the usual depth; 2 and 8 cost 0.1 and 0.2 points
USUAL_IMAGES = 1.0  # number of left-out images that the usual reliability counts as; 0 and 2 cost 0.1 points
LEAST = 1e-300  # replaces a probability of 0


@dataclass(frozen=True)
class PooledBridgeRule(BridgeRule):
    """The bridge ensemble with one set of depth weights for all classes, for models with a modality gap such as CLIP.

    Args:
        logit_scale, num_depths, depths: As for `BridgeEnsembleHead`.
        reliability_temperature: beta, in units of the reliability of the best depth.

    Attributes:
        visual_prototypes, text_embeds, counts, lengths, depths: As for `BridgeEnsembleHead`.
        confidence: r_c, (C, K_b), float64, sums of the probabilities of left-out images at each depth.
        left_out_counts: m_c, (C,), int64, how many images these are.
        text_confidence: n_c t_c, (C,), float64, sums of the probabilities of the images by the texts alone.
        rivals: (C,), int64, sums over the images of the number of other classes when each image was learned.

    Reference:
        Section "Reliability-Guided Bridge-Prototype Ensemble". Goswami et al., arXiv 2603.24528, also mix image and
        text prototypes and show that this shrinks the image prototypes. They first project these onto the principal
        directions of the texts and add a classifier that uses covariances. Here nothing is projected, and left-out
        images determine the shrinkage. Timmermann et al., arXiv 2509.26036, map images into the space of the texts by
        a pseudo-inverse of the text tower's projection. Here the gap stays, and scores are compared at one depth.
    """

    name = "pooled_bridge"
    file_stem = ""
    summary = (
        "bridge-prototype head for CLIP's own features: between the mean of a class's training images and its name, "
        "at the depths that classified left-out images of all classes best"
    )
    can = BridgeRule.can | {"merge"}

    def tensors(self) -> dict[str, Layout]:
        layouts = super().tensors()
        return layouts | {"counts": replace(layouts["counts"], adds=True)}

    def weights(self, depths: int) -> dict[str, Layout]:
        sums: dict[str, Any] = {
            "adds": True,
            "views": False,
        }  # the views of a left-out image would remain in the prototypes
        return {
            "confidence": per_class(depths, dtype=torch.float64, **sums),
            "left_out_counts": per_class(dtype=torch.int64, **sums),
            "text_confidence": per_class(dtype=torch.float64, **sums),
            "rivals": per_class(dtype=torch.int64, **sums),
        }

    def added(self, state: State, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        """Return exact prototypes with all images, and the sums of probabilities with those of the new images added.

        The probabilities of the new images are computed with the new prototypes.
        """
        kept, changes, _, _ = self.with_prototypes(state, images, labels, new)
        after = state.replaced(changes)
        by_text = (self.logit_scale * images @ state.text_embeds.float().T).softmax(dim=1).gather(1, labels[:, None])
        several = changes["counts"][labels] > 1
        images, own, place = images[several], labels[several], labels.to(state.confidence.device)
        scores = self.own_scores(after, images, own)
        told = own_probabilities(images, own, self.fitted(after).bridges(), self.logit_scale, scores)
        return changes | {
            "confidence": kept["confidence"].index_add(0, own.to(place), told.to(kept["confidence"])),
            "left_out_counts": kept["left_out_counts"] + own.bincount(minlength=len(kept["counts"])),
            "text_confidence": kept["text_confidence"].index_add(0, place, by_text[:, 0].to(kept["confidence"])),
            "rivals": kept["rivals"].index_add(0, labels, torch.full_like(labels, len(kept["counts"]) - 1)),
        }

    def own_scores(self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor:
        """Return z'(A u + B e), (n, K_b), of each image with its class at every depth, as if it were not learned.

        With `groups`, the class loses all images of the group; `images` must contain them.
        """
        counts, gone = state.counts[labels].float()[:, None], together(labels, groups)[:, None]
        lengths = state.lengths.to(images)[labels, None]
        rest = state.visual_prototypes[labels].float() * lengths - sums_of_groups(images, labels, groups)
        start, texts = F.normalize(rest, dim=1), state.text_embeds[labels].float()
        cosine = (start * texts).sum(dim=1, keepdim=True)
        sine = (texts - cosine * start).norm(dim=1, keepdim=True)
        angle, depths = torch.atan2(sine, cosine), state.depths.float()
        flat = sine < 1e-4  # sin / sin loses all digits for parallel vectors, but its limit is the depth
        sine = sine.clamp_min(1e-4)
        by_image = torch.where(flat, 1 - depths, ((1 - depths) * angle).sin() / sine)
        by_text = torch.where(flat, depths, (depths * angle).sin() / sine)
        longer = counts / (counts - gone) / lengths
        near_rest, near_text = ((images * other).sum(dim=1, keepdim=True) for other in (rest, texts))
        return by_image * longer * near_rest + by_text * near_text

    def left_out(self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None) -> Tensor:
        """Return the scores of learned images, each without its group in its class; the depth weights stay."""
        weights = self.fitted(state).depth_weights.to(images)
        own = self.logit_scale * self.own_scores(state, images, labels, groups) @ weights
        return self.scores(state, images).scatter(1, labels[:, None], own[:, None])

    def judged(
        self, state: State, images: Tensor, labels: Tensor, groups: Tensor | None = None
    ) -> tuple[State, Left | None]:
        """Return left-out scores; with groups, also replace the probabilities that `added` summed up.

        `added` leaves single images out.
        """
        if groups is not None:
            state = state.replaced(self._by_groups(state, images, labels, groups))
        left = choose(images, labels, groups, state.counts)
        if not len(left.rows) or state.classes < 2:
            return state, None
        return state, replace(left, scores=self.left_out(state, images[left.rows], left.labels, left.groups))

    def _by_groups(self, state: State, images: Tensor, labels: Tensor, groups: Tensor) -> dict[str, Tensor]:
        """Return `confidence` and `left_out_counts` with the images' groups left out instead of the images."""
        counts = state.counts.to(labels)
        told = {name: state[name] for name in ("confidence", "left_out_counts")}
        for sign, of in ((-1, None), (1, groups)):
            rows = (counts[labels] > together(labels, of)).nonzero()[:, 0]
            own, part = labels[rows], None if of is None else of.to(labels)[rows]
            scores = self.own_scores(state, images[rows], own, part)
            each = own_probabilities(images[rows], own, self.fitted(state).bridges(), self.logit_scale, scores)
            place = own.to(state.confidence.device)
            told["confidence"] = told["confidence"].index_add(0, place, sign * each.to(state.confidence))
            told["left_out_counts"] = told["left_out_counts"] + sign * place.bincount(minlength=state.classes)
        return told

    def merged(self, state: State, other: State, places: Tensor) -> dict[str, Tensor]:
        """Return the added sums; each side's probabilities of left-out images stay those among its own classes."""
        kept, device = state.with_new_rows(int((places >= state.classes).sum())), state.lengths.device
        sums = kept["visual_prototypes"].to(device).double() * kept["lengths"][:, None]
        theirs = other.visual_prototypes.to(device).double() * other.lengths.to(device)[:, None]
        sums = sums.index_add(0, places.to(device), theirs)
        prototypes = {"visual_prototypes": F.normalize(sums, dim=1), "lengths": sums.norm(dim=1)}
        return super().merged(state, other, places) | prototypes

    def forgotten(self, state: State, kept: Tensor) -> dict[str, Tensor]:
        # Every part of a head needs the depths, see `join_classes`.
        return super().forgotten(state, kept) | {"depths": state.depths}

    def fitted(self, state: State) -> Depths:
        return Depths.of(self, state)


class Depths(Ensemble):
    """The depth weights that all classes have."""

    rule: PooledBridgeRule

    @once
    def outvoted(self) -> int:
        """0, because all classes have the same depth weights."""
        return 0

    @once
    def reliability(self) -> Tensor:
        """pi for every class, (C, K_b), float32; all rows are equal."""
        return self.depth_weights.float().to(self.state.device).expand(self.state.classes, -1)

    @once
    def depth_weights(self) -> Tensor:
        """pi, (K_b,), float64."""
        state, usual = self.state, self.usual_reliability
        counts = state.left_out_counts[:, None].to(state.confidence)
        told = _among_all(state, state.confidence / counts.clamp_min(1))
        rho = ((counts * told + USUAL_IMAGES * usual) / (counts + USUAL_IMAGES)).mean(dim=0)
        unit = max(self.rule.reliability_temperature * float(rho.max()), torch.finfo(rho.dtype).tiny)
        return ((rho - rho.max()) / unit).softmax(dim=0)

    @once
    def usual_reliability(self) -> Tensor:
        """rho_usual at every depth, (K_b,), float64: the expected reliability of a class with one image."""
        state = self.state
        depths, classes = state.depths.to(state.confidence), state.classes
        each = _among_all(state, (state.text_confidence / state.counts.to(state.text_confidence))[:, None])
        by_text = max(float(each.mean()), LEAST)
        middle = min(1.0, max(0.0, 1 + math.log(by_text) / math.log(classes))) if classes > 1 else 1.0
        height = min(1.0, by_text * math.exp(USUAL_DECLINE * (1 - middle) ** 2))
        return height * (-USUAL_DECLINE * (depths - middle) ** 2).exp()


def _among_all(state: State, mean: Tensor) -> Tensor:
    """Convert mean probabilities, (C, ...), among the classes of an earlier time to those among all classes."""
    met = (state.rivals / state.counts).to(mean)[:, None].clamp_min(1)
    return mean / (mean + (1 - mean) * (len(mean) - 1) / met).clamp_min(LEAST)


class PooledBridgeHead(BridgeEnsembleHead, rule=PooledBridgeRule, example="embed_dim=8"):
    """The head with one set of depths for all classes; its settings are those of `PooledBridgeRule`."""

    rule: PooledBridgeRule
    confidence: Tensor

    if TYPE_CHECKING:

        @takes(PooledBridgeRule)
        def __init__(self) -> None: ...

    @property
    def depth_weights(self) -> Tensor:
        """pi, (K_b,), float64."""
        return self.rule.fitted(self.state).depth_weights

    @property
    def reliability(self) -> Tensor:  # type: ignore[override]
        """pi for every class, (C, K_b), float32; all rows are equal."""
        return self.rule.fitted(self.state).reliability
