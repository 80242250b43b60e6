"""Images in folders, one folder per class."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from dulbe_peft.data.decoding import IMAGE_SUFFIXES
from dulbe_peft.data.names import check_class_names
from dulbe_peft.data.samples import StoredImages

# Names that people give to the splits of a data set, in lower case.
SPLIT_NAMES = ("train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation")
_MOST_DEEP = 100  # folders within each other; photographs are never so deep, and Python's stack ends


class Found:
    """What one folder holds: the images, by their path below it with "/" between the parts, and what is left out.

    Args:
        folder: where to look, in folders within it too. Links to folders are followed, and each folder is read once.

    Attributes:
        images: paths below `folder`, sorted by code point.
        left_out: path and reason of every other file, and of folders that hold nothing.
        seen: how many files and folders there are that are not hidden.
    """

    def __init__(self, folder: Path) -> None:
        self.images: list[str] = []
        self.left_out: list[tuple[str, str]] = []
        self.seen = 0
        self._entered: set[tuple[int, int]] = set()
        self._walk(str(folder), "")
        self.images.sort()

    def _walk(self, folder: str, prefix: str) -> None:
        if prefix.count("/") > _MOST_DEEP:
            self.left_out.append((folder, f"more than {_MOST_DEEP} folders deep"))
            return
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in self._entered:
            self.left_out.append((folder, "a link to a folder that is read already"))
            return
        self._entered.add((status.st_dev, status.st_ino))
        with os.scandir(folder) as entries:
            rows = sorted(entries, key=lambda entry: entry.name)
        for entry in rows:
            if entry.name.startswith("."):
                self.left_out.append((entry.path, "hidden"))
                continue
            self.seen += 1
            if _is_folder(entry):
                before = self.seen
                self._walk(entry.path, f"{prefix}{entry.name}/")
                if self.seen == before:
                    self.left_out.append((entry.path, "an empty folder"))
            elif not entry.name.lower().endswith(IMAGE_SUFFIXES):
                self.left_out.append((entry.path, _suffix(entry.name)))
            elif (entry.is_symlink() and not os.path.exists(entry.path)) or entry.is_file():
                self.images.append(prefix + entry.name)  # a link to nothing or to itself, too: reading it says so
            else:
                self.left_out.append((entry.path, "neither a file nor a folder"))

    def leave_out_odd_names(self) -> None:
        """Leave out images whose names are not UTF-8: no table of a run could name them."""
        odd = {name for name in self.images if name.encode("utf-8", "ignore").decode() != name}
        self.images = [name for name in self.images if name not in odd]
        self.left_out += [(name, "the name is not UTF-8") for name in sorted(odd)]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or a link to one; `DirEntry.is_dir` raises over a link that leads to itself."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def _suffix(name: str) -> str:
    suffix = os.path.splitext(name)[1].lower()
    return f"files ending in {suffix} are not read" if suffix else "a file without a suffix"


def subfolders(path: Path) -> list[str]:
    """Names of the folders in `path` that are not hidden, sorted by code point on every system."""
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if _is_folder(entry) and not entry.name.startswith("."))


def holds_only_folders(path: Path) -> bool:
    """Whether a folder holds folders, and no image beside them."""
    with os.scandir(path) as entries:
        images = any(entry.name.lower().endswith(IMAGE_SUFFIXES) and entry.is_file() for entry in entries)
    return not images and bool(subfolders(path))


class ImageFolder(StoredImages):
    """Images in `root/split/class name/**`, or `root/class name/**` without a split.

    A class folder may hold folders of any depth. Files are .jpg, .jpeg, .jfif, .png, .webp, .bmp, .gif (the first
    frame), .tif, .tiff and, where Pillow reads it, .avif, in either case. Classes and files are sorted by name.

    Args:
        root: folder that holds the splits, or the classes.
        split: name of the folder of the split; None where there are no splits.

    Attributes:
        left_out: (path, reason) of every file and folder that is no part of the data: other suffixes, hidden ones,
            empty folders, files beside the class folders.

    Raises:
        FileNotFoundError: `root` or the split is not there.
        ValueError: there is no class folder with an image, or a class folder holds files and none is an image.

    Example:
        >>> photos = ImageFolder("photos", "train")
        >>> len(photos), photos.class_names, photos.left_out
        (120, ('cat', 'dog'), [('photos/train/cat/notes.txt', 'files ending in .txt are not read')])
    """

    def __init__(self, root: str | os.PathLike[str], split: str | None = None) -> None:
        folder = Path(root)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder of images")
        if split is not None:
            splits = subfolders(folder)
            if split not in splits:
                raise FileNotFoundError(
                    f"{folder} has no split {split!r}; its folders are {splits} (if these are classes, pass "
                    "split=None, or --split '' to evaluate)"
                )
            folder = folder / split
        self.root, self.split = folder, split
        names = subfolders(folder)
        if not names:
            raise ValueError(f"{folder} has no folder; one folder per class is needed")
        if split is None:
            _refuse_splits(folder, names)
        self.left_out = _beside(folder)
        found = {name: Found(folder / name) for name in names}
        for name, inside in found.items():
            inside.leave_out_odd_names()
            self.left_out += inside.left_out
            if inside.images:
                continue
            if inside.seen:
                _, why = next(row for row in inside.left_out if row[1] != "hidden")
                raise ValueError(f"class folder {folder / name} has no {', '.join(IMAGE_SUFFIXES)} file ({why})")
            self.left_out.append((str(folder / name), "an empty folder"))
        kept = [name for name in names if found[name].images]
        if not kept:
            raise ValueError(f"no class folder in {folder} has an image; its folders are {names}")
        self.class_names = check_class_names(kept)
        self._files = [(label, file) for label, name in enumerate(self.class_names) for file in found[name].images]
        self.labels = np.array([label for label, _ in self._files], dtype=np.int64)

    def item_name(self, index: int) -> str:
        """Path of an image."""
        return str(self.root / self.relative_name(index))

    def item_source(self, index: int) -> str:
        """What Pillow opens: the path of an image."""
        return self.item_name(index)

    def relative_name(self, index: int) -> str:
        """Path of an image below the folder of the classes, with "/" between its parts."""
        label, file = self._files[index]
        return f"{self.class_names[label]}/{file}"

    def content_id(self, index: int) -> str:
        """Name and size of an image's file, wherever the root folder stands."""
        return f"{self.relative_name(index)}:{os.path.getsize(self.item_name(index))}"


def _refuse_splits(folder: Path, names: list[str]) -> None:
    """Raise where what should be classes are splits: folders with the names of splits that hold folders alone."""
    splits = [name for name in names if name.lower() in SPLIT_NAMES and holds_only_folders(folder / name)]
    if len(splits) > 1 or splits == names:
        raise ValueError(f"{folder / splits[0]} has no image, it holds folders: {splits[0]!r} may be a split, name it")


def _beside(folder: Path) -> list[tuple[str, str]]:
    """What lies beside the class folders."""
    with os.scandir(folder) as entries:
        rows = sorted(entries, key=lambda entry: entry.name)
    return [
        (entry.path, "hidden" if entry.name.startswith(".") else "not in a class folder")
        for entry in rows
        if entry.name.startswith(".") or not _is_folder(entry)
    ]
