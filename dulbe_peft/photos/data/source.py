"""A data source: how images are named on the command line, and how they become training and test images with labels.

This module is imported before the command line is parsed, so its functions import what is slow to import.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self

from annotated_types import Gt, Lt

from dulbe_peft.data.names import class_key
from dulbe_peft.utils.settings import AtLeastOne, check_settings, documented, setting
from dulbe_peft.utils.terminal import counted

if TYPE_CHECKING:
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.data.labels import Reading
    from dulbe_peft.photos.data.inventory import Inventory
    from dulbe_peft.photos.data.looking import Look
    from dulbe_peft.photos.data.splits import Opened

Part = Annotated[float, Gt(0), Lt(1)]  # a share of the images
UNLABELLED = "images without labels cannot be tested on"
VALIDATION = ("valid", "validation", "val")  # splits that are tested on if there is no test split
SPLITS = ("train_split", "test_split", "test_fraction", "test_data")  # fields that say which images are tested on
GROUPING = ("group", "group_seconds")  # fields that say which images belong together
_READING = (  # arguments of `load_data`
    *("image_column", "label_column", "vocabulary", "path_column", "leave_out", "one_label", "machine_labels"),
)
# How images are read, and which belong together: the settings of every command that reads labelled images.
READ = (*_READING, "class_names", "strict", *GROUPING)


class Roles(NamedTuple):
    """What the splits of a source are for; a function opens a split.

    `unused` has the name or path of each unused split, the reason, and its folder if it has one.
    """

    train: Callable[[], LabelledImages]
    test: tuple[str, Callable[[], LabelledImages]] | None  # the name of the test split and its opener
    unused: list[tuple[str, str, Path | None]]


@documented
@dataclass(frozen=True)
class DataSource:
    """Where images and labels are, and which images are trained and tested on; an entry of `sources.json`.

    A folder of images holds splits, `photos/train/cat/*` and `photos/test/cat/*`, or only classes, `photos/cat/*`; in
    the latter case all images are for training. If there is no split `test`, then `valid`, `validation` or `val` is
    the test split. Other splits and test splits without labels are left out and counted.

    Example:
        >>> train, test, inventory = DataSource("photos/train", test_fraction=0.2).open()
        >>> print(inventory.summary())
        2 classes; images: 97 in train, 23 in test; left out: 1
    """

    data: str = setting(
        "", "Images: a folder with train/class/*.jpg, class/*.jpg or parquet files, or hf:NAME. Or use --labels."
    )
    train_split: str = setting("train", "Name of the training split.")
    test_split: str = setting("test", "Name of the test split, or none.")
    test_fraction: Part | None = setting(None, "Share of images to hold out as the test split.")
    test_data: str | None = setting(None, "Separate test images, given as the others.")
    strict: bool = setting(False, "Stop at unreadable images, and skip none.")
    class_names: str | None = setting(None, "Text file with 'old name', a tab, 'new name' per line; or new names.")
    vocabulary: str | None = setting(None, "File of exiftool's keywords that are classes.")
    image_column: str = setting("image", "Image column of a Hub data set.")
    label_column: str = setting("label", "Column of labels in the data.")
    path_column: str | None = setting(None, "Column of paths in the table of --labels.")
    leave_out: list[str] | None = setting(None, "Classes, or folders such as cat/old, to skip.")
    one_label: bool = setting(False, "Cells are classes as written, as 'Smith, Anna'.")
    machine_labels: bool = setting(False, "Learn a machine's labels in Camtrap DP, too.")
    validation_fraction: Part | None = setting(
        None, "Test on this share of the training images, which is held out, in order to choose settings."
    )
    images_per_class: AtLeastOne | list[AtLeastOne] | str | None = setting(
        None,
        "Train on at most this number of images per class, drawn at random. Several counts, such as 2,32, are given "
        "to the classes in turn; longtail:32 gives 32 images to one class, 32 / 2 to the next, 32 / 3 to the third, "
        "and so on.",
    )
    test_images_per_class: AtLeastOne | None = setting(
        None, "Test on at most this number of images per class, drawn at random."
    )
    draw_seed: int = setting(0, "Seed for drawing images, and for holding them out for validation.")
    group: str | None = setting(None, "Groups: a column, folder, or a REGEX of paths.")
    group_seconds: Annotated[float, Gt(0)] | None = setting(None, "Photographs taken this close together are a group.")

    def __post_init__(self) -> None:
        for name in ("data", "test_data"):
            if isinstance(path := getattr(self, name), os.PathLike):
                object.__setattr__(self, name, os.fspath(path))
        check_settings(self)
        for name in ("class_names", "vocabulary"):
            if getattr(self, name) == "":
                raise ValueError(f"{name} is '', expected the path of a file")
        count = self.images_per_class
        if count == [] or (isinstance(count, str) and not re.fullmatch(r"longtail:[1-9]\d*", count)):
            raise ValueError(f"images_per_class must be like 8, or 2,32, or longtail:32, got {count!r:.100}")

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> Self:
        """Return the source that an entry of `sources.json`, or any settings with these fields, describes.

        None stands for the default.
        """
        given: dict[str, Any] = {field.name: settings.get(field.name) for field in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def entry(self) -> dict[str, object]:
        """Return the fields, for `sources.json`."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def absolute(self) -> Self:
        """Return the source with absolute paths, which can be opened from any working directory."""
        changes: dict[str, Any] = {}
        for name in ("data", "class_names", "vocabulary", "test_data"):
            path = getattr(self, name)
            # What does not exist is on the Hub, or missing, and the error should show it unchanged.
            if path and Path(path).exists():
                changes[name] = str(Path(path).absolute())
        return replace(self, **changes)

    def check(self) -> None:
        """Raise the errors that `open` would raise before it opens an image, without asking the Hub."""
        from dulbe_peft.data.folders import FolderSplit
        from dulbe_peft.data.hub import HUB_PREFIX

        if not self.data.startswith(HUB_PREFIX):
            for opener in (self.splits.train, *(self.splits.test or ())[1:]):
                if isinstance(opener, FolderSplit):
                    opener.check()

    def _check_acting(self) -> None:
        """Raise a ValueError if a setting was given that does nothing with this data."""
        drawn = (self.validation_fraction, self.images_per_class, self.test_images_per_class)
        if self.draw_seed and drawn == (None, None, None):
            raise ValueError(f"draw_seed is {self.draw_seed}, but nothing is drawn: give images_per_class, or omit it")
        given = [field for field in fields(self) if field.name in _READING and field.name != "leave_out"]
        given = [field for field in given if getattr(self, field.name) != field.default]
        if not given:
            return
        from dulbe_peft.data.readers import reading_of

        kinds = {data: reading_of(data) for data in (self.data, self.test_data) if data}
        for field in given:
            if not any(field.name in acting for _, acting in kinds.values()):
                what = " and ".join(f"{data} is {kind}" for data, (kind, _) in kinds.items())
                raise ValueError(f"{field.name} is {getattr(self, field.name)!r}, but {what}: leave it out")

    @cached_property
    def splits(self) -> Roles:
        """What the splits are for. Invalid combinations of fields raise an error; no image is opened."""
        self._check_acting()
        return _roles(self)

    def open(self, look: Look | None = None, every: bool = False) -> Opened:
        """Open the images, look at all of them, and choose the training and the test images.

        Args:
            look: A function that finds the unreadable images and the reasons. By default, all images are decoded.
            every: Whether the pictures of all images are compared, and not only the contents and a sample.

        Raises:
            FileNotFoundError: If `data` does not exist or a split is missing.
            ValueError: If images are unreadable and `strict` is true, all images of a class are unreadable, there are
                both a test split and a fraction, or the layout is ambiguous.
        """
        given = _given(self)
        opened = given.readable(self.data, self.strict, look).grouped(self.group, self.group_seconds)
        for lost in (row for row in _present(given.train) if row not in _present(opened.train)):
            example, why = next(row for row in opened.inventory.unreadable if row[0].label == lost)
            raise ValueError(
                f"no image of the class {lost!r} can be read, such as {example.name}: {why}; repair the images, or "
                "remove the class"
            )
        if self.test_fraction is not None:
            opened = opened.held_out(self.test_fraction, "test" if self.test_split == "none" else self.test_split)
        opened = opened.compared(every)
        if self.class_names is not None:
            opened = opened.renamed(self.class_names)
        return opened.drawn(
            self.validation_fraction, self.images_per_class, self.test_images_per_class, self.draw_seed
        )

    def open_split(self, split: str | None, look: Look | None = None) -> tuple[LabelledImages, Inventory]:
        """Open a single split, and look at all of its images.

        The split "" means that `data` is a folder of classes; None means the split "test" if `data` has it, and
        otherwise a folder of classes.
        """
        from dulbe_peft.photos.data.splits import Opened

        self._check_acting()
        names, open_one = self._openers(self.data)
        if split is None:
            split = "test" if "test" in names or None not in names else None
        images = _training_classes_first(open_one(split or None), Path(self.data), _class_names)
        opened = Opened.of({images.split or "images": images}, notes=images.notes).readable(
            self.data, self.strict, look
        )
        images, _, inventory = opened.grouped(self.group, self.group_seconds)
        return self._renamed(images), inventory

    def reopen(self) -> list[LabelledImages]:
        """Return the splits in which the test images of an earlier run may be; no image is opened."""
        parts: list[LabelledImages] = []
        class_names = cache(_class_names)
        for data in filter(None, (self.test_data, self.data)):
            with suppress(OSError, ValueError):
                _, opened = self._openers(data)
                for split in dict.fromkeys((self.test_split, "test", *VALIDATION, self.train_split, None)):
                    with suppress(OSError, ValueError):
                        parts.append(_training_classes_first(opened(split), Path(data), class_names))
        if not parts:
            parts.append(self._openers(self.data)[1](self.test_split))  # this raises the error
        return [self._renamed(part) for part in parts]

    @property
    def reading(self) -> Reading:
        """How the images are read."""
        from dulbe_peft.data.labels import Reading

        return Reading(**{name: value for name in _READING if (value := getattr(self, name))})

    def _openers(self, data: str) -> tuple[Collection[str | None], Callable[[str | None], LabelledImages]]:
        """Return the names of the splits of `data`, and a function that opens one. The Hub is not asked for names."""
        from dulbe_peft.data.hub import HUB_PREFIX
        from dulbe_peft.data.readers import load_data, split_of, splits

        if data.startswith(HUB_PREFIX):
            return {"test"}, partial(load_data, data, **vars(self.reading))
        available = splits(data, self.reading)
        return available.keys(), partial(split_of, available, data)

    def _renamed(self, images: LabelledImages) -> LabelledImages:
        return images if self.class_names is None else images.renamed(self.class_names)


