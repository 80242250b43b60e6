"""Images in one `.npz` file.

Nothing is believed that the file says about sizes before it is compared with the file's own size: a damaged or forged
file must end in an error that names it, and never in memory that it asked for.
"""

from __future__ import annotations

import io
import math
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dulbe_peft.data.names import check_class_names
from dulbe_peft.data.samples import StoredImages

NPZ_KEYS = ("blob", "offsets", "labels", "split", "names")
NPZ_SPLITS = {"train": 0, "test": 1}
_KINDS = {"blob": "u", "offsets": "iu", "labels": "iu", "split": "iu", "names": "U"}
# A compressed array may be so many times as large as the whole file, with room for files that are tiny.
_MOST_EXPANSION, _ROOM = 100, 2**24
T = TypeVar("T")


class NpzImages(StoredImages):
    """One split of an `.npz` file with the arrays `blob`, `offsets`, `labels`, `split` and `names`.

    Image i is the file `blob[offsets[i]:offsets[i + 1]]` (JPEG or another format that Pillow knows), `labels[i]`
    indexes `names`, and `split[i]` is 0 for training and 1 for test. Save it with `numpy.savez`: the images are then
    mapped into memory and shared by all processes. A compressed file is read whole by each, and an array in it may be
    at most a hundred times as large as the file.

    Args:
        path: the file.
        split: "train" or "test".

    Raises:
        FileNotFoundError: the file is not there.
        ValueError: the split is another one or has no image, or the file is damaged or has another layout.
    """

    def __init__(self, path: str | os.PathLike[str], split: str) -> None:
        self.path = Path(path)
        if split not in NPZ_SPLITS:
            raise ValueError(f"split is {split!r}; {self.path} has the splits {', '.join(NPZ_SPLITS)}")
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path} is not a file")
        self.split = split
        arrays = self._read(NPZ_KEYS)
        self._blob: np.ndarray | None = arrays["blob"]
        problem = _problem(arrays)
        if problem:
            raise ValueError(f"{self.path}: {problem}")
        self._offsets = arrays["offsets"].astype(np.int64)
        self._items = np.flatnonzero(arrays["split"] == NPZ_SPLITS[split])
        self.labels = arrays["labels"].astype(np.int64)[self._items]
        self.class_names = _named(self.path, lambda: check_class_names(arrays["names"].tolist()))
        if not len(self._items):
            raise ValueError(f"{self.path} has no image in the split {split!r}")

    def _read(self, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
        return _named(self.path, lambda: _read_arrays(self.path, keys))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blob": None}  # a worker process opens the file itself

    def item_name(self, index: int) -> str:
        """The file and the image's position in it."""
        return f"{self.path}[{self._items[index]}]"

    def item_source(self, index: int) -> io.BytesIO:
        """What Pillow opens: the bytes of an image."""
        if self._blob is None:
            self._blob = self._read(("blob",))["blob"]
        item = self._items[index]
        return io.BytesIO(self._blob[self._offsets[item] : self._offsets[item + 1]].tobytes())

    def content_id(self, index: int) -> str:
        """Where the image's bytes begin and end."""
        item = self._items[index]
        return f"{self._offsets[item]}:{self._offsets[item + 1]}"


def npz_splits(path: Path) -> list[str]:
    """The splits of an `.npz` file that have an image."""
    present = _named(path, lambda: _read_arrays(path, ("split",)))["split"]
    return [name for name, number in NPZ_SPLITS.items() if (present == number).any()]


def _named(path: Path, call: Callable[[], T]) -> T:
    """What `call` returns; any error becomes a ValueError that names the file."""
    try:
        return call()
    except Exception as error:  # on damaged bytes zipfile and numpy raise almost anything
        what = str(error) or type(error).__name__
        raise ValueError(f"{path} is no .npz file of images: {what}") from error


def _read_arrays(path: Path, keys: tuple[str, ...]) -> dict[str, np.ndarray]:
    if not zipfile.is_zipfile(path):
        raise ValueError("it is damaged or of another kind")
    with zipfile.ZipFile(path) as archive:
        members = set(archive.namelist())
        absent = [key for key in keys if f"{key}.npy" not in members]
        if absent:
            held = sorted(name.removesuffix(".npy") for name in members)
            raise ValueError(f"the array {absent[0]!r} is missing; it has {held}")
        return {key: _read_member(path, archive, key) for key in keys}


def _read_member(path: Path, archive: zipfile.ZipFile, key: str) -> np.ndarray:
    """One array; `blob` is mapped into memory where it is not compressed."""
    info, size = archive.getinfo(f"{key}.npy"), os.path.getsize(path)
    stored = info.compress_type == zipfile.ZIP_STORED
    most = size if stored else _MOST_EXPANSION * size + _ROOM
    if info.compress_size > size or info.file_size > most:
        raise ValueError(f"{key} claims {info.file_size} bytes, more than a file of {size} bytes can hold")
    with archive.open(info) as member:
        shape, dtype, start = _header(member)
        if dtype.hasobject:
            raise ValueError(f"{key} holds Python objects")
        if len(shape) != 1 or dtype.kind not in _KINDS[key] or not dtype.itemsize:
            raise ValueError(f"{key} has shape {shape} and type {dtype}, which the layout does not allow")
        if start + math.prod(shape) * dtype.itemsize != info.file_size:
            raise ValueError(f"{key} claims the shape {shape}, but has {info.file_size - start} bytes")
        if key != "blob" or not stored:
            return np.frombuffer(member.read(), dtype)
    return np.memmap(path, dtype, "r", _member_start(path, info) + start, shape)


def _header(member: Any) -> tuple[tuple[int, ...], np.dtype, int]:
    """Shape and type of an array, and where its values begin."""
    version = np.lib.format.read_magic(member)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"it has an array of format {version}; 1.0 and 2.0 are known")
    shape, _, dtype = readers[version](member)
    return shape, dtype, member.tell()


def _member_start(path: Path, info: zipfile.ZipInfo) -> int:
    """Where the bytes of an uncompressed member begin in the file."""
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        local = file.read(30)  # a zip's local header; its name and extra field may be longer than the directory's
    return info.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")


def _problem(arrays: dict[str, np.ndarray]) -> str | None:
    """What contradicts the layout, or None."""
    blob, offsets, labels, split, names = (arrays[key] for key in NPZ_KEYS)
    if blob.dtype != np.uint8:
        return f"blob has type {blob.dtype}; it must be uint8, the bytes of the images"
    if len(offsets) != len(labels) + 1 or len(split) != len(labels):
        return (
            f"offsets, labels and split have the lengths {len(offsets)}, {len(labels)} and {len(split)}; "
            "for n images they must be n + 1, n and n"
        )
    if offsets.min() < 0 or offsets.max() > len(blob):
        return f"offsets run from {offsets.min()} to {offsets.max()}, but blob has {len(blob)} bytes"
    steps = np.diff(offsets.astype(np.int64))
    if len(steps) and steps.min() <= 0:
        return f"offsets must increase, but image {int(steps.argmin())} has {steps.min()} bytes"
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(names):
        return f"labels run from {labels.min()} to {labels.max()}; they must lie in 0..{len(names) - 1}"
    if len(split) and not np.isin(split, list(NPZ_SPLITS.values())).all():
        return f"split holds {sorted(set(split.tolist()))}; only 0 (train) and 1 (test) are allowed"
    return None
