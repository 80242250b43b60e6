"""Linear discriminant analysis that streams: one Gaussian a class, all with the same covariance.

Sigma = (1 - s) W / f + s (tr W / f d) I      W: scatter within the classes, f: its degrees of freedom
m_c = b + w_c (mu_c - b)                      b: mean of all mu_c,  w_c = n_c / (n_c + k) over that of the largest n
score = z' Sigma^-1 m_c - m_c' Sigma^-1 m_c / 2
"""

from collections.abc import Sequence
from typing import Annotated, Literal, Self

import torch
from annotated_types import Gt, Le
from torch import Tensor

from dulbe_peft.classifiers.base import Classifier
from dulbe_peft.classifiers.calibration import ranking
from dulbe_peft.classifiers.checks import check_directions
from dulbe_peft.classifiers.covariance import oas_shrinkage, shrunk_covariance
from dulbe_peft.utils.settings import Weight

MOST_JUDGED = 1000  # images of a task that are left out


class LdaClassifier(Classifier):
    """Classes as Gaussians with means of their own and one shared, shrunk covariance; all classes equally likely.

    The result is the one on all data at once, whatever the order of images, classes and tasks.

    Args:
        logit_scale: tau. The covariance is I / tau while no class has two different images.
        shrinkage: s, how far the covariance goes to its mean variance times the identity, above 0 and at most 1.
            "oas": computed from the covariance and its degrees of freedom.
        prior_images: k, how many images at b each class is taken to have besides its own, relative to the largest
            class: where all counts are equal, and with 0, m_c = mu_c.

    Attributes:
        means, counts: mu_c, (C, d), float64, and the images of each class, (C,), int64.
        scatter: W, (d, d), float64, sum of (z - mu)(z - mu)' over all images, with the mean of each image's class.
        freedom: f, int64: number of images less number of classes, forgotten ones included.

    Reference:
        Hayes and Kanan, "Lifelong Machine Learning with Deep Streaming Linear Discriminant Analysis", 2020, with
        exact sums; Chen et al., "Shrinkage Algorithms for MMSE Covariance Estimation", 2010, equation 23 (OAS).
    """

    shrinkage: Annotated[float, Gt(0), Le(1)] | Literal["oas"] = "oas"
    prior_images: Weight = 1.0

    name = "lda"
    summary = (
        "linear discriminant analysis: class means, measured by how much the images of one class differ "
        "among each other"
    )
    updates = True

    def register(self) -> None:
        self.register_rows("counts", dtype=torch.int64)
        self.register_rows("means", self.embed_dim, dtype=torch.float64)
        self.register_buffer("scatter", torch.zeros(self.embed_dim, self.embed_dim, dtype=torch.float64))
        self.register_buffer("freedom", torch.zeros((), dtype=torch.int64))

    def added(self, images: Tensor, labels: Tensor, new: Sequence[str]) -> dict[str, Tensor]:
        images, labels = images.to(self.means), labels.to(self.means.device)
        kept = self.with_new_rows(len(new))
        old, old_means = kept["counts"].to(labels.device), kept["means"]
        counts = old + torch.bincount(labels, minlength=len(old))
        sums = (old_means * old[:, None]).index_add(0, labels, images)
        check_directions(sums[len(sums) - len(new) :], new)
        means = sums / counts[:, None]
        scatter = self.scatter + added_scatter(images, labels, old_means, means, old)
        return {"means": means, "counts": counts, "scatter": scatter, "freedom": self.freedom + len(images) - len(new)}

    def merged(self, other: Self, places: Tensor) -> dict[str, Tensor]:
        """Beside the sum, the scatter takes in how far apart the two means of a shared class are."""
        rows = self.merged_sums(other, places, "counts")
        kept = self.with_new_rows(len(rows["counts"]) - len(self._class_names))
        places, device = places.to(self.means.device), self.means.device
        theirs = torch.zeros_like(kept["means"]).index_copy(0, places, other.means.to(device))
        old = kept["counts"].to(device).double()
        new = rows["counts"].to(device) - old
        apart = (kept["means"] - theirs) * (old * new / (old + new)).sqrt()[:, None]
        return rows | {
            "means": (kept["means"] * old[:, None] + theirs * new[:, None]) / (old + new)[:, None],
            "scatter": self.scatter + other.scatter.to(device) + apart.T @ apart,
            "freedom": self.freedom + other.freedom.to(self.freedom.device) + (old * new > 0).sum(),
        }

    def without_image(self, image: Tensor, label: int) -> dict[str, Tensor]:
        """mu_c and W as in `left_out`."""
        means, counts = self.means.clone(), self.counts.clone()
        images, away = int(counts[label]), image.to(means) - means[label]
        means[label] -= away / (images - 1)
        counts[label] -= 1
        check_directions(means[[label]], [self._class_names[label]])
        scatter = self.scatter - images / (images - 1) * torch.outer(away, away)
        return {"means": means, "counts": counts, "scatter": scatter, "freedom": self.freedom - 1}

    def judge(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor] | None:
        images, labels = self.repeated(images, labels)
        return (self.left_out(images, labels), labels) if len(images) and len(self.means) > 1 else None

    def repeated(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """At most 1000 of the images, (n, d), whose class has others, in float64, and their labels."""
        images, labels = images.to(self.means), labels.to(self.means.device)
        several = (self.counts.to(labels.device)[labels] > 1).nonzero()[:, 0]
        rows = several[ranking(images[several]).argsort()][:: max(1, -(-len(several) // MOST_JUDGED))]
        return images[rows], labels[rows]

    def left_out(self, images: Tensor, labels: Tensor) -> Tensor:
        """See `Classifier.left_out`; in float64.

        Without an image z of class c, with u = z - mu_c and n = n_c, and with b and the shrinkage as they are,

            mu_c is mu_c - u / (n - 1)        Sigma is Sigma - h u u',  h = (1 - s) n / ((n - 1) f)
            P is P + g P u u' P,  g = h / (1 - h u' P u)        P = Sigma^-1        (Sherman and Morrison)
        """
        images, labels = images.to(self.means), labels.to(self.means.device)
        freedom, n = int(self.freedom), self.counts.to(labels.device)[labels].double()
        share = oas_shrinkage(self.scatter / freedom, freedom) if self.shrinkage == "oas" else float(self.shrinkage)
        inverse = torch.linalg.inv(self.covariance())
        middle, means, away = self.means.mean(dim=0), self.drawn_means(), images - self.means[labels]
        left = middle + self.confidence(n - 1)[:, None] * (self.means[labels] - away / (n - 1)[:, None] - middle)
        by_image, by_away = images @ inverse, away @ inverse
        across, turned, squares = by_image @ means.T, by_away @ means.T, (means @ inverse * means).sum(dim=1)
        squares = squares.expand_as(across).clone()
        own = torch.arange(len(labels)), labels
        across[own], turned[own] = (by_image * left).sum(dim=1), (by_away * left).sum(dim=1)
        squares[own] = (left @ inverse * left).sum(dim=1)
        length, along = (by_away * away).sum(dim=1), (by_away * images).sum(dim=1)
        shift = (1 - share) / freedom * n / (n - 1)
        gain = (shift / (1 - shift * length))[:, None]
        return across + gain * along[:, None] * turned - (squares + gain * turned.square()) / 2

    def covariance(self) -> Tensor:
        """Sigma, (d, d), float64, shrunk."""
        return shrunk_covariance(self.scatter, int(self.freedom), self.shrinkage, 1 / self.logit_scale)

    def confidence(self, counts: Tensor) -> Tensor:
        """w_c of classes with so many images."""
        most = int(self.counts.max()) if len(self.counts) else 1
        return (1 + self.prior_images / most) / (1 + self.prior_images / counts.double())

    def drawn_means(self) -> Tensor:
        """m_c, (C, d), float64."""
        middle = self.means.mean(dim=0)
        return middle + self.confidence(self.counts.to(self.means.device))[:, None] * (self.means - middle)

    def logits(self, images: Tensor) -> Tensor:
        weights, offsets = self.derived("solution", self._solve)
        return images @ weights - offsets

    def _solve(self) -> tuple[Tensor, Tensor]:
        factor, failed = torch.linalg.cholesky_ex(self.covariance())
        if failed:
            raise ValueError(
                f"the covariance cannot be inverted with shrinkage {self.shrinkage!r}: raise it, or use 'oas'"
            )
        means = self.drawn_means()
        weights = torch.cholesky_solve(means.T, factor)
        offsets = (means * weights.T).sum(dim=1) / 2
        return weights.float().to(self.device), offsets.float().to(self.device)

    def moved(self, matrix: Tensor) -> dict[str, Tensor]:
        """mu_c to M' mu_c and W to M' W M. What the map leaves over of the drift is not added to the scatter."""
        matrix = matrix.to(self.means.device)
        return {"means": self.means @ matrix, "scatter": matrix.T @ self.scatter @ matrix}


def added_scatter(images: Tensor, labels: Tensor, old_means: Tensor, means: Tensor, old_counts: Tensor) -> Tensor:
    """What (n, d) images add to W: their scatter around the new means, and what old images lose as theirs move."""
    shift, spread = (means - old_means) * old_counts[:, None].to(means).sqrt(), images - means[labels]
    return shift.T @ shift + spread.T @ spread
