"""The measures against literal loops over their definitions."""

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


@pytest.mark.parametrize("tasks", [2, 3, 10])
def test_measures_equal_the_definitions(tasks):
    full = np.random.RandomState(tasks).rand(tasks, tasks).tolist()
    rows, last, earlier = [row[: t + 1] for t, row in enumerate(full)], tasks - 1, range(tasks - 1)
    drops = [max(rows[t][i] for t in range(i, last)) - rows[last][i] for i in earlier]
    assert forgetting(accuracy_matrix(rows)) == pytest.approx(sum(drops) / last)
    gains = [rows[last][i] - rows[i][i] for i in earlier]
    assert backward_transfer(accuracy_matrix(rows)) == pytest.approx(sum(gains) / last)
    before = [sum(full[t][i] for t in range(i)) / i for i in range(1, tasks)]
    found = {"transfer": sum(before) / last, "average": sum(map(sum, full)) / tasks**2, "last": sum(full[-1]) / tasks}
    assert transfer_measures(full) == pytest.approx(found)


def test_a_single_task_forgets_nothing():
    found = summarize(accuracy_matrix([[0.4]]), [0.4])
    measures = ("average_accuracy", "last_accuracy", "forgetting", "backward_transfer")
    assert [found[name] for name in measures] == [0.4, 0.4, 0.0, 0.0] and found["matrix"] == [[0.4]]


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
