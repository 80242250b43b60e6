"""Signals wait for the end of a step, and come through all the same."""

from __future__ import annotations

import signal
import threading

import pytest

from dulbe_peft.interrupts import stop_between_batches, until_stopped


@pytest.fixture(autouse=True)
def _handlers_are_restored():
    before = [signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    numbers = (signal.SIGINT, signal.SIGTERM)
    after = [signal.signal(number, handler) for number, handler in zip(numbers, before, strict=True)]
    assert after == [signal.default_int_handler] * 2


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_waits_for_the_end_of_the_step(number, error):
    finished = []
    with pytest.raises(error) as caught, stop_between_batches():
        for step in until_stopped(range(5)):
            if step == 2:
                signal.raise_signal(number)
            finished.append(step)
    assert finished == [0, 1, 2]
    assert error is KeyboardInterrupt or caught.value.code == 143
    assert list(until_stopped(range(3))) == [0, 1, 2], "a signal was kept for the next run"


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_acts_at_once(second):
    finished = []
    with pytest.raises(KeyboardInterrupt), stop_between_batches():
        for step in until_stopped(range(5)):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(second)
            finished.append(step)
    assert not finished


def test_a_signal_after_the_last_batch_is_not_lost():
    finished = []
    with pytest.raises(KeyboardInterrupt), stop_between_batches():
        signal.raise_signal(signal.SIGINT)
        finished.append("commit")
    assert finished


def test_an_error_that_a_signal_brings_about_is_the_signal_s():
    """A terminal's SIGINT reaches the processes that read images, too, and their end is an error here."""
    with pytest.raises(SystemExit) as caught, stop_between_batches():
        signal.raise_signal(signal.SIGTERM)
        raise RuntimeError("worker exited")
    assert "worker exited" in str(caught.value.__cause__)
    with pytest.raises(RuntimeError), stop_between_batches():
        raise RuntimeError("worker exited")


def test_other_threads_change_nothing():
    found = []

    def body():
        with stop_between_batches():
            found.extend(signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM))

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler] * 2
