"""The map by which the stored statistics of old classes follow features that training has changed.

X, (n, w), are the features of a task's images before the task, Y those after it, and M maps the one to the other:

    M = argmin |X M - Y|^2 + lambda |M - I|^2 = I + X'(X X' + lambda I)^-1 (Y - X)

The task's images determine M only on their span; outside it M is the identity. The penalty lambda keeps M near the
identity in directions in which the images vary little.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dulbe_peft.utils.torch_settings import one_thread

LINEAR = 0.03  # lambda of "linear", divided by the mean eigenvalue of X'X
# Left-out classes choose lambda, divided by the same, among these values. With the last one nothing changes.
STRENGTHS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, float("inf"))
FOLDS = 5
MOST_COMPARED = 1000  # images for the choice of lambda


def linear_map(before: Tensor, after: Tensor, ridge: float = LINEAR) -> Tensor:
    """Fit the linear map M, (w, w), float64, from features, (n, w), before a task to those after it.

    `ridge` is lambda divided by the mean eigenvalue of X'X. M leaves directions outside the span of the images as they
    are.

    >>> linear_map(torch.eye(2), 2 * torch.eye(2), ridge=1e-9).round(decimals=3).tolist()
    [[2.0, 0.0], [0.0, 2.0]]
    """
    old, new = _checked(before, after)
    identity = torch.eye(old.shape[1], dtype=torch.float64)
    change, pull = new - old, ridge * old.square().sum() / old.shape[1]
    if len(old) < old.shape[1]:
        images = torch.eye(len(old), dtype=torch.float64)
        return identity + old.T @ torch.linalg.solve(old @ old.T + pull * images, change)
    return identity + torch.linalg.solve(old.T @ old + pull * identity, old.T @ change)


@one_thread()
def chosen_map(before: Tensor, after: Tensor, labels: Tensor) -> Tensor | None:
    """Fit `linear_map` with the lambda that best predicts left-out classes; return None if no map helps.

    No images of old classes are available. Instead, the features of each fifth of the task's classes are predicted by
    a map fitted to the other four fifths. `labels`, (n,), are the images' classes. If the task has only one class,
    images are left out instead of classes.
    """
    old, new = _checked(before, after)
    rows = slice(None, None, (len(old) - 1) // MOST_COMPARED + 1)
    errors = left_out_errors(old[rows], new[rows], labels[rows].cpu())
    best = max(ridge for ridge, error in zip(STRENGTHS, errors.tolist(), strict=True) if error == float(errors.min()))
    return None if best == float("inf") else linear_map(old, new, best)


def left_out_errors(old: Tensor, new: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of |y - x M|^2 over all images for each of `STRENGTHS`, with M fitted to the other folds."""
    errors, change = torch.zeros(len(STRENGTHS), dtype=torch.float64), new - old
    for held in _folds(labels):
        known, unit = old[~held], old[~held].square().sum() / old.shape[1]
        few = len(known) < known.shape[1]
        values, vectors = torch.linalg.eigh(known @ known.T if few else known.T @ known)
        left = old[held] @ known.T @ vectors if few else old[held] @ vectors
        right = vectors.T @ (change[~held] if few else known.T @ change[~held])
        for place, ridge in enumerate(STRENGTHS):
            foretold = (left / (values.clamp_min(0) + ridge * unit)) @ right
            errors[place] += (change[held] - foretold).square().sum()
    return errors


def _folds(labels: Tensor) -> Iterator[Tensor]:
    """Yield, for each fold, a mask, (n,), of the images that are left out; both parts have images."""
    classes, owners = labels.unique(return_inverse=True)
    owners = owners if len(classes) > 1 else torch.arange(len(labels))
    for fold in (owners % FOLDS).unique():
        held = owners % FOLDS == fold
        if not held.all():
            yield held


def _checked(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
    """Check the shapes; return both in float64 on the CPU, because some devices have no float64."""
    if before.ndim != 2 or before.shape != after.shape or not len(before):
        raise ValueError(f"before and after must both be (n, d), got {tuple(before.shape)} and {tuple(after.shape)}")
    return before.detach().cpu().double(), after.detach().cpu().double()
