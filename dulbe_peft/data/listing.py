"""Which images a task's data has, so that a message can name the file that is not as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Listing = list[str] | None
SHOWN = 3  # files of a kind that a message names


def listing(dataset: Any) -> Listing:
    """What tells the images of a data set from others without reading them, in their order.

    For folders of images that is `class/file:bytes`. None where the data set knows nothing of the kind.
    """
    content_id = getattr(dataset, "content_id", None)
    return None if dataset is None or content_id is None else [str(content_id(i)) for i in range(len(dataset))]


def check_listing(value: Any) -> Listing:
    """`value`, after a check that `listing` can have made it."""
    if value is not None and not (isinstance(value, list) and all(isinstance(entry, str) for entry in value)):
        raise ValueError(f"a listing of images must be a list of texts or null, got {value!r:.100}")
    return value


def differences(before: Listing, now: Listing) -> str:
    """What was added, removed and changed between two listings, the first few by name; empty where nothing was.

    >>> differences(["cat/1.jpg:10", "cat/2.jpg:20"], ["cat/2.jpg:25", "cat/3.jpg:30"])
    '1 added (cat/3.jpg), 1 removed (cat/1.jpg), 1 changed (cat/2.jpg)'
    """
    old, new = _by_name(before or ()), _by_name(now or ())
    kinds = {
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
        "changed": [name for name in new if name in old and new[name] != old[name]],
    }
    return ", ".join(f"{len(names)} {kind} ({_first(names)})" for kind, names in kinds.items() if names)


def _by_name(entries: Sequence[str]) -> dict[str, str]:
    """File name -> its size in bytes; an entry that names no file is its own name."""
    found = {}
    for entry in entries:
        name, _, size = entry.rpartition(":")
        found[name if "/" in name else entry] = size
    return found


def _first(names: list[str]) -> str:
    more = ", ..." if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
