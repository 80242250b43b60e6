"""Drift: where the features of old images went, judged by how the new task's features moved."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_map(before: Tensor, after: Tensor, ridge: float = 0.03) -> Tensor:
    """The linear map M that takes features before a task to those after it, pulled toward the identity.

        M = argmin |Z M - Z_after|^2 + lambda |M - I|^2 = (Z'Z + lambda I)^-1 (Z'Z_after + lambda I)

    Directions without images of the task stay as they were. `Classifier.move` takes M. The default ridge was chosen on
    held-back training images of a stream of handwriting; from 0.01 to 0.1 the results hardly differ.

    Args:
        before: Z, (n, d), unit features of the task's images with the model as it was before the task.
        after: Z_after, (n, d), with the model after it.
        ridge: lambda over the mean eigenvalue of Z'Z, positive.

    Returns:
        M, (d, d), float64; an old feature z is now about z M.

    Raises:
        ValueError: the shapes differ or there is no image, an entry is not finite, or the ridge is not positive.

    >>> linear_map(torch.eye(2), 2 * torch.eye(2), ridge=1e-9).round(decimals=3).tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    if before.ndim != 2 or before.shape != after.shape or not len(before):
        raise ValueError(f"before and after must both be (n, d), got {tuple(before.shape)} and {tuple(after.shape)}")
    if not 0 < ridge < float("inf"):
        raise ValueError(f"ridge must be positive and finite, got {ridge!r}")
    if not (torch.isfinite(before).all() and torch.isfinite(after).all()):
        raise ValueError("before or after holds NaN or infinity")
    old, new = before.detach().cpu().double(), after.detach().cpu().double()
    gram = old.T @ old
    pull = ridge * gram.trace() / len(gram) * torch.eye(len(gram), dtype=torch.float64)
    return torch.linalg.solve(gram + pull, old.T @ new + pull)
