"""Images in folders, one folder per class."""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from dulbe_peft.data.decoding import image_suffixes, why_not_read
from dulbe_peft.data.images import LabelledImages, column_of
from dulbe_peft.data.names import UNLABELLED, check_class_names, class_key, has_control_characters
from dulbe_peft.data.tables import is_table
from dulbe_peft.utils.terminal import counted

# Common names of the splits of a data set, in lower case.
SPLIT_NAMES = ("train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval", "evaluation")
_SPLIT = re.compile(rf"(?:.*[\W_])?(?:{'|'.join(SPLIT_NAMES)})(?:[\W_\d].*|set)?", re.IGNORECASE)  # as in seg_train
# Names of folders that usually contain a whole data set rather than the images of one class.
_HOLDERS = {"dataset", "datasets", "data", "images", "image", "imgs", "img", "photos", "pictures", "pics"}
_HOLDERS |= {"examples", "samples", "files", "jpegimages", "raw"}
# Folders in which operating systems keep thumbnails and deleted files beside photographs, in lower case.
_SYSTEM = {"@eadir", "@__thumb", "#recycle", "#snapshot", "$recycle.bin", "recycler", "system volume information"}
_SYSTEM |= {"__macosx", "lost+found", "thumbnails.noindex"}
NO_CLASS_YET = "no class by its name (rename the folder if it is one)"
UNFIT = "the name of the class has a control character: rename the folder"
OF_A_SYSTEM = "a folder of the operating system, not a class"


def system_folders(path: Path) -> list[str]:
    """Return the names of the operating system's folders in `path`."""
    return sorted(name for name in os.listdir(path) if name.lower() in _SYSTEM and os.path.isdir(path / name))


def like_splits(names: Sequence[str]) -> list[str]:
    """Return the names that look like splits: seg_train and seg_test do, but a single steam_train does not."""
    candidates = [name for name in names if _SPLIT.fullmatch(name)]
    both = len({"train" in name.lower() for name in candidates}) == 2
    return [name for name in candidates if both or name.lower() in SPLIT_NAMES]


def folder_content(folder: Path) -> tuple[list[str], list[tuple[str, str]]]:
    """Return the sorted paths of the images below a folder, and (path, reason) of what is left out.

    Links to folders are followed, but no folder is read twice.
    """
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
    """Return whether there is an image below a folder; the search stops at the first one."""
    return any(map(_is_image, _files_below(folder, [])))


def _is_image(path: str) -> bool:
    if os.path.splitext(path)[1].lower() not in image_suffixes():
        return False
    # A broken link counts as an image, so that reading it reports the missing target.
    return os.path.isfile(path) or (os.path.islink(path) and not os.path.exists(path))


def _files_below(folder: Path, left_out: list[tuple[str, str]]) -> Iterator[str]:
    """Yield the paths of the files below a folder that are not hidden; what is skipped is added to `left_out`."""
    entered = set[tuple[int, int]]()
    for here, folders, files in os.walk(folder, onerror=_cannot_be_read, followlinks=True):
        status = os.stat(here)
        if (status.st_dev, status.st_ino) in entered:
            left_out.append((here, "a link to a folder that has already been read"))
            folders.clear()
            continue
        entered.add((status.st_dev, status.st_ino))
        left_out += [(os.path.join(here, name), "hidden") for name in sorted(folders + files) if name[0] == "."]
        system = sorted(name for name in folders if name.lower() in _SYSTEM)
        left_out += [(os.path.join(here, name), OF_A_SYSTEM) for name in system]
        folders[:] = sorted(name for name in folders if name[0] != "." and name not in system)
        visible = sorted(name for name in files if name[0] != ".")
        if here != str(folder) and not folders and not visible:
            left_out.append((here, "an empty folder"))
        yield from (os.path.join(here, name) for name in visible)


def _cannot_be_read(error: OSError) -> None:
    raise error


def subfolders(path: Path) -> list[str]:
    """Return the folders in `path` that are neither hidden nor the operating system's, sorted by code point."""
    names = (name for name in os.listdir(path) if name[0] != "." and name.lower() not in _SYSTEM)
    return sorted(name for name in names if os.path.isdir(path / name))


def holds_only_folders(path: Path) -> bool:
    """Return whether a folder contains folders and no images beside them."""
    with os.scandir(path) as entries:  # stops at the first image
        if any(entry.name.lower().endswith(image_suffixes()) and entry.is_file() for entry in entries):
            return False
    return bool(subfolders(path))


