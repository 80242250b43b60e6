"""A classifier as a function of plain PyTorch, for places that do not have this package."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from dulbe_peft.classifiers.base import Classifier

TOLERANCE = 1e-5  # of the largest score
ROWS = 256


def linear(z: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Scores, (n, C), of unit features z, (n, d): a matrix and a bias."""
    return z @ weight.T + bias


def random_features(width: int, device: torch.device | str = "cpu") -> Tensor:
    """The same random unit features at every call, (256, width), float32."""
    rows = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0))
    return F.normalize(rows, dim=1).to(device)


def same_scores(found: Tensor, expected: Tensor) -> bool:
    """Whether two sets of scores differ by rounding alone."""
    if found.shape != expected.shape or not torch.isfinite(found).all():
        return False
    largest = max(1.0, float(expected.abs().max()))
    return float((found - expected).abs().max()) <= TOLERANCE * largest


@torch.no_grad()
def affine(classifier: Classifier) -> dict[str, Tensor]:
    """`weight` W, (C, d), and `bias` b, (C,), of logits z W' + b; a ValueError where random features say otherwise.

    b is the score of 0, and W' that of the identity, less b.
    """
    width, device = classifier.embed_dim, classifier.device
    bias = classifier.logits(torch.zeros(1, width, device=device))[0]
    weight = (classifier.logits(torch.eye(width, device=device)) - bias).T
    features = random_features(width, device)
    if not same_scores(linear(features, weight, bias), classifier.logits(features)):
        raise ValueError(
            f"the {classifier.name!r} classifier is not linear in the features, and {type(classifier).__name__} has "
            "no formula() of its own: write one, or export as onnx, which needs none"
        )
    return {"weight": weight, "bias": bias}
