"""The measures against literal loops over their definitions."""

from __future__ import annotations

import json

import numpy as np
import pytest
import reference
import torch

from dulbe_peft.metrics.accuracy import (
    accuracy_matrix,
    backward_transfer,
    calibration_error,
    forgetting,
    percent,
    summarize,
    transfer_measures,
)


def random_rows(tasks: int, seed: int = 0) -> list[list[float]]:
    numbers = np.random.RandomState(seed)
    return [numbers.rand(step + 1).tolist() for step in range(tasks)]


def literal_forgetting(rows: list[list[float]]) -> float:
    last = len(rows) - 1
    drops = []
    for i in range(last):
        best = -1.0
        for t in range(last):
            if t >= i and rows[t][i] > best:
                best = rows[t][i]
        drops.append(best - rows[last][i])
    return sum(drops) / len(drops)


def literal_backward_transfer(rows: list[list[float]]) -> float:
    last = len(rows) - 1
    return sum(rows[last][i] - rows[i][i] for i in range(last)) / last


@pytest.mark.parametrize("tasks", [2, 3, 10])
def test_measures_equal_the_definitions(tasks):
    rows = random_rows(tasks, seed=tasks)
    assert forgetting(accuracy_matrix(rows)) == pytest.approx(literal_forgetting(rows))
    assert backward_transfer(accuracy_matrix(rows)) == pytest.approx(literal_backward_transfer(rows))


def test_a_single_task_forgets_nothing():
    assert summarize(accuracy_matrix([[0.4]]), [0.4]) == {
        "average_accuracy": 0.4,
        "last_accuracy": 0.4,
        "forgetting": 0.0,
        "backward_transfer": 0.0,
        "overall": [0.4],
        "matrix": [[0.4]],
    }


def test_what_was_not_measured_is_left_out_and_never_invented():
    """Two tasks were learned before the run, and the first one's tests were gone until the last step."""
    rows = [[None], [None, None], [None, 0.9, 0.8], [0.5, 0.7, 0.6, 1.0]]
    summary = summarize(accuracy_matrix(rows), [None, None, 0.85, 0.7])
    assert summary["matrix"] == rows and summary["overall"] == [None, None, 0.85, 0.7]
    assert summary["average_accuracy"] == pytest.approx((0.85 + 0.7) / 2) and summary["last_accuracy"] == 0.7
    assert summary["forgetting"] == pytest.approx(((0.9 - 0.7) + (0.8 - 0.6)) / 2)
    assert summary["backward_transfer"] == pytest.approx(0.6 - 0.8), "task 2 was not measured when it came"
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    unknown = summarize(accuracy_matrix([[0.5], [None, None]]), [0.5, None])
    assert unknown["last_accuracy"] is None and unknown["forgetting"] is None
    assert (percent(0.123), percent(None), percent(0.123, 2)) == ("12.3", "-", "12.30")


def test_the_calibration_error_equals_the_literal_one():
    generator = torch.Generator().manual_seed(0)
    probabilities = (4 * torch.randn(200, 5, generator=generator)).softmax(dim=1)
    truth = torch.randint(5, (200,), generator=generator)
    for bins in (1, 7, 15):
        expected = reference.calibration_error(probabilities, truth, bins)
        sure, said = probabilities.max(dim=1)
        assert calibration_error(sure, said == truth, bins) == pytest.approx(expected, abs=1e-6) and expected > 0.1
    assert calibration_error([1.0, 1.0], [True, True]) == 0


def literal_transfer(matrix):
    tasks = range(len(matrix))
    before = [sum(matrix[t][i] for t in tasks if t < i) / sum(1 for t in tasks if t < i) for i in tasks if i > 0]
    average = [sum(matrix[t][i] for t in tasks) / len(matrix) for i in tasks]
    return {
        "transfer": sum(before) / len(before),
        "average": sum(average) / len(average),
        "last": sum(matrix[-1]) / len(matrix),
    }


@pytest.mark.parametrize("tasks", [2, 3, 11])
def test_transfer_average_and_last_equal_the_definitions(tasks):
    matrix = np.random.default_rng(tasks).random((tasks, tasks))
    assert transfer_measures(matrix) == pytest.approx(literal_transfer(matrix.tolist()))
