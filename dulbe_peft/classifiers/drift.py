"""Drift: where the features of old images went, judged by how the new task's features moved."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_map(before: Tensor, after: Tensor, ridge: float = 0.03) -> Tensor:
    """The linear map M, (d, d), that takes unit features, (n, d), before a task to those after it.

        M = argmin |Z M - Z_after|^2 + lambda |M - I|^2 = (Z'Z + lambda I)^-1 (Z'Z_after + lambda I)

    `ridge` is lambda over the mean eigenvalue of Z'Z. Directions without images of the task stay as they were.

    >>> linear_map(torch.eye(2), 2 * torch.eye(2), ridge=1e-9).round(decimals=3).tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    if before.ndim != 2 or before.shape != after.shape or not len(before):
        raise ValueError(f"before and after must both be (n, d), got {tuple(before.shape)} and {tuple(after.shape)}")
    old, new = before.detach().cpu().double(), after.detach().cpu().double()
    gram = old.T @ old
    pull = ridge * gram.trace() / len(gram) * torch.eye(len(gram), dtype=torch.float64)
    return torch.linalg.solve(gram + pull, old.T @ new + pull)
