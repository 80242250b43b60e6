"""Unlabelled images: files, folders, PIL images, tensors, data sets, or a sequence of them."""

import io
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from dulbe_peft.data.camtrap import files_of
from dulbe_peft.data.decoding import image_suffixes
from dulbe_peft.data.folders import folder_content
from dulbe_peft.data.images import LabelledImages, column_of, undecoded

IDS = ("deploymentID", "eventID", "mediaID")  # columns of Camtrap DP that are unique only in a package


def unlabelled_images(images: object) -> LabelledImages:
    """Convert whatever a learner's `predict` accepts, with the label -1 for each image.

    A missing file raises no error here, but when the image is read.
    """
    if isinstance(images, LabelledImages) and type(images).__getitem__ is LabelledImages.__getitem__:
        return images
    given = images if isinstance(images, (list, tuple)) and not _is_pair(images) else [images]
    left_out = list[tuple[str, str]]()
    entries = [entry for element in given for entry in _entries_of(element, left_out)]
    if len(given) > 1:  # folders can contain the same paths
        entries = [(source, place, "") for source, place, _ in entries]
    unlabelled = _Unlabelled(entries, np.full(len(entries), -1, dtype=np.int64))
    unlabelled.left_out = left_out
    unlabelled.folders = [Path(each) for each in given if isinstance(each, (str, os.PathLike)) and os.path.isdir(each)]
    return unlabelled


def package_columns(images: LabelledImages) -> dict[str, Callable[[], Sequence[str]]]:
    """Return the columns of media.csv, and eventID, of unlabelled images in Camtrap DP packages that were given.

    An image that no package lists has empty values. With several packages, the IDs of deployments and events begin
    with the package's folder, because they are unique only in a package.
    """
    packages = {folder: files for folder in getattr(images, "folders", ()) if (files := files_of(folder))}
    if not packages:
        return {}
    rows: list[dict[str, str]] = []
    for source, *_ in images.source:
        row: dict[str, str] = {}
        for folder, files in packages.items() if isinstance(source, Path) else ():
            if found := files.get(os.path.relpath(source, folder)):
                several = {name: f"{folder}: {found[name]}" for name in IDS if found.get(name)}
                row = found | (several if len(packages) > 1 else {})
        rows.append(row)
    names = dict.fromkeys(name for files in packages.values() for row in files.values() for name in row)
    return {name: partial(column_of, rows, name) for name in names}


class _Unlabelled(LabelledImages):
    """Unlabelled images. `source` has triples: a path, file or image and None, or a data set and a position; and the
    path inside the folder if only one is given, or "".
    """

    by_path = True
    folders: Sequence[Path] = ()  # the given folders

    def path_of(self, index: int) -> str:
        return str(self.source[int(self.indices[index])][2]) or self.item_name(index)

    def _item(self, position: int) -> tuple[Any, int]:
        source, place, _ = self.source[position]
        if isinstance(source, Path) and os.path.isdir(source):
            folder_content(source)  # raises if the folder cannot be read
            raise ValueError(f"the folder contains no image ({', '.join(image_suffixes())})")
        if isinstance(source, LabelledImages) and place is not None:
            return source.given(place), -1
        try:
            item = source if place is None else source[place]
        except IndexError as error:
            raise ValueError(f"the dataset gives no item {place}, though its length is {len(source)}") from error
        if isinstance(item, Mapping) and "image" in item:
            return item["image"], -1
        return item[0] if _is_pair(item) else item, -1

    def item_name(self, index: int) -> str:
        """Return the path of a file, the name that a file or data set gives, or the image's number."""
        position = int(self.indices[index])
        source, place, _ = self.source[position]
        if isinstance(source, Path):
            return str(source)
        if place is not None and hasattr(source, "item_name"):
            return str(source.item_name(place))
        return str(getattr(source, "filename", "") or getattr(source, "name", "") or f"item {position}")


def _entries_of(entry: object, left_out: list[tuple[str, str]]) -> list[tuple[object, int | None, str]]:
    """Return the entries of `source` for one of the given images; add what a folder skips to `left_out`."""
    if isinstance(entry, str) and not entry:  # pathlib would read "" as the current folder
        raise ValueError("the path of an image is '', expected a file or a folder")
    if isinstance(entry, (bytes, bytearray, memoryview)):
        raise TypeError(f"an image is a {type(entry).__name__}: pass io.BytesIO(content), or the path of the file")
    if isinstance(entry, (str, os.PathLike)):
        path, names = Path(entry), list[str]()
        if os.path.isdir(path):
            with suppress(OSError):  # an unreadable folder becomes one entry, which raises when it is read
                names, skipped = folder_content(path)
                left_out += skipped
        return [(path / name, None, name) for name in names] or [(path, None, "")]
    if is_one_image(entry):
        return [(entry, None, "")]
    if isinstance(entry, torch.Tensor):
        return [(image, None, "") for image in entry]
    rows = undecoded(entry)
    return [(entry if rows is None else rows, position, "") for position in range(len(entry))]  # type: ignore[arg-type]


def is_one_image(images: object) -> bool:
    """Return whether `images` is a single image, for which `predict` gives one answer instead of a list.

    A folder, a batch of tensors, a list and a data set hold several images, even if there is only one in them.
    """
    if isinstance(images, (str, os.PathLike)):
        return not os.path.isdir(images)
    if isinstance(images, torch.Tensor):
        return images.ndim != 4
    return isinstance(images, (Image.Image, Mapping, np.ndarray)) or _is_pair(images) or not hasattr(images, "__len__")


def _is_pair(item: object) -> bool:
    """Return whether `item` is an (image, label) pair rather than two images."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        return False
    label = item[1]
    return isinstance(label, (int, np.integer)) or (isinstance(label, torch.Tensor) and label.ndim == 0)


def as_image(number: int, image: object) -> Any:
    """Convert one image, which may also be an array or bytes, for `unlabelled_images`; errors name its number."""
    if isinstance(image, np.ndarray):
        array = image.squeeze(axis=2) if image.shape[2:] == (1,) else image
        if image.dtype != np.uint8 or not (array.ndim == 2 or array.shape[2:] in ((3,), (4,))) or not array.size:
            form = "expected uint8 from 0 to 255, (height, width, 3) or (height, width)"
            raise ValueError(f"image {number} is an array of {image.dtype}, {image.shape}: {form}")
        return Image.fromarray(array)
    if isinstance(image, (bytes, bytearray, memoryview)):
        return io.BytesIO(image)
    if isinstance(image, (str, os.PathLike)) and (not str(image) or os.path.isdir(image)):
        raise ValueError(f"image {number} is {str(image)!r}: expected the path of an image file")
    if isinstance(image, (list, tuple, set)) or getattr(image, "ndim", 3) > 3:
        raise ValueError(f"image {number} is a {type(image).__name__} of several images: expected one image")
    return image
