"""Who may call a learner when: one thread at a time, and nobody in the middle of a change."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from types import MappingProxyType
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils.settings import check_number
from dulbe_peft.utils.torch_settings import evaluating, usual_torch

_CHANGING = ("learn_task", "update_classes", "forget_class", "forget_images", "rename_class", "merge", "use_state")


class Turns:
    """The turns that a learner's calls take; a copy or pickle is a new object, which nobody holds."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.call: str | None = None  # the outermost method that is being answered

    def __reduce__(self) -> tuple[type["Turns"], tuple[()]]:
        return Turns, ()

    @contextmanager
    def take(self, name: str, state: LearnerState) -> Iterator[None]:
        """One thread at a time works with the model, with torch's usual settings and in evaluation mode.

        A call that changes the learner allows no other inside it, as of its data set, and is allowed inside no other.
        """
        with self.lock, usual_torch(), evaluating(state.model), ExitStack() as scaled:
            outer = self.call
            if outer and (name in _CHANGING or outer in _CHANGING):
                raise RuntimeError(
                    f"{name} is called inside {outer}, for example by the data set that it reads: call it before or "
                    "after, or give the data set a copy of the learner (copy.deepcopy)"
                )
            if not outer and self in _SCALES.get() and state.adapter is not None:
                scaled.enter_context(state.adapter.scaled(_SCALES.get()[self]))
            self.call = outer or name
            try:
                yield
            finally:
                self.call = outer

    @contextmanager
    def scaled(self, scale: float, state: LearnerState) -> Iterator[None]:
        """Calls in this thread and asyncio task use `scale` of what the learner has learned."""
        check_number("scale", scale, least=0, most=1)
        token = _SCALES.set({**_SCALES.get(), self: float(scale)})
        try:
            with self.take("scaled", state):  # raises what keeps the model from being scaled
                pass
            yield
        finally:
            _SCALES.reset(token)


# Turns of a learner -> scale of what it has learned. Each thread and each asyncio task has its own.
_SCALES: ContextVar[Mapping[Turns, float]] = ContextVar("scales", default=MappingProxyType({}))


class TakesTurns(Protocol):
    """A learner, as `in_turn` sees it."""

    def turn(self, name: str) -> AbstractContextManager[None]: ...


L = TypeVar("L", bound=TakesTurns)
P = ParamSpec("P")
T = TypeVar("T")


def in_turn(method: Callable[Concatenate[L, P], T]) -> Callable[Concatenate[L, P], T]:
    """Take the learner's turn, which is the first argument, while a method or function runs."""

    @wraps(method)
    def call(learner: L, *args: P.args, **kwargs: P.kwargs) -> T:
        with learner.turn(method.__name__):
            return method(learner, *args, **kwargs)

    return call