def _roles(source: DataSource) -> Roles:
    """Decide which split is trained on, which one is tested on, and which ones are unused."""
    from dulbe_peft.data.folders import subfolders
    from dulbe_peft.data.readers import splits

    text, train, test = source.data, source.train_split, source.test_split
    if train == test:
        raise ValueError(
            f"train_split and test_split are both {train!r}, but training images cannot be the test images: "
            "name another test_split"
        )
    wanted = "test" if test == "none" else test
    available, unlabelled = splits(text, source.reading), False
    if test == "test" not in available and train in available and {source.test_fraction, source.test_data} == {None}:
        wanted = next((name for name in VALIDATION if name in available), wanted)
    if {None} < available.keys():  # image files in folders, which may be splits or classes
        names, unused = _folder_roles(Path(text), train, wanted)
        available = {name: available[name] for name in names}
        unlabelled = wanted in available and not subfolders(Path(text, wanted))
    else:
        whole = list(available) == [None]
        for name in (train, *([wanted] if wanted != "test" else [])):
            if name not in available and not (whole and name == "train"):
                has = "it has no splits" if whole else f"its splits are {list(available)}"
                raise FileNotFoundError(f"{text} has no split {name!r}; {has}")
        others = [name for name in available if name and name not in (train, wanted)]
        unused = [(f"{text}[{name}]", _unused(name), None) for name in others]
    tests = (wanted, available.pop(wanted)) if wanted in available else None
    if tests is not None and (unlabelled or test == "none" or source.test_data is not None):
        folder = Path(text, wanted) if Path(text, wanted).is_dir() else None
        why = f"the split {wanted!r} has no class folder: {UNLABELLED}"
        unused.append((str(folder or f"{text}[{wanted}]"), why if unlabelled else _unused(wanted), folder))
        tests = None
    for value, name in ((tests and tests[0], "the test split"), (source.test_data, "test_data")):
        if source.test_fraction is not None and value is not None:
            raise ValueError(
                f"test_fraction is {source.test_fraction}, but {text} has {name} {value!r}: use only one of them, for "
                "example with --test-split none"
            )
    if source.test_data is not None:
        tests = "test", _all_tests(source.test_data, source.reading)
    return Roles(available[train if train in available else None], tests, unused)


