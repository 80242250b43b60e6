"""Rows of a Hugging Face `datasets.Dataset` as it stores them, so that its images are decoded here.

Its own decoder would try every format that Pillow knows, and PostScript starts another program.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from dulbe_peft.data.decoding import open_image

_views: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def undecoded(dataset: Any) -> Any:
    """The same dataset with the column "image" as bytes or paths; None where it has no such column.

    A dataset with a transform or format of its own gives what that makes of the images, and is left alone.
    """
    features = getattr(dataset, "features", None)
    feature = features.get("image") if isinstance(features, Mapping) else None
    if feature is None or type(feature).__name__ != "Image" or not hasattr(dataset, "cast_column"):
        return None
    if getattr(dataset, "format", {}).get("type") is not None:
        return None
    if dataset not in _views:
        _views[dataset] = dataset.cast_column("image", type(feature)(decode=False))
    return _views[dataset]


def row_source(row: Any, name: str) -> io.BytesIO | str:
    """What Pillow opens of a stored image: its bytes, or the path of a file on this machine."""
    stored = row if isinstance(row, Mapping) else {}
    if stored.get("bytes") is not None:
        return io.BytesIO(stored["bytes"])
    if stored.get("path") and "://" not in stored["path"]:
        return str(stored["path"])
    raise ValueError(f"{name} has no bytes and no file on this machine: {row}")


def read_row(dataset: Any, index: int) -> Any:
    """`dataset[index]`; of a Hugging Face dataset with its image decoded here, in the image's own mode."""
    stored = undecoded(dataset)
    if stored is None:
        return dataset[index]
    row = stored[index]
    with open_image(row_source(row["image"], f"image {index}")) as image:
        image.load()
    return {**row, "image": image}
