"""What tells one data set from another."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from dulbe_peft.data.samples import dataset_class_names, dataset_labels, read_sample


def _chunks(dataset: Any, look: bool) -> Iterable[bytes]:
    names = dataset_class_names(dataset) or ()
    labels = dataset_labels(dataset)
    yield f"{len(labels)} images, {len(names)} classes".encode()
    yield labels.astype("<i8").tobytes()
    yield from (name.encode() for name in names)
    content_id = getattr(dataset, "content_id", None)
    if content_id is not None:
        yield from (os.fsencode(content_id(index)) for index in range(len(labels)))
    if look:
        chosen = np.linspace(0, len(labels) - 1, min(4, len(labels)), dtype=int)
        yield from (_pixels(dataset, int(index)) for index in chosen)


def _pixels(dataset: Any, index: int) -> bytes:
    """An image's shape and pixels; nothing where it cannot be read."""
    try:
        pixels = np.asarray(read_sample(dataset, index)[0])
    except (OSError, TypeError, ValueError):
        return b""
    return b"" if pixels.dtype == object else f"{pixels.shape} {pixels.dtype}".encode() + pixels.tobytes()


def fingerprint(dataset: Any, look: bool = True) -> str:
    """Hexadecimal SHA-256 of what a dataset is, to refuse going on with other data.

    It covers the length, the labels, the class names, where the dataset has `content_id` the names and sizes of the
    files (or the places in an `.npz`), in their order, and the pixels of four images spread over it. It does not
    depend on where the data lies. A change of other images that keeps names and sizes goes unseen.

    Args:
        dataset: any that can be learned from.
        look: look at the four images; False for data that is augmented anew each time it is read.
    """
    digest = hashlib.sha256(b"dulbe_peft dataset 1")
    for chunk in _chunks(dataset, look):
        digest.update(len(chunk).to_bytes(8, "little") + chunk)
    return digest.hexdigest()
