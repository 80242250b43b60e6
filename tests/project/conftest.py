"""A working folder for the programs on pages."""

import pytest
import write_saved

from dulbe_peft.strategies import STRATEGIES
from dulbe_peft.streams.tasks import class_incremental_tasks


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A working folder with 8 images of each digit. Strategies that a page registers are removed afterwards."""
    monkeypatch.chdir(tmp_path)
    train, test = write_saved.digits(0, 8), write_saved.digits(24, 30)
    monkeypatch.setattr(
        "dulbe_peft.streams.digits.digit_tasks",
        lambda increment=2: class_incremental_tasks(train, test, increment=increment),
    )
    monkeypatch.setattr(STRATEGIES, "_classes", dict(STRATEGIES._classes))
    return tmp_path
