"""Words for people: texts that a terminal shows as they are, and numbers with their nouns."""

import os
import re

# Control characters, and marks that turn the direction of what follows, or end a line.
_ACTING = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """A name without characters that act on a terminal or end a line of a table: they become escapes."""
    return _ACTING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def printable_lines(text: str) -> str:
    """A message of one or several lines, each of which is `printable`."""
    return "\n".join(map(printable, text.split("\n")))


def counted(number: int, noun: str) -> str:
    """A number with its noun, in the plural where there is not one."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"


def print_once(text: str) -> None:
    """Print in the first of several processes alone, also before they have found each other."""
    if os.environ.get("RANK", "0") == "0":
        print(printable_lines(text), flush=True)
