"""How unlike all that was learned an image is: relative Mahalanobis distance, from means, counts and scatter alone.

    novelty = min_c (z - m_c)' S^-1 (z - m_c) - (z - m)' T^-1 (z - m)

S = W / f            W: scatter within the classes, f: its degrees of freedom
T = (W + B) / (N - 1)    B = sum n_c (m_c - m)(m_c - m)',  m: mean of all N images

Both go as far to a multiple of the identity as OAS says; where no class has two images, both are one such multiple.
The second distance takes out what makes an image odd whatever its class is. The sums are exact, and so is the novelty,
however the images came.

Reference:
    Ren et al., "A Simple Fix to Mahalanobis Distance for Improving Near-OOD Detection", arXiv 2106.09022.
"""

import torch
from torch import Tensor

from dulbe_peft.classifiers.calibration import class_shares, evenly, ranking
from dulbe_peft.classifiers.covariance import oas_shrinkage
from dulbe_peft.classifiers.state import GrowingState

NEEDED = {"sums", "counts", "scatter", "freedom"}  # buffers, as of `ClassSums`
MOST_JUDGED = 1000  # images of a task that are left out
AT_ONCE = 2**24  # distances in memory


class Shrunk:
    """The inverse, (d, d), of a covariance that goes the `share` of the way to a multiple of the identity.

    It comes from a scatter with its `freedom`, and is `variance` times the identity where that holds nothing.
    """

    def __init__(self, scatter: Tensor, freedom: int, variance: float) -> None:
        mean, identity = float(scatter.trace()) / max(freedom, 1) / len(scatter), torch.eye(len(scatter)).to(scatter)
        self.inverse, self.share, self.freedom = identity / variance, 1.0, 0
        if freedom >= 1 and mean >= 1e-20:  # rounding leaves less of images that are equal
            self.share, self.freedom = oas_shrinkage(scatter / freedom, freedom), freedom
            self.inverse = torch.linalg.inv((1 - self.share) / freedom * scatter + self.share * mean * identity)

    def without(self, rows: Tensor, taken: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """T P, T P x and I - T P T' of vectors x, (n, d), whose `taken` T, (n, r, d), leave the scatter."""
        taken = taken * ((1 - self.share) / max(self.freedom, 1)) ** 0.5
        by = taken @ self.inverse
        eye = torch.eye(taken.shape[1]).to(taken)
        return by, (by @ rows[:, :, None])[..., 0], eye - by @ taken.transpose(1, 2)

    def lengths(self, rows: Tensor, taken: Tensor) -> Tensor:
        """x' P x, (n,), of each row x with the scatter without t t' of its own r vectors t, (n, r, d) (Woodbury)."""
        _, across, left = self.without(rows, taken)
        more = (across * torch.linalg.solve(left, across)).sum(dim=1)
        return (rows @ self.inverse * rows).sum(dim=1) + more


class Distances:
    """What m_c, (C, d), n_c, (C,), W and f say, in float64: `middle` m, (d,), and the two covariances."""

    def __init__(self, means: Tensor, counts: Tensor, scatter: Tensor, freedom: int) -> None:
        self.means, self.counts, number = means, counts.to(means), int(counts.sum())
        self.middle = self.counts @ means / number
        apart = self.counts.sqrt()[:, None] * (means - self.middle)
        everything = scatter + apart.T @ apart
        variance = float(everything.trace()) / number / len(scatter) or 1.0
        self.within = Shrunk(scatter, freedom, variance)
        self.total = Shrunk(everything, number - 1, variance) if self.within.freedom else self.within

    def __call__(self, images: Tensor) -> Tensor:
        """The novelty of unit features, (n, d) to (n,), float64."""
        rows = images.to(self.means)
        parts = rows.split(max(1, AT_ONCE // len(self.means)))
        nearest = torch.cat([self._squares(part).amin(dim=1) for part in parts]) if len(rows) else rows[:, 0]
        away = rows - self.middle
        return nearest - (away @ self.total.inverse * away).sum(dim=1)

    def _squares(self, rows: Tensor) -> Tensor:
        """(z - m_c)' P (z - m_c), (n, C)."""
        rows, means = rows - self.middle, self.means - self.middle
        by = means @ self.within.inverse
        own = (rows @ self.within.inverse * rows).sum(dim=1, keepdim=True)
        return own - 2 * rows @ by.T + (by * means).sum(dim=1)

    def left_out(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Novelties of learned images, (n, d), each as if it had not been learned, and as if its class had not.

        Each class needs two images. The shares that OAS gives, and the degrees of freedom, stay as they are; so does
        what the other images of the class added to W, for the second. An image is about 1 + 1/n from the mean of n
        others, so its distance from the n - 1 that are left is taken (1 + 1/n) / (1 + 1/(n - 1)) times.
        """
        rows, labels = images.to(self.means), labels.to(self.means.device)
        means, total = self.means[labels], self.counts.sum()
        n, away, off = self.counts[labels, None], rows - means, rows - self.middle
        own = (n / (n - 1)).sqrt() * away  # n / (n - 1) u u' leaves W with an image; u = z - m_c
        by, across, left = self.within.without(rows, own[:, None])
        squares = self._squares(rows)
        squares += (across - by[:, 0] @ self.means.T).square() / left[:, 0]
        each = torch.arange(len(labels)).to(labels)
        other = squares.index_put((each, labels), torch.tensor(torch.inf).to(squares)).amin(dim=1)
        squares[each, labels] = self.within.lengths(((n + 1) / (n - 1)).sqrt() * away, own[:, None])
        alone = self.total.lengths(total / (total - 1) * off, ((total / (total - 1)).sqrt() * off)[:, None])
        apart, rest = means - self.middle, total - n
        gone = torch.stack([own, (n * total / rest).sqrt() * apart], dim=1)
        return squares.amin(dim=1) - alone, other - self.total.lengths(off + n / rest * apart, gone)


def distances(classifier: GrowingState) -> Distances | None:
    """The distances of a classifier that keeps what they need; None: it does not, or has learned nothing."""
    kept, width = classifier.tensors(), classifier.embed_dim
    if not kept.keys() >= NEEDED or not classifier.class_names:
        return None

    def make() -> Distances:
        counts, scatter = kept["counts"], kept["scatter"][:width, :width].double()
        means = kept["sums"] / counts[:, None].to(kept["sums"])
        return Distances(means[:, :width].double(), counts, scatter, int(kept["freedom"]))

    found: Distances = classifier.derived("distances", make)
    return found


def judged(classifier: GrowingState, images: Tensor, labels: Tensor) -> tuple[list[float], float] | None:
    """Novelties of learned images that are left out, the least first, each class alike, and the area under the ROC
    curve: the chance that an image whose class is left out is more novel. None: no image or class can be left out.
    """
    found = distances(classifier)
    if found is None or len(found.means) < 2:
        return None
    several = (found.counts[labels.to(found.counts.device)] > 1).nonzero()[:, 0].to(labels.device)
    if not len(several):
        return None
    rows = several[ranking(images[several]).argsort()][:: -(-len(several) // MOST_JUDGED)]
    own, other = found.left_out(images[rows], labels[rows])
    weights = class_shares(labels[rows], labels).to(own)
    known, unknown = evenly(own, weights), evenly(other, weights)
    area = (unknown[:, None] > known).double().mean() + (unknown[:, None] == known).double().mean() / 2
    return known.tolist(), float(area)
