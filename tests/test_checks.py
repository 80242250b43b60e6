"""One check of ints and one of numbers, for every argument."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dulbe_peft import DualModeLoraConfig
from dulbe_peft.utils.checks import check_int, check_number


@pytest.mark.parametrize("value", [1, 3, np.int64(2), np.uint8(2)])
def test_ints_of_numpy_become_python_s(value):
    assert type(check_int("n", value, 1, 3)) is int and check_int("n", value, 1, 3) == value


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (0, ValueError, "n must be at least 1, got 0"),
        (4, ValueError, "n must be at most 3, got 4"),
        (True, TypeError, "n must be an int, got True of type bool"),
        (np.True_, TypeError, "n must be an int"),
        (2.0, TypeError, "n must be an int, got 2.0 of type float"),
        ("2", TypeError, "n must be an int, got '2' of type str"),
        (None, TypeError, "n must be an int"),
    ],
)
def test_what_is_no_int_or_out_of_range(value, error, words):
    with pytest.raises(error, match=words):
        check_int("n", value, 1, 3)


@pytest.mark.parametrize(
    ("value", "range", "error", "words"),
    [
        (0, {"positive": True}, ValueError, "x must be finite and positive, got 0"),
        (-0.5, {"least": 0}, ValueError, "x must be finite and at least 0, got -0.5"),
        (math.nan, {}, ValueError, "x must be finite, got nan"),
        (-math.inf, {}, ValueError, "x must be finite, got -inf"),
        (10**400, {"positive": True}, ValueError, "x must be finite"),
        (False, {"least": 0}, TypeError, "x must be a number, got False of type bool"),
        ("1", {}, TypeError, "x must be a number, got '1' of type str"),
    ],
)
def test_what_is_no_number_or_out_of_range(value, range, error, words):
    with pytest.raises(error, match=words):
        check_number("x", value, **range)


def test_numbers_in_range():
    check_number("x", -1.5)
    check_number("x", 0, least=0)
    check_number("x", 1e-30, positive=True)


def test_a_configuration_with_numpy_s_ints_can_be_saved(tmp_path):
    config = DualModeLoraConfig(residual_rank=np.int64(2), layers_to_transform=list(np.array([0, 1, 3])))
    config.save_pretrained(tmp_path)
    saved = DualModeLoraConfig.from_pretrained(tmp_path)
    assert saved.residual_rank == 2 and saved.layers_to_transform == [0, 1, 3]
