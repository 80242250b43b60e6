"""Make the calls of a learner take turns: one thread at a time, and no call inside one that changes the learner."""

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from functools import wraps
from types import MappingProxyType
from typing import Concatenate, ParamSpec, TypeVar

from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils.settings import check_number
from dulbe_peft.utils.torch_settings import default_torch_settings, evaluating, generators

_CHANGING = (
    "learn_task",
    "update_classes",
    "forget_class",
    "forget_images",
    "rename_class",
    "merge",
    "use_state",
    "keep",
)


class Turns:
    """The lock of a learner's calls. A copy, also by pickle, is a new and unlocked one."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.call: str | None = None  # the outermost method that is running

    def __reduce__(self) -> tuple[type["Turns"], tuple[()]]:
        return Turns, ()

    @contextmanager
    def take(self, name: str, state: LearnerState) -> Iterator[None]:
        """Run the block while no other thread uses the model, with torch's usual settings and in evaluation mode.

        Raises:
            RuntimeError: If the call is inside another one, for example made by its data set, and one of the two
                changes the learner.
        """
        # One learner may read the predictions of another, so whoever trains waits before it has a learner's lock.
        first = generators if name == "learn_task" else nullcontext()
        with first, self.lock, default_torch_settings(), evaluating(state.model), ExitStack() as scaled:
            outer = self.call
            if outer and (name in _CHANGING or outer in _CHANGING):
                raise RuntimeError(
                    f"{name} is called inside {outer}, for example by the data set that it reads: call it before or "
                    "after, or give the data set a copy of the learner (copy.deepcopy)"
                )
            if not outer and self in _SCALES.get() and state.adapter is not None:
                if (scale := _SCALES.get()[self]) != 1:
                    state.check_plain("this learner cannot be scaled")
                scaled.enter_context(state.adapter.scaled(scale))
            self.call = outer or name
            try:
                yield
            finally:
                self.call = outer

    @contextmanager
    def scaled(self, scale: float, state: LearnerState) -> Iterator[None]:
        """Multiply the adapter's update by `scale` in the block, for calls of this thread and asyncio task."""
        check_number("scale", scale, least=0, most=1)
        token = _SCALES.set({**_SCALES.get(), self: float(scale)})
        try:
            with self.take("scaled", state):  # raises an error now if the model cannot be scaled
                pass
            yield
        finally:
            _SCALES.reset(token)


# Turns of a learner -> scale of its adapter's update, separate for each thread and each asyncio task.
_SCALES: ContextVar[Mapping[Turns, float]] = ContextVar("scales", default=MappingProxyType({}))


class TakesTurns:
    """The part of a learner that makes its calls take turns."""

    state: LearnerState
    _turns: Turns

    def turn(self, name: str) -> AbstractContextManager[None]:
        """Return a context in which no call of another thread changes the learner; messages call it `name`."""
        return self._turns.take(name, self.state)


L = TypeVar("L", bound=TakesTurns)
P = ParamSpec("P")
T = TypeVar("T")


def takes_turn(method: Callable[Concatenate[L, P], T]) -> Callable[Concatenate[L, P], T]:
    """Decorate a method, or a function whose first argument is a learner, to run it in the learner's turn."""

    @wraps(method)
    def call(learner: L, *args: P.args, **kwargs: P.kwargs) -> T:
        with learner.turn(method.__name__):
            return method(learner, *args, **kwargs)

    return call
