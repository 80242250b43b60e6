"""What tells one data set from another, and which of its images differ: an image is known by its content."""

import hashlib
from typing import Any

from dulbe_peft.data.images import LabelledImages, labelled_images

Listing = list[tuple[str, str]] | None  # name and content of each image
_SHOWN = 3  # files of a kind that a message names


def fingerprint(dataset: Any, look: bool = True) -> str:
    """SHA-256 of labels, class names and contents, of no name or path; `look`: also at images that are no files."""
    images = labelled_images(dataset)
    digest = hashlib.sha256(b"dulbe_peft dataset 3")
    chunks = [
        f"{len(images)} images, {len(images.class_names)} classes".encode(),
        images.labels.astype("<i8").tobytes(),
    ]
    chunks += [name.encode() for name in images.class_names]
    chunks += [content or b"" for content in images.contents()] if look or images.stored else []
    for chunk in chunks:
        digest.update(len(chunk).to_bytes(8, "little") + chunk)
    return digest.hexdigest()


def listing(images: LabelledImages | None) -> Listing:
    """Name and content of each image that is stored, in their order."""
    if images is None or not images.stored:
        return None
    return [(images.short_name(i), (content or b"").hex()) for i, content in enumerate(images.contents())]


def differences(before: Listing, now: Listing) -> str:
    """What was added, removed and changed between two listings, the first few by name; empty where nothing was."""
    old, new = dict(before or ()), dict(now or ())
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
