"""Ctrl-C at every moment at which Python can notice it inside the library: after a call, at the start of a function,
at the end of a turn of a loop."""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import dulbe_peft

LIBRARY = str(Path(dulbe_peft.__file__).parent)
# After these instructions and at the turn of a loop, and nowhere else, Python runs the handlers of signals.
NOTICING = ("RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX")
Moment = tuple[CodeType, int]
_ENDS: dict[CodeType, frozenset[int]] = {}


def _moments(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions before which a signal can be noticed."""
    if code not in _ENDS:
        steps = list(dis.get_instructions(code))
        after = [b.offset for a, b in pairwise(steps) if a.opname in NOTICING]
        after += [step.argval for step in steps if step.opname == "JUMP_BACKWARD"]
        _ENDS[code] = frozenset(after)
    return _ENDS[code]


class Interrupting:
    """While the block runs, the moments in the library are counted; at the chosen one KeyboardInterrupt is raised.

    Args:
        at: number of the moment, from 0; None interrupts nothing.

    Attributes:
        moments: the place of each moment that came.
    """

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.moments: list[Moment] = []

    def __enter__(self) -> Interrupting:
        sys.settrace(self._entered)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(None)

    def _entered(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        file = frame.f_code.co_filename
        if not file.startswith(LIBRARY) and file != contextlib.__file__:
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "opcode" and frame.f_lasti in _moments(frame.f_code):
            self.moments.append((frame.f_code, frame.f_lasti))
            if self.at == len(self.moments) - 1:
                raise KeyboardInterrupt
        return self._stepped


def count(act: Callable[[], Any]) -> list[Moment]:
    """The moments of a call that nothing disturbs."""
    with Interrupting() as watch:
        act()
    return watch.moments


def place(moment: Moment) -> str:
    """File and line of a moment, for people."""
    code, offset = moment
    line = next((n for start, end, n in code.co_lines() if start <= offset < end), 0)
    return f"{Path(code.co_filename).name}:{line} ({code.co_name})"
