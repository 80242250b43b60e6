"""Who may call a learner when: one thread at a time, and nobody in the middle of a change."""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import wraps
from types import MappingProxyType
from typing import Any, TypeVar

from dulbe_peft.utils.devices import evaluating, usual_torch
from dulbe_peft.utils.settings import check_number

T = TypeVar("T")
_CHANGING = ("learn_task", "update_classes", "forget_class", "forget_images", "rename_class", "merge")
# Learner -> scale of what it has learned. Each thread and each asyncio task has its own.
_SCALES: ContextVar[Mapping[Any, float]] = ContextVar("scales", default=MappingProxyType({}))


class TakesTurns:
    """An object whose methods take turns, see `in_turn`; a copy or pickle is one of its own, without the log."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._call: str | None = None  # the outermost method that is being answered

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_lock", "_call")} | {"log": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        TakesTurns.__init__(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with locked(self, "__deepcopy__"):
            twin = object.__new__(type(self))
            twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
            return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A pickle is one of a copy, which is made while nothing is learned."""
        return object.__reduce_ex__(copy.deepcopy(self), protocol)


@contextmanager
def locked(learner: Any, name: str) -> Iterator[None]:
    """One thread at a time works with the learner, with torch's usual settings and the model in evaluation mode.

    A call that changes the learner allows no other inside it, as of its data set, and is allowed inside no other.
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
    check_number("scale", scale, least=0, most=1)
    token = _SCALES.set({**_SCALES.get(), learner: float(scale)})
    try:
        with locked(learner, "scaled"):  # raises what keeps the model from being scaled
            pass
        yield
    finally:
        _SCALES.reset(token)
