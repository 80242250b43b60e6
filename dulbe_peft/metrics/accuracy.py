"""Measures of a class-incremental stream. All accuracies are fractions in [0, 1]; tasks count from 0.

R[t, i]   accuracy on task i's classes after task t, among all classes seen by then; NaN for i > t
A[t]      accuracy on the test images of all classes seen after task t, task identity unknown

What was not measured is NaN in an array and None in JSON: a learner that had learned before a run began has tasks
that the run never tested. The measures leave it out. Numbers that are no accuracies are a `ValueError`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dulbe_peft.classifiers.prototype import PrototypeClassifier
from dulbe_peft.classifiers.text import TextClassifier

# What the rows of a table are that no classifier of the learner gives, as `Classifier.summary`; a report says it once.
BESIDE_CLASSIFIERS = {
    "zero_shot": "zero-shot: the model before it learned anything, which chooses by the names of the classes alone",
    "text": TextClassifier.summary,
    "class_means": PrototypeClassifier.summary,
}

# What people call these rows.
TITLES = {"zero_shot": "names alone", "text": "names after learning", "class_means": "class means"}


def result_rows(results: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The rows of a table of results, name and figures: the model before learning first, then every classifier."""
    whole = {key: results[key] for key in BESIDE_CLASSIFIERS if key in results}
    return list((whole | results.get("classifiers", {})).items())


def accuracy_matrix(rows: Sequence[Sequence[float | None]]) -> np.ndarray:
    """The matrix R, shape (T, T), float64, NaN above the diagonal, from rows of lengths 1, 2, ..., T."""
    matrix = np.full((len(rows), len(rows)), np.nan)
    for step, row in enumerate(rows):
        matrix[step, : step + 1] = np.asarray(row, dtype=np.float64)
    return matrix


def forgetting(matrix: np.ndarray) -> float:
    """Mean over all tasks i but the last of (max over t < T of R[t, i]) - R[T, i]; 0.0 for a single task."""
    if len(matrix) == 1:
        return 0.0
    earlier = matrix[:-1, :-1]
    best = np.where(np.isnan(earlier), -np.inf, earlier).max(axis=0)  # up to the task just before the last one
    return _finite_mean(best - matrix[-1, :-1])


def backward_transfer(matrix: np.ndarray) -> float:
    """Mean over all tasks i but the last of R[T, i] - R[i, i]; 0.0 for a single task, and else as `forgetting`."""
    return 0.0 if len(matrix) == 1 else _finite_mean(matrix[-1, :-1] - matrix.diagonal()[:-1])


def _finite_mean(values: np.ndarray) -> float:
    """Mean of the finite values, NaN without one."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")


def transfer_measures(matrix: Any) -> dict[str, float]:
    """Transfer, Average and Last of a (T, T) matrix, whose tasks are also tested before they are learned.

    Transfer is the mean, over the tasks but the first one, of the mean over the rows before a task is learned; Average
    is the mean of all entries, Last that of the last row.

    Reference:
        Zheng et al., "Preventing Zero-Shot Transfer Degradation in Continual Learning of Vision-Language Models".

    >>> transfer_measures([[0.75, 0.5], [0.25, 1.0]])
    {'transfer': 0.5, 'average': 0.625, 'last': 0.625}
    """
    array = np.asarray(matrix, dtype=np.float64)
    before = [array[:task, task].mean() for task in range(1, len(array))]
    means = {"transfer": np.mean(before), "average": array.mean(), "last": array[-1].mean()}
    return {name: float(value) for name, value in means.items()}


def calibration_error(confidence: Any, right: Any, bins: int = 15) -> float:
    """Expected calibration error: how far the probability of the answers is from the share of right answers.

    The images, (n,), are put into bins of equal width by the probability of their answer. The error is the mean over
    the images of their bin's gap: that of its mean probability and its share of right answers.

    Reference:
        Guo et al., "On Calibration of Modern Neural Networks", 2017, equation 3.

    >>> calibration_error([0.9, 0.9], [True, False])
    0.4
    """
    sure, hits = np.asarray(confidence, dtype=np.float64), np.asarray(right, dtype=np.float64)
    number = np.clip(np.ceil(sure * bins).astype(int) - 1, 0, bins - 1)
    gaps = np.bincount(number, weights=sure - hits, minlength=bins)
    return float(np.abs(gaps).sum() / len(sure))


def summarize(rows: Sequence[Sequence[float | None]], overall: Sequence[float | None]) -> dict[str, Any]:
    """The four measures, A as "overall" and R as "matrix", ready for JSON; None is what was not measured."""
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
    """A fraction in percent for people, 0.5 as 50.0; a dash for what was not measured."""
    # Adding 0.0 takes the sign from a zero.
    return "-" if value is None else f"{round(100 * value, digits) + 0.0:.{digits}f}"


def signed(value: float, digits: int = 1) -> str:
    """A difference of two fractions in percentage points, with its sign."""
    return ("+" if round(100 * value, digits) > 0 else "") + percent(value, digits)