class FileImages(LabelledImages):
    """Labelled images in files; `source` has their paths relative to `root`, `rows` their rows in a table, if any."""

    by_path = True

    def __init__(
        self,
        root: Path,
        split: str | None,
        images: Sequence[tuple[str, str]],
        left_out: Sequence[tuple[str, str]],
        notes: Sequence[str] = (),
        rows: Sequence[Mapping[str, str]] = (),
    ) -> None:
        place = {name: label for label, name in enumerate(sorted({name for _, name in images}))}
        labels = np.array([place[name] for _, name in images], dtype=np.int64)
        super().__init__([file for file, _ in images], labels, check_class_names(place), stored=True)
        self.root, self.split, self.left_out, self.notes = root, split, left_out, notes
        self.columns = {name: partial(column_of, rows, name) for name in (rows[0] if rows else ())}

    def _item(self, position: int) -> tuple[Path, int]:
        return self.root / self.source[position], int(self._own_labels[position])

    def item_name(self, index: int) -> str:
        """Return the path of an image."""
        return str(self.root / self.source[self.indices[index]])

    def path_of(self, index: int) -> str:
        return str(self.source[self.indices[index]])


class ImageFolder(FileImages):
    """Images in `root/split/class name/**`, or `root/class name/**` without a split.

    A class folder may contain folders of any depth. Files may have the suffixes of `decoding.image_suffixes`, in upper
    or lower case; of several pictures in a file, the first is read. Classes and files are sorted by name.

    Args:
        root: Folder that contains the splits or the classes.
        split: Name of the split's folder, or None if there are no splits.
        leave_out: Classes to skip, or folders in classes such as "cat/old".

    Attributes:
        left_out: (path, reason) of every file and folder that is skipped.

    Raises:
        FileNotFoundError: If `root` or the split does not exist.
        ValueError: If no class folder contains an image, or a class folder contains files but no images.

    Example:
        >>> photos = ImageFolder("photos", "train")
        >>> len(photos), photos.class_names, photos.left_out
        (120, ('cat', 'dog'), [('photos/train/cat/notes.txt', 'a file ending in .txt is not read')])
    """

    def __init__(self, root: str | os.PathLike[str], split: str | None = None, leave_out: Sequence[str] = ()) -> None:
        folder = folder_of_classes(Path(root), split, leave_out)
        paths, left_out = folder_content(folder)
        skipped = tuple(f"{name.strip('/')}/" for name in leave_out)
        left_out += [(str(folder / name), "left out on request") for name in skipped if (folder / name).is_dir()]
        paths = [image for image in paths if not image.startswith(skipped)]
        if waiting := _unlabelled(paths):
            left_out += [(str(folder / name), f"{NO_CLASS_YET}, {counted(n, 'image')}") for name, n in waiting.items()]
            paths = [image for image in paths if image.partition("/")[0] not in waiting]
        # Commands show the rest, and print what is left out.
        unfit = {name for name in (image.partition("/")[0] for image in paths) if has_control_characters(name)}
        left_out += [(str(folder / image), UNFIT) for image in paths if image.partition("/")[0] in unfit]
        paths = [image for image in paths if image.partition("/")[0] not in unfit]
        left_out += [(str(folder / image), "not in a class folder") for image in paths if "/" not in image]
        paths = sorted((image for image in paths if "/" in image), key=lambda image: image.partition("/"))
        files = [image for image in paths if image.encode("utf-8", "ignore").decode() == image]
        # Other names cannot be written into the tables of a run.
        left_out += [(str(folder / image), "the name is not UTF-8") for image in sorted(set(paths) - set(files))]
        images = [(image, image.partition("/")[0]) for image in files]
        for name in sorted(set(subfolders(folder)) - {name for _, name in images} - {*leave_out, *waiting, *unfit}):
            inside = os.path.join(folder, name, "")
            why = next((why for path, why in left_out if path.startswith(inside) and why != "hidden"), "")
            if why:
                raise ValueError(f"class folder {folder / name} has no {', '.join(image_suffixes())} file ({why})")
        if not files:
            raise ValueError(f"no class folder in {folder} contains an image; its folders are {subfolders(folder)}")
        super().__init__(folder, split, images, left_out)


