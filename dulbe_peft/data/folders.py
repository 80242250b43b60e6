"""Images in folders, one folder per class."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dulbe_peft.data.decoding import image_suffixes, why_not_read
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.names import check_class_names

# Names that people give to the splits of a data set, in lower case.
SPLIT_NAMES = ("train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation")


def folder_content(folder: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Sorted paths of the images below a folder, and path and reason of what is left out; links are followed once."""
    images, left_out = list[str](), list[tuple[str, str]]()
    start = len(os.path.join(folder, ""))
    for path in _files_below(folder, left_out):
        suffix = os.path.splitext(path)[1].lower()
        if suffix not in image_suffixes():
            left_out.append((path, why_not_read(suffix)))
        elif _is_image(path):
            images.append(path[start:].replace(os.sep, "/"))
        else:
            left_out.append((path, "neither a file nor a folder"))
    return sorted(images), left_out


def holds_image(folder: Path) -> bool:
    """Whether there is an image below a folder, of which no more is walked than up to the first one."""
    return any(map(_is_image, _files_below(folder, [])))


def _is_image(path: str) -> bool:
    if os.path.splitext(path)[1].lower() not in image_suffixes():
        return False
    return os.path.isfile(path) or (os.path.islink(path) and not os.path.exists(path))  # reading says it leads nowhere


def _files_below(folder: Path, left_out: list[tuple[str, str]]) -> Iterator[str]:
    """Paths of the files below a folder that are not hidden; what is passed over comes into `left_out`."""
    entered = set[tuple[int, int]]()
    for here, folders, files in os.walk(folder, onerror=_cannot_be_read, followlinks=True):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in entered:
            left_out.append((here, "a link to a folder that is read already"))
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        left_out += [(os.path.join(here, name), "hidden") for name in sorted(folders + files) if name[0] == "."]
        folders[:] = sorted(name for name in folders if name[0] != ".")
        seen = sorted(name for name in files if name[0] != ".")
        if here != str(folder) and not folders and not seen:
            left_out.append((here, "an empty folder"))
        yield from (os.path.join(here, name) for name in seen)


def _cannot_be_read(error: OSError) -> None:
    raise error


def subfolders(path: Path) -> list[str]:
    """Names of the folders in `path` that are not hidden, sorted by code point on every system."""
    return sorted(name for name in os.listdir(path) if name[0] != "." and os.path.isdir(path / name))


def holds_only_folders(path: Path) -> bool:
    """Whether a folder holds folders, and no image beside them."""
    images = (name for name in os.listdir(path) if name.lower().endswith(image_suffixes()))
    return not any(os.path.isfile(path / name) for name in images) and bool(subfolders(path))


class FileImages(LabelledImages):
    """Images in files with their classes: `source` has their paths below `root`."""

    def __init__(
        self, root: Path, split: str | None, images: Sequence[tuple[str, str]], left_out: Sequence[tuple[str, str]]
    ) -> None:
        place = {name: label for label, name in enumerate(sorted({name for _, name in images}))}
        labels = np.array([place[name] for _, name in images], dtype=np.int64)
        super().__init__([file for file, _ in images], labels, check_class_names(place), stored=True)
        self.root, self.split, self.left_out = root, split, left_out

    def _item(self, position: int) -> tuple[Path, int]:
        return self.root / self.source[position], int(self._own_labels[position])

    def item_name(self, index: int) -> str:
        """Path of an image."""
        return str(self.root / self.source[self.indices[index]])


class ImageFolder(FileImages):
    """Images in `root/split/class name/**`, or `root/class name/**` without a split.

    A class folder may hold folders of any depth. Files are .jpg, .jpeg, .jfif, .png, .webp, .bmp, .gif (the first
    frame), .tif, .tiff and, where Pillow reads it, .avif, in either case. Classes and files are sorted by name.

    Args:
        root: folder that holds the splits, or the classes.
        split: name of the folder of the split; None where there are no splits.

    Attributes:
        left_out: (path, reason) of every file and folder that is no part of the data.

    Raises:
        FileNotFoundError: `root` or the split is not there.
        ValueError: there is no class folder with an image, or a class folder holds files and none is an image.

    Example:
        >>> photos = ImageFolder("photos", "train")
        >>> len(photos), photos.class_names, photos.left_out
        (120, ('cat', 'dog'), [('photos/train/cat/notes.txt', 'files ending in .txt are not read')])
    """

    def __init__(self, root: str | os.PathLike[str], split: str | None = None) -> None:
        folder = folder_of_classes(Path(root), split)
        found, left_out = folder_content(folder)
        left_out += [(str(folder / image), "not in a class folder") for image in found if "/" not in image]
        found = sorted((image for image in found if "/" in image), key=lambda image: image.partition("/"))
        files = [image for image in found if image.encode("utf-8", "ignore").decode() == image]
        # No table of a run could name the others.
        left_out += [(str(folder / image), "the name is not UTF-8") for image in sorted(set(found) - set(files))]
        images = [(image, image.partition("/")[0]) for image in files]
        for name in sorted(set(subfolders(folder)) - {name for _, name in images}):
            inside = os.path.join(folder, name, "")
            why = next((why for path, why in left_out if path.startswith(inside) and why != "hidden"), "")
            if why:
                raise ValueError(f"class folder {folder / name} has no {', '.join(image_suffixes())} file ({why})")
        if not files:
            raise ValueError(f"no class folder in {folder} has an image; its folders are {subfolders(folder)}")
        super().__init__(folder, split, images, left_out)


def folder_of_classes(folder: Path, split: str | None) -> Path:
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
        loose = any(place.suffix.lower() in image_suffixes() for place in folder.iterdir())
        heap = ". Images without classes are for predict, suggest and serve --photos" if loose else ""
        raise ValueError(f"{folder} has no folder; one folder per class is needed{heap}")
    splits = [name for name in names if name.lower() in SPLIT_NAMES and holds_only_folders(folder / name)]
    if split is None and (len(splits) > 1 or splits == names):
        raise ValueError(f"{folder / splits[0]} has no image, it holds folders: {splits[0]!r} may be a split, name it")
    return folder
