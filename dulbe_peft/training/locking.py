"""Who may call a learner when: one thread at a time, and nobody in the middle of a change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar

from dulbe_peft.utils.devices import evaluating, usual_torch

T = TypeVar("T")
_CHANGING = ("learn_task", "update_classes", "forget_class", "merge")
# Learner -> scale of what it has learned. Each thread and each asyncio task has its own.
_SCALES: ContextVar[Mapping[Any, float]] = ContextVar("scales", default=MappingProxyType({}))


@contextmanager
def locked(learner: Any, name: str) -> Iterator[None]:
    """One thread at a time works with the learner, with torch's usual settings and the model in evaluation mode.

    A data set whose items call the learner does so in the same thread, in the middle of a call. While a task is
    learned, its images would count among the task's inputs. So a call that changes the learner allows no other inside
    it, and is allowed inside no other.
    """
    with learner._lock, usual_torch(), evaluating(learner.model), ExitStack() as scaled:
        outer = learner._call
        if outer and (name in _CHANGING or outer in _CHANGING):
            raise RuntimeError(
                f"{name} is called inside {outer}, for example by the data set that it reads: call it before or "
                "after, or give the data set a copy of the learner (copy.deepcopy)"
            )
        if not outer and learner in _SCALES.get() and learner.state.adapter is not None:
            scaled.enter_context(learner.state.adapter.scaled(_SCALES.get()[learner]))
        learner._call = outer or name
        try:
            yield
        finally:
            learner._call = outer


def in_turn(method: Callable[..., T]) -> Callable[..., T]:
    """Lock the learner, which is the first argument, while the method runs."""

    @wraps(method)
    def call(learner: Any, *args: Any, **kwargs: Any) -> T:
        with locked(learner, method.__name__):
            return method(learner, *args, **kwargs)

    return call


@contextmanager
def scaling(learner: Any, scale: float) -> Iterator[None]:
    """Calls of the learner in this thread and asyncio task use `scale` of what it has learned."""
    token = _SCALES.set({**_SCALES.get(), learner: scale})
    try:
        with locked(learner, "scaled"):  # raises what keeps the model from being scaled
            pass
        yield
    finally:
        _SCALES.reset(token)
