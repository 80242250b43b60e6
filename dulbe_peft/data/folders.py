"""Images in folders, one folder per class."""

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dulbe_peft.data.decoding import image_suffixes, why_not_read
from dulbe_peft.data.images import LabelledImages
from dulbe_peft.data.names import check_class_names

# Names that people give to the splits of a data set, in lower case.
SPLIT_NAMES = ("train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation")
_SPLIT = re.compile(rf"(?:.*[\W_])?(?:{'|'.join(SPLIT_NAMES)})(?:[\W_\d].*|set)?", re.IGNORECASE)  # as in seg_train
# Names of folders that hold a data set rather than the images of a class.
_HOLDERS = {"dataset", "datasets", "data", "images", "image", "imgs", "img", "photos", "pictures", "pics"}
_HOLDERS |= {"examples", "samples", "files", "jpegimages", "raw"}
# Folders that systems keep beside photographs, with thumbnails and what was deleted; in lower case.
_SYSTEM = {"@eadir", "@__thumb", "#recycle", "#snapshot", "$recycle.bin", "recycler", "system volume information"}
_SYSTEM |= {"__macosx", "lost+found", "thumbnails.noindex"}
OF_A_SYSTEM = "a folder that a system keeps for itself, no class"
TABLES = (".csv", ".tsv", ".jsonl")


def system_folders(path: Path) -> list[str]:
    """The folders in a folder that a system keeps there."""
    return sorted(name for name in os.listdir(path) if name.lower() in _SYSTEM and os.path.isdir(path / name))


def like_splits(names: Sequence[str]) -> list[str]:
    """The names of splits among some; seg_train and seg_test are two of them, a steam_train alone is none."""
    found = [name for name in names if _SPLIT.fullmatch(name)]
    both = len({"train" in name.lower() for name in found}) == 2
    return [name for name in found if both or name.lower() in SPLIT_NAMES]


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
        system = sorted(name for name in folders if name.lower() in _SYSTEM)
        left_out += [(os.path.join(here, name), OF_A_SYSTEM) for name in system]
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in system)
        seen = sorted(name for name in files if name[0] != ".")
        if here != str(folder) and not folders and not seen:
            left_out.append((here, "an empty folder"))
        yield from (os.path.join(here, name) for name in seen)


def _cannot_be_read(error: OSError) -> None:
    raise error


def subfolders(path: Path) -> list[str]:
    """Names of the folders in `path` that are neither hidden nor a system's, sorted by code point on every system."""
    names = (name for name in os.listdir(path) if name[0] != "." and name.lower() not in _SYSTEM)
    return sorted(name for name in names if os.path.isdir(path / name))


def holds_only_folders(path: Path) -> bool:
    """Whether a folder holds folders, and no image beside them."""
    with os.scandir(path) as entries:  # which ends at the first image
        if any(one.name.lower().endswith(image_suffixes()) and one.is_file() for one in entries):
            return False
    return bool(subfolders(path))


