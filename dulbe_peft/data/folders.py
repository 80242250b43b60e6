"""Images in folders, one folder per class."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from dulbe_peft.data.decoding import IMAGE_SUFFIXES, why_not_read
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.names import check_class_names, normalized

# Names that people give to the splits of a data set, in lower case.
SPLIT_NAMES = ("train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation")
_MOST_DEEP = 100  # folders within each other; photographs are never so deep, and Python's stack ends


class FolderContent:
    """What one folder and those within it hold. Links to folders are followed, and each folder is read once."""

    def __init__(self, folder: Path) -> None:
        self.images: list[str] = []  # paths below the folder with "/" between the parts, sorted by code point
        self.left_out: list[tuple[str, str]] = []  # path and reason of other files, and of folders that hold nothing
        self.seen = 0  # files and folders that are not hidden
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
        for entry in _entries(folder):
            if entry.name.startswith("."):
                self.left_out.append((entry.path, "hidden"))
                continue
            self.seen += 1
            suffix = os.path.splitext(entry.name)[1].lower()
            if _is_folder(entry):
                before = self.seen
                self._walk(entry.path, f"{prefix}{entry.name}/")
                if self.seen == before:
                    self.left_out.append((entry.path, "an empty folder"))
            elif suffix not in IMAGE_SUFFIXES:
                self.left_out.append((entry.path, why_not_read(suffix)))
            elif (entry.is_symlink() and not os.path.exists(entry.path)) or entry.is_file():
                self.images.append(prefix + entry.name)  # a link to nothing or to itself, too: reading it says so
            else:
                self.left_out.append((entry.path, "neither a file nor a folder"))


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    """What lies in a folder, sorted by code point on every system."""
    with os.scandir(folder) as entries:
        return sorted(entries, key=lambda entry: entry.name)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or a link to one; `DirEntry.is_dir` raises over a link that leads to itself."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


def subfolders(path: Path) -> list[str]:
    """Names of the folders in `path` that are not hidden, sorted."""
    return [entry.name for entry in _entries(path) if _is_folder(entry) and not entry.name.startswith(".")]


def holds_only_folders(path: Path) -> bool:
    """Whether a folder holds folders, and no image beside them."""
    images = any(entry.name.lower().endswith(IMAGE_SUFFIXES) and entry.is_file() for entry in _entries(path))
    return not images and bool(subfolders(path))


class ImageFolder(LabelledImages):
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
        folder = _folder_of_classes(Path(root), split)
        names = subfolders(folder)
        left_out = [
            (entry.path, "hidden" if entry.name.startswith(".") else "not in a class folder")
            for entry in _entries(folder)
            if entry.name.startswith(".") or not _is_folder(entry)
        ]
        files: list[str] = []
        labels: list[int] = []
        kept: list[str] = []
        for name in names:
            content = FolderContent(folder / name)
            odd = [image for image in content.images if image.encode("utf-8", "ignore").decode() != image]
            images = [image for image in content.images if image not in odd]
            unnamed = [(image, "the name is not UTF-8") for image in odd]  # no table of a run could name them
            left_out += content.left_out + unnamed
            if images:
                files += [f"{name}/{image}" for image in images]
                labels += [len(kept)] * len(images)
                kept.append(name)
            elif content.seen:
                _, why = next(row for row in content.left_out + unnamed if row[1] != "hidden")
                raise ValueError(f"class folder {folder / name} has no {', '.join(IMAGE_SUFFIXES)} file ({why})")
            else:
                left_out.append((str(folder / name), "an empty folder"))
        if not kept:
            raise ValueError(f"no class folder in {folder} has an image; its folders are {names}")
        super().__init__(files, np.array(labels, dtype=np.int64), check_class_names(kept), stored=True)
        self.root, self.split, self.left_out = folder, split, left_out

    def _item(self, position: int) -> tuple[Path, int]:
        return self.root / self.source[position], int(self._own_labels[position])

    def item_name(self, index: int) -> str:
        """Path of an image."""
        return str(self.root / self.source[self.indices[index]])

    def relative_name(self, index: int) -> str:
        """Path of an image below the folder of the classes, with "/" between its parts."""
        return normalized(self.source[self.indices[index]])

    def content_id(self, index: int) -> str:
        """Name and size of an image's file, wherever the root folder stands."""
        return f"{self.relative_name(index)}:{os.path.getsize(self.item_name(index))}"


def _folder_of_classes(folder: Path, split: str | None) -> Path:
    """The folder that holds the classes; raises where what should be classes are splits, or the other way round."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder of images")
    names = subfolders(folder)
    if split is not None and split not in names:
        raise FileNotFoundError(
            f"{folder} has no split {split!r}; its folders are {names} (if these are classes, pass split=None, or "
            "--split '' to evaluate)"
        )
    if split is not None:
        folder, names = folder / split, subfolders(folder / split)
    if not names:
        raise ValueError(f"{folder} has no folder; one folder per class is needed")
    splits = [name for name in names if name.lower() in SPLIT_NAMES and holds_only_folders(folder / name)]
    if split is None and (len(splits) > 1 or splits == names):
        raise ValueError(f"{folder / splits[0]} has no image, it holds folders: {splits[0]!r} may be a split, name it")
    return folder
