"""The bridge ensemble: every class's geodesic bridge from its visual prototype to its text embedding, depth by depth.

v_c ----b_c(a_2)----b_c(a_3)---- ... ----e_c      K_b points on the great circle, pi_c says which to trust
w_c = sum_k pi_c(a_k) b_c(a_k)                    one folded vector: logits = tau z W'
"""

import warnings
from collections.abc import Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Self

import torch
from annotated_types import Ge, Gt, Le, Len
from torch import Tensor
from torch.nn import functional as F

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.checks import check_directions
from dulbe_peft.classifiers.geodesics import bridge_prototypes, reliability
from dulbe_peft.classifiers.state import LogitScale
from dulbe_peft.utils.settings import MOST

MAX_DEPTHS = 1000
MOST_OUTVOTED, MOST_SHARE = 2, 0.1  # classes, and their share, that may be outvoted without a warning
if TYPE_CHECKING:
    Depths = Any  # a setting until the buffer of this name is made of it
else:
    Depths = Annotated[Sequence[Annotated[float, Ge(0), Le(1)]], Len(1, MAX_DEPTHS)] | None


class BridgeEnsembleHead(Classifier, kw_only=False):
    """Reliability-guided bridge-prototype ensemble over a growing set of classes, by the paper's equation.

    It cannot work where images lie nearer to images of other classes than to their own names and the classes trust
    different depths, as on the features of CLIP as it is published. A class that trusts its name then has smaller
    scores than one that trusts its images, whatever an image shows, and is hardly ever predicted. The head warns once
    where it sees this. `PooledBridgeHead`, which the strategy `dulbe` uses, weighs the depths alike for all classes.

    Args:
        num_depths: K_b, evenly spaced from 0 to 1, both ends included.
        depths: the depths themselves, each in [0, 1]; where given, `num_depths` has no effect.
        reliability_temperature: beta.

    Attributes:
        visual_prototypes, text_embeds: v_c and e_c, (C, d), unit vectors.
        reliability: pi_c, (C, K_b), rows sum to 1.
        counts, lengths: n_c, images of each class, and l_c, length of the sum of their unit features, (C,).
        depths: alpha_k, (K_b,); 0 is the visual end.

    Reference:
        Section "Reliability-Guided Bridge-Prototype Ensemble".
    """

    logit_scale: LogitScale = field(default=100.0, kw_only=True)
    num_depths: Annotated[int, Ge(2), Le(MAX_DEPTHS)] = 10
    depths: Depths = None
    reliability_temperature: Annotated[float, Gt(0), Le(MOST)] = 0.05

    name = "bridge"
    summary = (
        "bridge-prototype head: between the mean of a class's training images and its name, at the depth "
        "that told its training images best"
    )
    needs_text = True
    updates = True
    file_stem = "head"

    def register(self) -> None:
        values, given = torch.linspace(0, 1, self.num_depths), vars(self).pop("depths")
        if given is not None:
            values = torch.tensor(given, dtype=torch.float32)
        self.num_depths = len(values)
        self.register_rows("visual_prototypes", self.embed_dim)
        self.keep_reliability()
        self.register_rows("counts", dtype=torch.int64)
        self.register_rows("lengths", dtype=torch.float64)
        self.register_buffer("depths", values)
        self._warned = False

    def keep_reliability(self) -> None:
        """Register what says how far each depth is trusted."""
        self.register_rows("reliability", self.num_depths)

    def settings(self) -> dict[str, Any]:
        """`depths` stand there, as a list, where they are not evenly spaced, and `num_depths` where they are."""
        values, count = self.depths.float().cpu(), self.num_depths
        even = count > 1 and torch.equal(values, torch.linspace(0, 1, count))
        # The shortest decimals that give the same float32.
        depths = {"num_depths": count} if even else {"depths": [float(str(depth)) for depth in values.numpy()]}
        return {**depths, "reliability_temperature": self.reliability_temperature}

    def added(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        """v_c and pi_c of the classes that have images here; the other classes stay as they are.

            v_c   direction of l_c v_c + sum of the new unit features            exact
            pi_c  softmax over the depths of (n_c log pi_c + m_c rho_c / beta) / (n_c + m_c)

        m_c is the number of new images, and rho_c is measured on them, with the new v_c, over all seen classes. The
        old part is of the prototypes, texts and rivals of its time, and exact where those have not changed.
        """
        kept, changes, present, rows = self.with_prototypes(images, labels, new)
        visual = changes["visual_prototypes"]
        old, more = kept["counts"][present], torch.bincount(rows).to(self.counts)
        # The classes to measure come last: `reliability` wants them so, and the order changes no probability.
        others = torch.ones(len(visual), dtype=torch.bool, device=labels.device).index_fill(0, present, False)
        order = torch.cat([others.nonzero()[:, 0], present])
        bridges = bridge_prototypes(visual[order], self.text_embeds.float()[order], self.depths.float())
        first = len(order) - len(present)
        rho = reliability(images, rows + first, bridges, self.logit_scale, first_class=first)
        before = kept["reliability"][present].float().clamp_min(torch.finfo(torch.float32).tiny).log()
        share = (old / (old + more)).to(before)[:, None]
        # beta may be 0 in the tensor's type; less its maximum, rho is then 0 or -inf.
        beta = max(self.reliability_temperature, torch.finfo(rho.dtype).tiny)
        over = (rho - rho.amax(dim=1, keepdim=True)) / beta
        weights = kept["reliability"].float()
        weights[present] = (share * before + (1 - share) * over).softmax(dim=1)
        return changes | {"reliability": weights}

    def with_prototypes(
        self, images: Tensor, labels: Tensor, new: Sequence[str]
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor, Tensor]:
        """v_c, n_c and l_c with further images.

        Returns the known rows with zeros for `new` classes, the new values, the classes that have images here, and
        each image's place among these.
        """
        kept, names = self.with_new_rows(len(new)), [*self._class_names, *new]
        present, rows = labels.unique(return_inverse=True)
        device = self.lengths.device
        features, own, place = images.to(device).double(), rows.to(device), present.to(device)
        sums = kept["visual_prototypes"][present].to(device).double() * kept["lengths"][place, None]
        sums = sums.index_add(0, own, features)
        check_directions(sums, [names[index] for index in present.tolist()])
        visual = kept["visual_prototypes"].float().clone()
        visual[present] = F.normalize(sums, dim=1).to(visual)
        counts = kept["counts"][present] + torch.bincount(rows).to(self.counts)
        changes = {
            "visual_prototypes": visual,
            "counts": kept["counts"].index_copy(0, present, counts),
            "lengths": kept["lengths"].index_copy(0, place, sums.norm(dim=1)),
        }
        return kept, changes, present, rows

    def _adopt(self, twin: Self, scores: tuple[Tensor, Tensor] | None, images: Tensor, labels: Tensor) -> None:
        outvoted, classes = 0 if self._warned else twin.outvoted(), len(twin.class_names)
        if outvoted > max(MOST_OUTVOTED, MOST_SHARE * classes):
            warnings.warn(
                f"{outvoted} of {classes} classes can hardly be predicted: their depths differ, and images lie nearer "
                "to images than to texts; use the classifier 'pooled_bridge' (PooledBridgeHead), which weighs the "
                "depths alike for all classes",
                stacklevel=3,
            )
            self._warned = True
        super()._adopt(twin, scores, images, labels)

    @torch.no_grad()
    def outvoted(self) -> int:
        """How many classes lose an image that they would win if all classes had the mean weights.

        The image is half-way between the mean of all v_c and that of its class. 0 where images are not nearer to
        images of other classes than to their own texts, since scores of different depths are then alike in size.
        """
        visual, classes = self.visual_prototypes.float(), len(self.visual_prototypes)
        own_text = (visual * self.text_embeds.float()).sum(dim=1).mean()
        others = (visual.sum(dim=0).square().sum() - classes) / max(1, classes * (classes - 1))
        if others <= own_text:
            return 0
        likely, own = (visual + visual.mean(dim=0)) / 2, torch.arange(classes, device=visual.device)
        alike = (self.reliability.float().mean(dim=0)[:, None] * self.bridge_prototypes()).sum(dim=1)
        wins, would_win = ((likely @ w.T).argmax(dim=1) == own for w in (self.ensemble_prototypes, alike))
        return int((~wins & would_win).sum())

    def logits(self, images: Tensor) -> Tensor:
        """tau z . w_c: linear in z, so the sum over the depths is folded into one vector per class."""
        return self.logit_scale * images @ self.ensemble_prototypes.T

    def left_out(self, images: Tensor, labels: Tensor) -> Tensor:
        """v_c is without the image; the reliabilities stay."""
        lengths = self.lengths[labels.to(self.lengths.device), None].to(images)
        visual = F.normalize(self.visual_prototypes[labels].float() * lengths - images, dim=1)
        bridges = bridge_prototypes(visual, self.text_embeds[labels].float(), self.depths.float())
        ensemble = (self.reliability[labels].float()[:, :, None] * bridges).sum(dim=1)
        scores = self.logit_scale * (images * ensemble).sum(dim=1, keepdim=True)
        return self.logits(images).scatter(1, labels[:, None], scores)

    def moved(self, matrix: Tensor) -> dict[str, Tensor]:
        """v_c to the direction of v_c M; texts, reliabilities, numbers of images and lengths stay."""
        return {"visual_prototypes": F.normalize(self.visual_prototypes.double().cpu() @ matrix, dim=1)}

    @property
    def ensemble_prototypes(self) -> Tensor:
        """w_c = sum_k pi_c(alpha_k) b_c(alpha_k), (C, d), float32; shorter than 1 by design."""
        return self.derived(
            "ensemble", lambda: (self.reliability.float()[:, :, None] * self.bridge_prototypes()).sum(dim=1)
        )

    @torch.no_grad()
    def bridge_prototypes(self) -> Tensor:
        """b_c(alpha_k), (C, K_b, d), float32 unit vectors."""
        return bridge_prototypes(self.visual_prototypes.float(), self.text_embeds.float(), self.depths.float())

    @torch.no_grad()
    def expected_depth(self) -> Tensor:
        """sum_k pi_c(alpha_k) alpha_k, (C,), float32: 0 trusts the visual prototype, 1 the text embedding."""
        return (self.reliability.float() * self.depths.float()).sum(dim=1)
