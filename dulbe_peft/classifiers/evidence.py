"""How strong the prior of a Bayesian regression is: by the evidence, unless held-back images clearly say otherwise."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

SURE = 3.0  # standard deviations: chance alone makes one other lambda so much better once in 700 tries; 24 are tried


@dataclass(frozen=True, eq=False)
class Regression:
    """A regression with the prior mean W_0, (K, C), in the basis of the eigenvectors of G, in float64.

    `values` and `vectors` are of G, `turned` is H'R in their basis, (K, C), `shape` has the eigenvalues of L / lambda.
    `likeliest` is the place in the grid of the lambda with the largest evidence.
    """

    prior: Tensor
    values: Tensor
    vectors: Tensor
    turned: Tensor
    shape: Tensor
    likeliest: int

    def solution(self, ridge: float) -> Tensor:
        """W, (K, C), for a lambda."""
        return self.prior + self.vectors @ self._correction(ridge)

    def scores(self, lifted: Tensor, ridges: Sequence[float]) -> Iterator[Tensor]:
        """The scores of (n, K) rows for each lambda in turn, (n, C)."""
        from_prior, turned = lifted @ self.prior, lifted @ self.vectors
        for ridge in ridges:
            yield from_prior + turned @ self._correction(ridge)

    def _correction(self, ridge: float) -> Tensor:
        return self.turned / (self.values + ridge * self.shape)[:, None]


def log_evidence(values: Tensor, turned: Tensor, residual: float, rows: int, precisions: Tensor) -> float:
    """Log density of the targets under the prior, with the noise variance s2 that makes them most likely.

    Every class's residuals r over the n images are r ~ N(0, s2 (I + H L^-1 H')), independently of the others'. With
    q = the sum over the classes of r' (I + H L^-1 H')^-1 r, the most likely s2 is q / (n C).

    G = H'H has the eigenvalues `values`, (K,), and L has `precisions`, (K,), in the same basis; `turned`, (K, C), is
    H'R in it. `residual` is the sum of the squares of R, and `rows` is n.

    Reference:
        MacKay, 1992, section 3: the evidence of a linear model.
    """
    classes = turned.shape[1]
    explained = float((turned.square().sum(dim=1) / (values + precisions)).sum())
    # Where every target is met, q is 0 up to rounding.
    spread = max(residual - explained, 1e-12 * max(residual, 1.0)) / (rows * classes)
    determinant = float((values / precisions).log1p().sum())
    return -0.5 * classes * (rows * (math.log(2 * math.pi * spread) + 1) + determinant)


def best_step(wins: Tensor) -> int:
    """How many steps of the grid to take from the most likely lambda, by `BayesClassifier.wins`, (25, 25).

    A step is clearly better than none if it is ahead by three standard deviations, among the images that only one of
    the two tells right. If no step is, the answer is 0. Else it is the shortest clearly better step that is behind
    the best one by no more than one standard deviation, because the tested copy had fewer images.

    Reference:
        McNemar, 1947, for the test; Breiman et al., "Classification and Regression Trees", 1984, section 3.4.3.
    """
    none, wins = len(wins) // 2, wins.cpu().double()  # not every device has float64
    ahead, deviation = wins - wins.T, (wins + wins.T).sqrt()
    better = ahead[:, none] > SURE * deviation[:, none]
    if not better.any():
        return 0
    best = int(ahead[:, none].where(better, -1.0).argmax())
    near = (better & (ahead[best] <= deviation[best])).nonzero()[:, 0].tolist()
    return min(near, key=lambda place: (abs(place - none), -float(ahead[place, none]))) - none
