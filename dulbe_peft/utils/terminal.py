"""Text for people: names that are safe to print in a terminal, and numbers with their nouns."""

import os
import re
import sys

# Control characters, line separators, and marks that change the direction of the following text.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Escape the characters that control a terminal or would end a line of a table."""
    return _UNSAFE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str) -> str:
    """Make each line of a message `printable`."""
    return "\n".join(map(printable, text.split("\n")))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, such as "1 image" or "2 images"."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def announce(text: str) -> None:
    """Say in a terminal what a command does next, before imports that take seconds."""
    if sys.stderr is not None and sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
        print(f"{printable(text)} ...", file=sys.stderr, flush=True)


def print_once(text: str) -> None:
    """Print only in the first of several processes, even before `torch.distributed` is initialised."""
    if os.environ.get("RANK", "0") == "0":
        print(printable_lines(text), flush=True)