class FileImages(LabelledImages):
    """Images in files with their classes: `source` has their paths below `root`."""

    def __init__(
        self,
        root: Path,
        split: str | None,
        images: Sequence[tuple[str, str]],
        left_out: Sequence[tuple[str, str]],
        notes: Sequence[str] = (),
    ) -> None:
        place = {name: label for label, name in enumerate(sorted({name for _, name in images}))}
        labels = np.array([place[name] for _, name in images], dtype=np.int64)
        super().__init__([file for file, _ in images], labels, check_class_names(place), stored=True)
        self.root, self.split, self.left_out, self.notes = root, split, left_out, notes

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
        leave_out: classes, or folders in classes such as "cat/old", that are no part of the data.

    Attributes:
        left_out: (path, reason) of every file and folder that is no part of the data.

    Raises:
        FileNotFoundError: `root` or the split is not there.
        ValueError: there is no class folder with an image, or a class folder holds files and none is an image.

    Example:
        >>> photos = ImageFolder("photos", "train")
        >>> len(photos), photos.class_names, photos.left_out
        (120, ('cat', 'dog'), [('photos/train/cat/notes.txt', 'a file ending in .txt is not read')])
    """

    def __init__(self, root: str | os.PathLike[str], split: str | None = None, leave_out: Sequence[str] = ()) -> None:
        folder = folder_of_classes(Path(root), split, leave_out)
        found, left_out = folder_content(folder)
        named = tuple(f"{name.strip('/')}/" for name in leave_out)
        left_out += [(str(folder / name), "named to be left out") for name in named if (folder / name).is_dir()]
        found = [image for image in found if not image.startswith(named)]
        left_out += [(str(folder / image), "not in a class folder") for image in found if "/" not in image]
        found = sorted((image for image in found if "/" in image), key=lambda image: image.partition("/"))
        files = [image for image in found if image.encode("utf-8", "ignore").decode() == image]
        # No table of a run could name the others.
        left_out += [(str(folder / image), "the name is not UTF-8") for image in sorted(set(found) - set(files))]
        images = [(image, image.partition("/")[0]) for image in files]
        for name in sorted(set(subfolders(folder)) - {name for _, name in images} - {*leave_out}):
            inside = os.path.join(folder, name, "")
            why = next((why for path, why in left_out if path.startswith(inside) and why != "hidden"), "")
            if why:
                raise ValueError(f"class folder {folder / name} has no {', '.join(image_suffixes())} file ({why})")
        if not files:
            raise ValueError(f"no class folder in {folder} has an image; its folders are {subfolders(folder)}")
        super().__init__(folder, split, images, left_out)


def folder_of_classes(folder: Path, split: str | None, leave_out: Sequence[str] = ()) -> Path:
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
        raise ValueError(f"{folder} has no folder; one folder per class is needed{heap}{_or_table(folder)}")
    names = [name for name in names if name not in leave_out]
    _check_level(folder, names, split)
    return folder


def _check_level(folder: Path, names: list[str], split: str | None) -> None:
    """Raise where the folders in a folder are not the classes, but lie above them or hold all of them."""
    nested = [name for name in names if holds_only_folders(folder / name)]
    splits = like_splits(nested)
    if split is None and splits and (len(splits) > 1 or splits == names):
        where = f"{folder / splits[0]} has no image, it holds folders"
        raise ValueError(f"{where}: {splits[0]!r} may be a split, name it ({split_flags(splits)})")
    for name in nested:
        inner = subfolders(folder / name)
        of_splits = any(holds_only_folders(folder / name / one) for one in like_splits(inner))
        if of_splits or (len(inner) > 1 and (name.lower() in _HOLDERS or names == [name])):
            listed = ", ".join(map(repr, inner[:4])) + (", ..." if len(inner) > 4 else "")
            raise ValueError(
                f"{folder / name} holds folders alone ({listed}): give it, if these are the "
                f"{'splits' if of_splits else 'classes'}; if {name!r} is a class, put its images into it directly"
            )
    if names and all(name.lower() in _HOLDERS for name in {*names} - {*like_splits(names)}):
        raise ValueError(
            f"the folders of {folder}, {', '.join(map(repr, names))}, are none of classes, by their names: one folder "
            f"per class is needed{_or_table(folder, *(folder / name for name in names))}"
        )


def split_flags(names: Sequence[str]) -> str:
    """The flags that name splits, of some folders that are called like them."""
    learned = next((name for name in names if "train" in name.lower()), "NAME")
    return f"--train-split {learned} --test-split {next((name for name in names if name != learned), 'none')}"


def _or_table(*folders: Path) -> str:
    """A hint at what lies in some folders and may hold the labels, or the images."""
    if any(place.suffix.lower() == ".tar" for folder in folders for place in folder.iterdir()):
        return (
            '. Of a webdataset, `datasets.load_dataset("webdataset", data_files="FOLDER/*.tar").save_to_disk(NEW)` '
            "makes a folder that is read, with --image-column and --label-column; other archives are to be unpacked"
        )
    tables = [place for folder in folders for place in sorted(folder.iterdir()) if place.suffix.lower() in TABLES]
    return f". Labels of {tables[0]} are read with --labels {tables[0]}" if tables else ""
