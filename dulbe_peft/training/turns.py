"""Who may call a learner when: one thread at a time, and nobody in the middle of a change."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from dulbe_peft.utils.devices import evaluating, usual_torch

T = TypeVar("T")
_CHANGING = ("learn_task", "update_classes", "forget_class")


def in_turn(method: Callable[..., T]) -> Callable[..., T]:
    """Let one thread at a time call the learner, with torch's usual settings and the model in evaluation mode.

    A data set whose items call the learner does so in the same thread, in the middle of a call. While a task is
    learned, its images would count among the task's inputs. So a call that changes the learner allows no other inside
    it, and is allowed inside no other.
    """
    name = method.__name__

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> T:
        with self._turn, usual_torch(), evaluating(self.model):
            outer = self._call
            if outer and (name in _CHANGING or outer in _CHANGING):
                raise RuntimeError(
                    f"{name} is called inside {outer}, for example by the data set that it reads: call it before or "
                    "after, or give the data set a copy of the learner (copy.deepcopy)"
                )
            self._call = outer or name
            try:
                return method(self, *args, **kwargs)
            finally:
                self._call = outer

    return call