def _all_tests(text: str, reading: Reading) -> Callable[[], LabelledImages]:
    """Return a function that opens separate test data: its split "test", or all of it if it has no splits."""
    from dulbe_peft.data.folders import holds_only_folders
    from dulbe_peft.data.readers import splits

    available = splits(text, reading)
    if None not in available and "test" not in available:
        raise FileNotFoundError(f"{text} has no split 'test'; its splits are {list(available)}")
    in_split = "test" in available and (None not in available or holds_only_folders(Path(text, "test")))
    return available["test" if in_split else None]


def _folder_roles(folder: Path, train: str, test: str) -> tuple[list[str | None], list[tuple[str, str, Path | None]]]:
    """Return the names of a folder's splits, or [None] if its subfolders are classes, and its unused splits."""
    from dulbe_peft.data.folders import SPLIT_NAMES, holds_only_folders, like_splits, split_flags, subfolders

    names = subfolders(folder)
    others = [name for name in names if name not in (train, test)]
    if train not in names:
        known = [name for name in names if name == test or name in like_splits(names)]
        inner = [name for name in known if holds_only_folders(folder / name)]
        if train != "train" or test != "test" or inner:
            hint = f"; if {inner[0]!r} is a split, name it: {split_flags(inner)}" if inner else ""
            raise FileNotFoundError(f"{folder} has no split {train!r}; its folders are {names}{hint}")
        return [None], []
    if test not in names:
        if test != "test":
            raise FileNotFoundError(f"{folder} has no split {test!r}; its folders are {names}")
        strange = [name for name in others if name.lower() not in SPLIT_NAMES]
        if not holds_only_folders(folder / train) and (strange or not subfolders(folder / train)):
            return [None], []  # "train" is a class, for example among other vehicles, and not a split
        if strange:
            raise ValueError(
                f"{folder} holds {train!r}, which contains only folders, and {strange[0]!r}. If {train!r} is the "
                f"training split, give the folder {folder / train}, or move {strange[0]!r} elsewhere. If it is a "
                "class, put its images directly into it"
            )
    unused: list[tuple[str, str, Path | None]] = [
        (str(folder / name), _unused(name), folder / name) for name in others
    ]
    return [name for name in names if name in (train, test)], unused


