"""The bridge ensemble with one set of depth weights for all classes, from images that are left out.

The paper's head weighs the depths class by class. A score tau z'b_c(alpha) is about 80 at the images' end of CLIP's
own features and 30 at the texts' end, so a class that trusts its text loses to one that trusts its images, whatever
the image shows. The softmax p_alpha at one depth does not have this problem, because it compares all classes at one
depth. So does an ensemble whose weights are the same for all classes:

    s_c = sum_k pi(alpha_k) tau z'b_c(alpha_k) = sum_k pi(alpha_k) log p_alpha_k(c | x) + what no class changes

It is linear in z and folds into w_c = sum_k pi(alpha_k) b_c(alpha_k), as the paper's does, without a bias.

    pi = softmax over the depths of rho / (beta max_k rho)         rho = mean over the classes of rho_c

rho_c is the paper's reliability, the mean probability of class c over its images, but each image is left out of its
own prototype. With l_c the length of the sum of the n_c unit features of the class, it is scored by

    tau z'(A u + B e_c)      u = n_c / (n_c - 1) (l_c v_c - z) / l_c      A = sin((1 - alpha) theta) / sin(theta)
                                                                          B = sin(alpha theta) / sin(theta)

with theta the angle between u and e_c. u is not of length 1. The squared length of a mean of n images is that of its
expectation and a share 1/n of the images' variance, so that v_c, the mean at length 1, lies nearer to every image the
more images it has, and the rivals have all of theirs. The mean without z is therefore divided by the length of the
mean with z. At length 1, two images a class would look much worse at the images' end than they are.

A class with one image has nothing to leave out. Its name has never seen the image, so that t_c, the probability of the
class by the names alone, is honest. With t the mean of t_c over the classes, the usual depth of one image a class is
the share of log C that the names explain, and around it

    rho_usual(alpha) = h exp(-4 (alpha - alpha_0)^2)          alpha_0 = max(0, 1 + log t / log C)

with h such that rho_usual(1) = t, or 1 if that is less. It counts as one image of every class: with r_c the sum of the
probabilities over the m_c images that were left out,

    rho_c = (r_c + rho_usual) / (m_c + 1)

Images of early tasks have met few rivals. A mean probability p among C' classes is taken to be p / (p + q (1 - p))
with q = (C - 1) / (C' - 1) among the C of today, as if each further class were a rival like those.

Where all classes are alike, have many images, and one depth tells them for certain, this is the paper's head.
"""

import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.bridge import BridgeEnsembleHead
from dulbe_peft.classifiers.calibration import ranking
from dulbe_peft.classifiers.geodesics import own_probabilities

# Chosen on held-back training images of Cars, ImageNet, CIFAR-10, DTD and Aircraft, as CLIP sees them.
USUAL_DECLINE = 4.0  # how fast the reliability of one image falls beside its usual depth; 2 and 8 cost 0.1 and 0.2
USUAL_IMAGES = 1.0  # left-out images of a class for which the usual reliability counts; 0 and 2 cost 0.1 points
LEAST = 1e-300  # stands for a probability of 0
MOST_JUDGED = 1000  # left-out images of a task for the temperature


