"""What tells one data set from another, and which of its images differ."""

import hashlib
import os
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dulbe_peft.data.images import LabelledImages, labelled_images

Listing = list[str] | None
_SHOWN = 3  # files of a kind that a message names


def fingerprint(dataset: Any, look: bool = True) -> str:
    """SHA-256 of labels, class names, names and sizes of files, and with `look` of four images' pixels; of no path."""
    digest = hashlib.sha256(b"dulbe_peft dataset 2")
    for chunk in _chunks(labelled_images(dataset), look):
        digest.update(len(chunk).to_bytes(8, "little") + chunk)
    return digest.hexdigest()


def _chunks(images: LabelledImages, look: bool) -> Iterable[bytes]:
    yield f"{len(images)} images, {len(images.class_names)} classes".encode()
    yield images.labels.astype("<i8").tobytes()
    yield from (name.encode() for name in images.class_names)
    yield from (os.fsencode(entry) for entry in listing(images) or ())
    if look:
        for index in np.linspace(0, len(images) - 1, min(4, len(images)), dtype=int):
            try:
                pixels = np.asarray(images.image(int(index)))
            except (OSError, TypeError, ValueError):  # it cannot be read
                yield b""
            else:
                yield b"" if pixels.dtype == object else f"{pixels.shape} {pixels.dtype}".encode() + pixels.tobytes()


def listing(images: LabelledImages | None) -> Listing:
    """What tells images from others without reading them, in their order: for folders, `class/file:bytes`."""
    return None if images is None else [images.content_id(index) for index in range(len(images))]


def differences(before: Listing, now: Listing) -> str:
    """What was added, removed and changed between two listings, the first few by name; empty where nothing was."""
    old, new = _by_name(before or ()), _by_name(now or ())
    kinds = {
        "added": [name for name in new if name not in old],
        "removed": [name for name in old if name not in new],
        "changed": [name for name in new if name in old and new[name] != old[name]],
    }
    return ", ".join(
        f"{len(names)} {kind} ({', '.join(names[:_SHOWN])}{', ...' * (len(names) > _SHOWN)})"
        for kind, names in kinds.items()
        if names
    )


def _by_name(entries: Sequence[str]) -> dict[str, str]:
    """File name -> its size in bytes; an entry that names no file is its own name."""
    found = {}
    for entry in entries:
        name, _, size = entry.rpartition(":")
        found[name if "/" in name else entry] = size
    return found
