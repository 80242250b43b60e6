"""Measures of a class-incremental stream. All accuracies are fractions in [0, 1]; tasks are counted from 0.

R[t, i]   accuracy on task i's classes after task t, among all classes seen by then; NaN for i > t
A[t]      accuracy on the test images of all classes seen after task t, task identity unknown

A value that was not measured is NaN in an array and None in JSON. Such values occur if a learner had already learned
some tasks before a run, because the run does not test these tasks. The measures leave them out.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dulbe_peft.classifiers.prototype import PrototypeRule
from dulbe_peft.classifiers.text import TextRule

# Summaries, like `Rule.summary`, of the rows of a table that do not come from a classifier of the learner.
BESIDE_CLASSIFIERS = {
    "zero_shot": "zero-shot: the model before it learned anything, which uses only the names of the classes",
    "text": TextRule.summary,
    "class_means": PrototypeRule.summary,
}

# The titles of these rows for people.
TITLES = {"zero_shot": "names alone", "text": "names after learning", "class_means": "class means"}


def accuracy_matrix(rows: Sequence[Sequence[float | None]]) -> np.ndarray:
    """Return the matrix R, (T, T), float64, NaN above the diagonal, from rows of lengths 1, 2, ..., T."""
    matrix = np.full((len(rows), len(rows)), np.nan)
    for step, row in enumerate(rows):
        matrix[step, : step + 1] = np.asarray(row, dtype=np.float64)
    return matrix


def forgetting(matrix: np.ndarray) -> float:
    """Return the mean over all tasks i except the last of (max over t < T of R[t, i]) - R[T, i]; 0.0 for one task."""
    if len(matrix) == 1:
        return 0.0
    earlier = matrix[:-1, :-1]
    best = np.where(np.isnan(earlier), -np.inf, earlier).max(axis=0)  # before the last task
    return _finite_mean(best - matrix[-1, :-1])


def backward_transfer(matrix: np.ndarray) -> float:
    """Return the mean over all tasks i except the last of R[T, i] - R[i, i]; 0.0 for one task."""
    return 0.0 if len(matrix) == 1 else _finite_mean(matrix[-1, :-1] - matrix.diagonal()[:-1])


def _finite_mean(values: np.ndarray) -> float:
    """Return the mean of the finite values, or NaN if there are none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")


def transfer_measures(matrix: object) -> dict[str, float]:
    """Return Transfer, Average and Last of a (T, T) matrix whose tasks are also tested before they are learned.

    Transfer averages, over all tasks except the first, a task's mean accuracy before it is learned. Average is the
    mean of all entries, and Last is the mean of the last row.

    Reference:
        Zheng et al., "Preventing Zero-Shot Transfer Degradation in Continual Learning of Vision-Language Models".

    >>> transfer_measures([[0.75, 0.5], [0.25, 1.0]])
    {'transfer': 0.5, 'average': 0.625, 'last': 0.625}
    """
    array = np.asarray(matrix, dtype=np.float64)
    before = [array[:task, task].mean() for task in range(1, len(array))]
    means = {"transfer": np.mean(before), "average": array.mean(), "last": array[-1].mean()}
    return {name: float(value) for name, value in means.items()}


def calibration_error(confidence: object, right: object, bins: int = 15) -> float:
    """Return the expected calibration error: how far the probabilities of the predictions are from their accuracy.

    `confidence`, (n,), holds the probability of each prediction, and `right`, (n,), whether it is correct. Predictions
    are put into `bins` bins of equal width by their probability. The error is the mean over all predictions of the
    gap between the mean probability and the accuracy of their bin.

    Reference:
        Guo et al., "On Calibration of Modern Neural Networks", 2017, equation 3.

    >>> calibration_error([0.9, 0.9], [True, False])
    0.4
    """
    probability, correct = np.asarray(confidence, dtype=np.float64), np.asarray(right, dtype=np.float64)
    bin_of = np.clip(np.ceil(probability * bins).astype(int) - 1, 0, bins - 1)
    gaps = np.bincount(bin_of, weights=probability - correct, minlength=bins)
    return float(np.abs(gaps).sum() / len(probability))


def summarize(rows: Sequence[Sequence[float | None]], overall: Sequence[float | None]) -> dict[str, Any]:
    """Return the four measures, A as "overall" and R as "matrix", ready for JSON. Unmeasured values are None."""
    matrix = accuracy_matrix(rows)
    return {
        "average_accuracy": float(np.nanmean(np.asarray(overall, dtype=np.float64))),
        "last_accuracy": overall[-1],
        "forgetting": _plain(forgetting(matrix)),
        "backward_transfer": _plain(backward_transfer(matrix)),
        "overall": list(overall),
        "matrix": [list(row) for row in rows],
    }


def _plain(value: float) -> float | None:
    return None if np.isnan(value) else value


def percent(value: float | None, digits: int = 1) -> str:
    """Format a fraction in percent, such as 0.5 as "50.0", or None as a dash."""
    # Adding 0.0 turns -0.0 into 0.0.
    return "-" if value is None else f"{round(100 * value, digits) + 0.0:.{digits}f}"


def signed(value: float, digits: int = 1) -> str:
    """Format a difference of two fractions in percentage points, with its sign."""
    return ("+" if round(100 * value, digits) > 0 else "") + percent(value, digits)