class PooledBridgeHead(BridgeEnsembleHead):
    """The bridge ensemble with one set of depth weights for all classes, for models with a modality gap such as CLIP.

    Args:
        num_depths, depths: as for `BridgeEnsembleHead`.
        reliability_temperature: beta, in units of the reliability of the best depth.

    Attributes:
        visual_prototypes, text_embeds, counts, lengths, depths: as for `BridgeEnsembleHead`.
        confidence: r_c, (C, K_b), float64, sums of the probabilities of left-out images at each depth.
        left_out_counts: m_c, (C,), int64, how many images these are.
        text_confidence: n_c t_c, (C,), float64, sums of the probabilities of the images by the names alone.
        rivals: (C,), int64, sums over the images of how many other classes there were when they came.

    Example:
        >>> head = PooledBridgeHead(embed_dim=2)
        >>> head.add_classes(["cat", "dog"], torch.eye(2), [0, 1], torch.eye(2))
        >>> head(torch.tensor([[0.9, 0.1]])).argmax(dim=1).tolist()
        [0]

    Reference:
        Section "Reliability-Guided Bridge-Prototype Ensemble". Goswami et al., arXiv 2603.24528, mix image and text
        prototypes, too, and show that this shrinks the image prototypes; they first project these onto the principal
        directions of the texts and add a classifier by covariances. Here nothing is projected, and left-out images
        say how far to shrink. Timmermann et al., arXiv 2509.26036, map images into the space of the texts, by a
        pseudo-inverse of the text tower's projection; here the gap stays, and scores are compared at one depth.
    """

    name = "pooled_bridge"
    summary = (
        "bridge-prototype head for CLIP's own features: between the mean of a class's training images and its name, "
        "at the depths that told images of all classes best that were left out"
    )
    adds_up = ("counts", "confidence", "left_out_counts", "text_confidence", "rivals")

    def keep_reliability(self) -> None:
        self.register_rows("confidence", self.num_depths, dtype=torch.float64)
        self.register_rows("left_out_counts", dtype=torch.int64)
        self.register_rows("text_confidence", dtype=torch.float64)
        self.register_rows("rivals", dtype=torch.int64)

    def added(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        """Prototypes with all images, exact, and sums of how the new ones are told, by the prototypes of now."""
        kept, changes, _, _ = self.with_prototypes(images, labels, new)
        twin = self.fork()
        twin.install(changes)
        by_text = (self.logit_scale * images @ self.text_embeds.float().T).softmax(dim=1).gather(1, labels[:, None])
        several = changes["counts"][labels] > 1
        images, own, place = images[several], labels[several], labels.to(self.confidence.device)
        told = own_probabilities(images, own, twin.bridge_prototypes(), twin.own_scores(images, own), self.logit_scale)
        return changes | {
            "confidence": kept["confidence"].index_add(0, own.to(place), told.to(kept["confidence"])),
            "left_out_counts": kept["left_out_counts"] + own.bincount(minlength=len(kept["counts"])),
            "text_confidence": kept["text_confidence"].index_add(0, place, by_text[:, 0].to(kept["confidence"])),
            "rivals": kept["rivals"].index_add(0, labels, torch.full_like(labels, len(kept["counts"]) - 1)),
        }

    def own_scores(self, images: Tensor, labels: Tensor) -> Tensor:
        """z'(A u + B e) of each image with its class at every depth, (n, K_b), as if it had not been learned."""
        counts = self.counts[labels].float()[:, None]
        lengths = self.lengths.to(images)[labels, None]
        rest = self.visual_prototypes[labels].float() * lengths - images
        start, texts = F.normalize(rest, dim=1), self.text_embeds[labels].float()
        cosine = (start * texts).sum(dim=1, keepdim=True)
        sine = (texts - cosine * start).norm(dim=1, keepdim=True)
        angle, depths = torch.atan2(sine, cosine), self.depths.float()
        flat = sine < 1e-4  # of parallel vectors, where sin / sin has no digits left, the quotients are the depths
        sine = sine.clamp_min(1e-4)
        by_image = torch.where(flat, 1 - depths, ((1 - depths) * angle).sin() / sine)
        by_text = torch.where(flat, depths, (depths * angle).sin() / sine)
        longer = counts / (counts - 1) / lengths
        near_rest, near_text = ((images * other).sum(dim=1, keepdim=True) for other in (rest, texts))
        return by_image * longer * near_rest + by_text * near_text

    def left_out(self, images: Tensor, labels: Tensor) -> Tensor:
        """The weights of the depths stay."""
        own = self.logit_scale * self.own_scores(images, labels) @ self.depth_weights.to(images)
        return self.logits(images).scatter(1, labels[:, None], own[:, None])

    def judge(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        rows = (self.counts.to(labels.device)[labels] > 1).nonzero()[:, 0]
        if not len(rows) or len(self._class_names) < 2:
            return None
        rows = rows[ranking(images[rows]).argsort()][:: max(1, -(-len(rows) // MOST_JUDGED))]
        return self.left_out(images[rows], labels[rows]), labels[rows]

    def outvoted(self) -> int:
        """None: all classes have the mean weights."""
        return 0

    def merged(self, other: Self, places: Tensor) -> dict[str, Tensor]:
        """Sums add up; what was told of left-out images stays as each side measured it, among its own classes."""
        kept, device = self.with_new_rows(int((places >= len(self._class_names)).sum())), self.lengths.device
        sums = kept["visual_prototypes"].to(device).double() * kept["lengths"][:, None]
        theirs = other.visual_prototypes.to(device).double() * other.lengths.to(device)[:, None]
        sums = sums.index_add(0, places.to(device), theirs)
        prototypes = {"visual_prototypes": F.normalize(sums, dim=1), "lengths": sums.norm(dim=1)}
        return super().merged(other, places) | prototypes

    def forgotten(self, kept: Tensor) -> dict[str, Tensor]:
        return super().forgotten(kept) | {"depths": self.depths}  # of every part of a head, see `join_classes`

    def _sums_of_views(self, views: Tensor, labels: Tensor, new: list[str]) -> dict[str, Tensor]:
        """Of the views, prototypes alone: an image that is left out would have its views in there."""
        changes = super()._sums_of_views(views, labels, new)
        return {name: changes[name] for name in ("visual_prototypes", "counts", "lengths")}

    @property
    def depth_weights(self) -> Tensor:
        """pi, (K_b,), float64."""
        return self.derived("depth_weights", self._weigh_depths)

    @property
    def reliability(self) -> Tensor:
        """pi of every class, (C, K_b), float32: the same for all."""
        return self.depth_weights.float().to(self.device).expand(len(self._class_names), -1)

    def _weigh_depths(self) -> Tensor:
        usual, counts = self.usual_reliability(), self.left_out_counts[:, None].to(self.confidence)
        told = self._among_all(self.confidence / counts.clamp_min(1))
        rho = ((counts * told + USUAL_IMAGES * usual) / (counts + USUAL_IMAGES)).mean(dim=0)
        unit = max(self.reliability_temperature * float(rho.max()), torch.finfo(rho.dtype).tiny)
        return ((rho - rho.max()) / unit).softmax(dim=0)

    def usual_reliability(self) -> Tensor:
        """rho_usual at every depth, (K_b,), float64: what is expected of a class with one image."""
        depths, classes = self.depths.to(self.confidence), len(self.counts)
        each = self._among_all((self.text_confidence / self.counts.to(self.text_confidence))[:, None])
        by_text = max(float(each.mean()), LEAST)
        middle = min(1.0, max(0.0, 1 + math.log(by_text) / math.log(classes))) if classes > 1 else 1.0
        height = min(1.0, by_text * math.exp(USUAL_DECLINE * (1 - middle) ** 2))
        return height * (-USUAL_DECLINE * (depths - middle) ** 2).exp()

    def _among_all(self, mean: Tensor) -> Tensor:
        """Mean probabilities, (C, ...), of a time when there were fewer rivals, as among all classes of today."""
        met = (self.rivals / self.counts).to(mean)[:, None].clamp_min(1)
        return mean / (mean + (1 - mean) * (len(mean) - 1) / met).clamp_min(LEAST)
