"""Changes for the length of a block that are taken back however it ends, also where Ctrl-C comes in between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def undoing(undo: Callable[[], object]) -> Iterator[None]:
    """Call `undo` when the block ends; make the changes inside the block.

    Args:
        undo: takes the changes back. It can be called at any moment of them, and twice: where Ctrl-C interrupts it,
            it runs again.
    """
    try:
        yield
    finally:
        try:
            undo()
        except BaseException:
            undo()
            raise


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """A model in evaluation mode; afterwards each of its modules is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}

    def undo() -> None:
        for module, training in modes.items():
            module.training = training

    with undoing(undo):
        model.eval()
        yield