def _unused(split: str) -> str:
    return f"the split {split!r}, which is neither trained nor tested on"


def _given(source: DataSource) -> Opened:
    """Open the training split and the test split, whose labels are those of the training classes."""
    from dulbe_peft.data.folders import OF_A_SYSTEM, folder_content, system_folders
    from dulbe_peft.data.images import UnlabelledError
    from dulbe_peft.photos.data.splits import Opened

    roles, folder, notes = source.splits, Path(source.data), list[str]()
    left_out = [
        (place, why if inner is None else f"{why}, {counted(len(folder_content(inner)[0]), 'image')}")
        for place, why, inner in roles.unused
    ]
    parts = {source.train_split: roles.train()}
    if roles.test is not None:
        name, open_tests = roles.test
        try:
            parts[name] = open_tests()
        except UnlabelledError as error:
            left_out.append((f"{source.data}[{name}]", f"{error}: {UNLABELLED}"))
        if source.test_split != name and name in VALIDATION:
            notes.append(f"the test split is {name!r}, because there is no split 'test'")
    notes += dict.fromkeys(note for images in parts.values() for note in images.notes)
    for name in source.leave_out or ():
        folders = (folder / name, *(folder / split / name for split in parts))
        if not any(map(Path.is_dir, folders)) and not any(name in images.class_names for images in parts.values()):
            raise ValueError(f"leave_out contains {name!r}, but {folder} has no class and no folder of that name")
    for split, images in parts.items():
        kept = [name for name in images.class_names if name not in (source.leave_out or ())]
        parts[split] = images if len(kept) == len(images.class_names) else images.select(kept)
    train = parts[source.train_split]
    empty = [name for name in train.class_names if name not in _present(train)]
    if empty and len(train):
        notes.append(f"left out: {counted(len(empty), 'class')} without images, such as {empty[0]!r}")
        train = parts[source.train_split] = train.select(_present(train))
    notes += _nested_notes(train, source.group)
    for split in list(parts)[1:]:
        parts[split] = _with_training_labels(parts[split], train.class_names)
    if train.split is not None and folder.is_dir():
        left_out += [(str(folder / name), OF_A_SYSTEM) for name in system_folders(folder)]
    return Opened.of(parts, left_out, notes)