def _unlabelled(paths: Sequence[str]) -> dict[str, int]:
    """Return the folders of images that wait for a label, with their numbers of images; none if all are such."""
    numbers = Counter(path.partition("/")[0] for path in paths if "/" in path)
    waiting = {name: number for name, number in numbers.items() if class_key(name) in UNLABELLED}
    return waiting if len(waiting) < len(numbers) else {}


@dataclass(frozen=True)
class FolderSplit:
    """A split of a folder of images, which is read when it is called."""

    root: Path
    split: str | None
    leave_out: Sequence[str] = ()

    def __call__(self) -> ImageFolder:
        return ImageFolder(self.root, self.split, self.leave_out)

    def check(self) -> None:
        """Raise the errors of reading that concern folders, without listing the files."""
        folder_of_classes(self.root, self.split, self.leave_out)


def folder_of_classes(folder: Path, split: str | None, leave_out: Sequence[str] = ()) -> Path:
    """Return the folder that contains the class folders; raises if its folders look like splits instead of classes."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder of images")
    names = subfolders(folder)
    if split is not None and split not in names:
        raise FileNotFoundError(
            f"{folder} has no split {split!r}; its folders are {names} (if these are the classes, pass split=None, or "
            "--split '' to the command evaluate)"
        )
    if split is not None:
        folder, names = folder / split, subfolders(folder / split)
    if not names:
        has_images = any(path.suffix.lower() in image_suffixes() for path in folder.iterdir())
        hint = ". For images without classes, use predict, suggest or serve --photos" if has_images else ""
        raise ValueError(f"{folder} has no folder; one folder per class is needed{hint}{_or_table(folder)}")
    names = [name for name in names if name not in leave_out]
    _check_level(folder, names, split)
    first: dict[str, str] = {}
    for name in names:
        if (other := first.setdefault(class_key(name), name)) != name:
            both = f"{other!r} and {name!r}, two spellings of one name"
            raise ValueError(f"{folder} has the folders {both}: move the images into one of them")
    return folder


def _check_level(folder: Path, names: list[str], split: str | None) -> None:
    """Raise a `ValueError` if the folders in `folder` are not the classes but contain splits or classes."""
    nested = [name for name in names if holds_only_folders(folder / name)]
    splits = like_splits(nested)
    if split is None and splits and (len(splits) > 1 or splits == names):
        where = f"{folder / splits[0]} contains folders and no image"
        raise ValueError(f"{where}: if {splits[0]!r} is a split, pass its name ({split_flags(splits)})")
    for name in nested:
        inner = subfolders(folder / name)
        of_splits = any(holds_only_folders(folder / name / split_name) for split_name in like_splits(inner))
        if of_splits or (len(inner) > 1 and (name.lower() in _HOLDERS or names == [name])):
            listed = ", ".join(map(repr, inner[:4])) + (", ..." if len(inner) > 4 else "")
            raise ValueError(
                f"{folder / name} contains only folders ({listed}): if these are the "
                f"{'splits' if of_splits else 'classes'}, pass {folder / name}; if {name!r} is a class, put its "
                "images directly into its folder"
            )
    if names and all(name.lower() in _HOLDERS for name in {*names} - {*like_splits(names)}):
        raise ValueError(
            f"the folders in {folder}, {', '.join(map(repr, names))}, do not look like classes by their names: one "
            f"folder per class is needed{_or_table(folder, *(folder / name for name in names))}"
        )


def split_flags(names: Sequence[str]) -> str:
    """Return the command-line flags that choose a training and a test split among `names`."""
    train = next((name for name in names if "train" in name.lower()), "NAME")
    test = next((name for name in names if name != train), "none")
    alone = f", or --split {test} of evaluate" if test != "none" else ""
    return f"--train-split {train} --test-split {test} of run{alone}"


def _or_table(*folders: Path) -> str:
    """Return a hint if the folders contain archives, which may have the images, or a table, which may have labels."""
    if any(path.suffix.lower() == ".tar" for folder in folders for path in folder.iterdir()):
        return (
            '. Convert a webdataset with `datasets.load_dataset("webdataset", data_files="FOLDER/*.tar")'
            ".save_to_disk(NEW)` and pass NEW with --image-column and --label-column; unpack other archives"
        )
    tables = [path for folder in folders for path in sorted(folder.iterdir()) if is_table(path)]
    return f". To read labels from {tables[0]}, pass --labels {tables[0]}" if tables else ""
