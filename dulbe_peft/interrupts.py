"""SIGINT and SIGTERM between two batches, so that a step, or a folder that is being written, is finished first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

_received: list[int] = []


@contextmanager
def stop_between_batches() -> Iterator[None]:
    """Let SIGINT and SIGTERM wait for `until_stopped` while the block runs; a second one acts at once.

    Only the main thread can handle signals; in another one this does nothing.

    Raises:
        KeyboardInterrupt: SIGINT came.
        SystemExit: SIGTERM came; the status is 143.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
        _check()
    except Exception as error:
        # The signal may have ended a process that reads images before it was seen here.
        if _received:
            raise _stop() from error
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        _received.clear()


def until_stopped(batches: Iterable[T]) -> Iterator[T]:
    """The same batches, until a signal has come."""
    for batch in batches:
        _check()
        yield batch


def _receive(number: int, _: Any) -> None:
    _received.append(number)
    if len(_received) > 1:
        raise _stop()


def _check() -> None:
    if _received:
        raise _stop()


def _stop() -> BaseException:
    return KeyboardInterrupt() if _received[0] == signal.SIGINT else SystemExit(128 + signal.SIGTERM)
