"""Images that nobody has labelled: files, folders, PIL images, tensors, data sets, or a sequence of them."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from dulbe_peft.data.decoding import IMAGE_SUFFIXES, decode_image
from dulbe_peft.data.folders import Found
from dulbe_peft.data.rows import read_row


class Gallery:
    """Images without labels, in the order given; a folder's files are sorted by path.

    It is a data set as all others are: len, and items {"image", "label"}, with -1 for the label.

    Args:
        images: a path of a file or a folder of any depth, a binary file, a PIL image, a preprocessed float tensor
            (3, height, width) or a batch of them, a data set, or a list or tuple of all of these. The labels of
            (image, label) pairs and of data sets are left out.

    What cannot be read raises a `ValueError` when it is asked for: a file that is not there or is no image, and a
    folder without an image, which counts as one image.

    Example:
        >>> len(Gallery([Image.new("RGB", (8, 8)), torch.zeros(2, 3, 8, 8)]))
        3
    """

    def __init__(self, images: Any) -> None:
        self._entries: list[tuple[Any, int | None]] = []
        for entry in images if isinstance(images, (list, tuple)) and not _is_pair(images) else [images]:
            self._entries += _expanded(entry)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> dict[str, Any]:
        source, position = self._entries[index]
        if isinstance(source, Path):
            if os.path.isdir(source):
                Found(source)  # raises what keeps the folder from being read
                raise ValueError(f"the folder holds no image ({', '.join(IMAGE_SUFFIXES)})")
            return {"image": decode_image(source, index, str(source)), "label": -1}
        if isinstance(source, io.IOBase):
            source.seek(0)
            return {"image": decode_image(source, index, self.item_name(index)), "label": -1}
        item = source if position is None else read_row(source, position)
        if isinstance(item, Mapping) and "image" in item:
            item = item["image"]
        elif _is_pair(item):
            item = item[0]
        return {"image": item, "label": -1}

    def item_name(self, index: int) -> str:
        """The path of a file, the name that a file or data set has, or the image's number."""
        source, position = self._entries[index]
        if isinstance(source, Path):
            return str(source)
        name = getattr(source, "item_name", None)
        if name is not None and position is not None:
            return str(name(position))
        return str(getattr(source, "filename", "") or getattr(source, "name", "") or f"item {index}")


def _expanded(entry: Any) -> list[tuple[Any, int | None]]:
    """One source as (path or image, None) or (data set, position) for each of its images."""
    if isinstance(entry, str) and not entry:  # pathlib takes it for the current folder
        raise ValueError("the path of an image is '', expected a file or a folder")
    if isinstance(entry, (str, os.PathLike)):
        path, names = Path(entry), []
        if os.path.isdir(path):
            with suppress(OSError):  # a folder that cannot be read is itself the image that cannot be
                names = Found(path).images
        return [(path / name, None) for name in names] or [(path, None)]
    batch = isinstance(entry, torch.Tensor) and entry.ndim == 4
    single = (
        isinstance(entry, (torch.Tensor, Image.Image, Mapping)) or _is_pair(entry) or not hasattr(entry, "__len__")
    )
    if single and not batch:
        return [(entry, None)]
    return [(entry, position) for position in range(len(entry))]


def _is_pair(item: Any) -> bool:
    """Whether it is an (image, label) pair, and not two images."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        return False
    label = item[1]
    return isinstance(label, (int, np.integer)) or (isinstance(label, torch.Tensor) and label.ndim == 0)
