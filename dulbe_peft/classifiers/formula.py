"""A classifier as one line of PyTorch, for places that do not have this package."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F

AFFINE = 'z @ t["weight"].T + t["bias"]'
TOLERANCE = 1e-5  # of the largest score
ROWS = 256


def random_features(width: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """The same random unit features at every call, (256, width), float32."""
    rows = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(0))
    return F.normalize(rows, dim=1).to(device)


def same_scores(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two sets of scores differ by rounding alone."""
    if found.shape != expected.shape or not torch.isfinite(found).all():
        return False
    largest = max(1.0, float(expected.abs().max()))
    return float((found - expected).abs().max()) <= TOLERANCE * largest


@torch.no_grad()
def affine(
    logits: Callable[[torch.Tensor], torch.Tensor], width: int, device: torch.device
) -> dict[str, torch.Tensor] | None:
    """`weight` W, (C, d), and `bias` b, (C,), with logits(z) = z W' + b; None where the scores are no such map.

    b is the score of 0, and W' that of the identity, less b. Random unit features decide whether W and b give the
    scores.

    Args:
        logits: unit features (n, d) to scores (n, C).
        width: d.
        device: where `logits` takes its features.
    """
    bias = logits(torch.zeros(1, width, device=device))[0]
    weight = (logits(torch.eye(width, device=device)) - bias).T
    features = random_features(width, device)
    if not same_scores(features @ weight.T + bias, logits(features)):
        return None
    return {"weight": weight, "bias": bias}