def _present(images: LabelledImages) -> tuple[str, ...]:
    """Return the names of the classes that have images."""
    return tuple(images.class_names[label] for label in sorted(set(images.labels.tolist())))


def _with_training_labels(test: LabelledImages, names: Sequence[str]) -> LabelledImages:
    """Return the test images labelled by the training classes `names`; raise a ValueError for any other class."""
    spelling, unknown = {class_key(name): name for name in names}, [n for n in _present(test) if n not in names]
    for name in unknown:
        if class_key(name) in spelling:
            raise ValueError(
                f"a class is called {spelling[class_key(name)]!r} in the training images and {name!r} in the test "
                "images: use one spelling"
            )
    if unknown:
        more = f"({counted(len(unknown), 'such class')}; --leave-out leaves it out)"
        raise ValueError(f"class {unknown[0]!r} has test images and no training image {more}")
    return test.select(names, others=True)


def _nested_notes(images: LabelledImages, group: str | None) -> list[str]:
    """Return notes on classes whose images lie in inner folders, and on a class that is called like a split.

    With the group "folder", the inner folders are groups, and not ignored.
    """
    from dulbe_peft.data.folders import SPLIT_NAMES, ImageFolder
    from dulbe_peft.photos.data.grouping import FOLDER

    if type(images) is not ImageFolder:
        return []
    inner: dict[str, dict[str, None]] = {}  # class -> folders in it, in order; "" for images directly in the class
    for class_name, *folders, _ in (name.split("/") for name in images.source):
        inner.setdefault(class_name, {})[folders[0] if folders else ""] = None
    notes = []
    nested = {name: [*folders] for name, folders in inner.items() if "" not in folders}
    several = next((name for name, folders in nested.items() if len(folders) > 1), None)
    held = "; if a folder shows one item, use --group folder"
    if group == FOLDER:
        several = None
    elif nested and len(nested) == len(inner):
        listed = ", ".join(map(repr, [folder for folders in nested.values() for folder in folders][:3]))
        notes.append(
            f"the classes are the outer folders; the names of the folders in them, such as {listed}, are ignored{held}"
        )
    if several is not None and not notes:
        listed = ", ".join(map(repr, nested[several][:3]))
        notes.append(
            f"the class {several!r} is the outer folder; the names of the folders in it, {listed}, are ignored{held}"
        )
    split_like = [name for name in images.class_names if name.lower() in SPLIT_NAMES]
    if images.split is None and split_like:
        notes.append(f"{split_like[0]!r} is read as a class; if it is a split, give it a folder for each class")
    return notes


def _training_classes_first(
    images: LabelledImages, folder: Path, class_names: Callable[[Path], tuple[str, ...]]
) -> LabelledImages:
    """Return a split of an image folder with labels that number the training classes first, then further classes."""
    from dulbe_peft.data.folders import ImageFolder, holds_only_folders, subfolders

    if not isinstance(images, ImageFolder) or images.split in (None, "train"):
        return images
    if "train" not in subfolders(folder) or not holds_only_folders(folder / "train"):
        return images
    return images.select(tuple(dict.fromkeys([*class_names(folder), *images.class_names])), others=True)


def _class_names(folder: Path) -> tuple[str, ...]:
    """Return the training classes of an image folder."""
    from dulbe_peft.data.folders import ImageFolder

    return ImageFolder(folder, "train").class_names
