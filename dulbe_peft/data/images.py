"""Labelled images: any user's data set is converted once, and afterwards only sliced.

A user's data set is any object with `len(dataset)` whose items `dataset[i]` are {"image", "label"} mappings or
(image, label) pairs. If it also gives the labels alone (`.labels`, `.targets` or a "label" column), no image is
decoded to read the labels.
"""

import copy
import hashlib
import io
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from PIL import Image

from dulbe_peft.data.decoding import UnreadableImageError, decode_file, header_of_file, stored_bytes, to_rgb
from dulbe_peft.data.glance import GLANCE_BYTES, MOST_BYTES, PICTURE_SIDE, Glance, Glances, Header, glance_at
from dulbe_peft.data.names import check_class_names, names_from_file

FILES: Any = (Path, io.IOBase)  # types that Pillow opens


class UnlabelledError(ValueError):
    """Raised when the images of a data set have no labels, as in the test split of a competition."""


class PixelMemory:
    """Pixel values of image files by position, which the slices of a data set share.

    Attributes:
        rows: Position -> the file's entry on the disk when it was read, its content, and the pixel values.
        way: How the pixel values were made, or None if none are kept.
        bytes: The memory that the values of all images take.
    """

    def __init__(self) -> None:
        self.release()

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ()  # other processes make their own

    def release(self) -> None:
        """Keep nothing any more."""
        self.rows: dict[int, tuple[object, bytes | None, Any]] = {}
        self.way: object = None
        self.bytes = 0


class LabelledImages:
    """Images with labels and class names. Slices share the same source.

    It is a data set with `len` and items {"image", "label"}, where images are upright and in RGB.

    Attributes:
        labels: Labels, (n,), int64, which index `class_names`.
        class_names: Names of the classes; empty if they are not known.
        source: The user's data set.
        indices: Position of each image in `source`, (n,).
        groups: Number of each image's group, (n,), int64, or None, see `grouped`.
        columns: Further columns of the source: a function for each name that reads the values, one per position.
        name: Name of the source in error messages; if empty, images are named by the source's `item_name(i)`.
        stored: Whether the images are files, whose headers can be read without decoding them.
        by_path: Whether images can be files in folders, whose paths `path_of` returns.
    """

    name = ""
    left_out: Sequence[tuple[str, str]] = ()  # (path, reason) of what a folder contains but the data set skips
    notes: Sequence[str] = ()  # messages to the user about what was guessed
    split: str | None = None
    features: Any = None  # a `FeatureTable` if the images were encoded earlier
    groups: np.ndarray | None = None
    columns: Mapping[str, Callable[[], Sequence[object]]] = {}
    by_path = False

    def __init__(
        self, source: Any, labels: np.ndarray, class_names: Sequence[str] = (), *, stored: bool = False
    ) -> None:
        self.source = source
        self.labels = self._own_labels = labels
        self.class_names = tuple(class_names)
        self.stored = stored
        self.indices = np.arange(len(labels))
        # Maps a position to the content and, for a file, its entry on the disk when it was read. Slices share it.
        self._contents: dict[int, tuple[bytes | None, object]] = {}
        self.glances = Glances()  # of images that were decoded
        self.pixels = PixelMemory()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        try:
            image = self.image(index)
        except UnreadableImageError as error:
            name = self.item_name(index)
            raise UnreadableImageError(f"image {index} ({name}) cannot be read: {error}") from error
        return {"image": image, "label": int(self.labels[index])}

    def image(self, index: int) -> Any:
        """Return an image, upright and in RGB if it is a file or a PIL image; errors do not name the image."""
        return self.read(index)[1]

    def read(self, index: int, side: int = 0) -> tuple[bytes | None, object]:
        """Return an image's content, see `contents`, and the image, both from the same bytes.

        `side` is that of `decode_smaller`, for images that are files.
        """
        image = self.given(index)
        if isinstance(image, FILES):
            return self._decoded(int(self.indices[index]), image, side)[:2]
        if isinstance(image, Image.Image):
            image = to_rgb(image)
        return content_of(image), image

    def entry(self, index: int) -> object:
        """Return what is the same as long as a file is not changed; None for an image that is not a file."""
        return _entry_or_none(self.given(index))

    @property
    def whole(self) -> int:
        """Number of images of the source, of which these may be a part."""
        return len(self._own_labels)

    def glance(self, index: int) -> Glance:
        """Return what is kept of a decoded image file.

        The file is decoded unless it was before and its entry on the disk is unchanged. Raises an
        `UnreadableImageError` if the image cannot be read.
        """
        position, file = int(self.indices[index]), self.given(index)
        kept = self._kept(position, file)
        return kept or self._decoded(position, file, 2 * PICTURE_SIDE)[2]

    def header(self, index: int) -> Header:
        """Return what the header of an image file says, without decoding the image."""
        file = self.given(index)
        kept = self._kept(int(self.indices[index]), file)
        return header_of_file(file) if kept is None else kept.header

    def kept_glances(self, contents: Mapping[int, bytes | None]) -> dict[bytes, Glance]:
        """Return the glances in memory by content, for indices with known contents."""
        rows = ((content, self.glances.get(int(self.indices[index]))) for index, content in contents.items())
        return {content: kept[0] for content, kept in rows if content and kept}

    def _kept(self, position: int, file: object) -> Glance | None:
        entry = _entry_or_none(file)
        kept, before = self.glances.get(position, (None, None))
        if kept is not None and entry == before:
            return kept
        content, before = self._contents.get(position, (None, None))
        return self.glances.stored(content) if self.glances.stored and content and entry == before else None

    def _decoded(self, position: int, file: Any, side: int = 0) -> tuple[bytes, Image.Image, Glance]:
        """Read a file once, and return its content, the decoded image, and what is kept of it.

        `side` is that of `decode_smaller`.
        """
        entry = _entry_or_none(file)
        stored = stored_bytes(file)
        if _entry_or_none(file) != entry:
            raise ValueError("it changed while it was being read: start again")
        content = hashlib.sha256(stored).digest()
        image, header = decode_file(file, stored, side)
        if position not in self._contents and (entry is not None or not isinstance(file, Path)):
            self._contents[position] = content, entry
        glance = self._kept(position, file) or glance_at(header, image)
        if position in self.glances or len(self.glances) * GLANCE_BYTES < MOST_BYTES:
            self.glances[position] = glance, entry
        return content, image, glance

    def given(self, index: int) -> Any:
        """Return an image as the source gives it, or the path or file to open, which is not read yet."""
        position = int(self.indices[index])
        image, label = self._item(position)
        if label != self._own_labels[position]:  # for example, a transform of labels changes the class
            raise ValueError(
                f"its label is {label}, but the dataset's list of labels has {self._own_labels[position]}"
            )
        return _opened_from(image)

    def contents(self) -> list[bytes | None]:
        """Return a hash that identifies each image: the SHA-256 of its stored bytes, or of its pixels, size and type.

        It is None for an image that cannot be read. A file is read again if its entry on the disk has changed.
        """
        return [self._content(index) for index in range(len(self))]

    def known_contents(self) -> list[bytes | None]:
        """Return the contents of images that were read before and have not changed, and None for others."""
        found = list[bytes | None]()
        for index, position in enumerate(self.indices.tolist()):
            content, entry = self._contents.get(position, (None, None))
            same = content is not None and (entry is None or entry == _entry_or_none(self.given(index)))
            found.append(content if same else None)
        return found

    def record_content(self, index: int, content: bytes | None) -> None:
        """Store a content that `read` has returned, perhaps in another process.

        None is ignored: it comes from cached pixel values or from an image that cannot be read. Raises a `ValueError`
        if a file had another content before.
        """
        position = int(self.indices[index])
        before, entry = self._contents.get(position, (None, None))
        if content is None:
            return
        if entry is None and not self.stored:
            self._contents[position] = content, None
        if entry is not None and content != before:
            raise ValueError(f"{self.item_name(index)} changed while it was being read: start again")

    def _content(self, index: int) -> bytes | None:
        position = int(self.indices[index])
        content, before = self._contents.get(position, (None, ()))
        if before is None:  # not a file, so it cannot have changed
            return content
        try:
            image = self.given(index)
            entry = _entry_of(image)
            if entry != before:
                content = content_of(image)
                self._contents[position] = content, entry
        except Exception:  # a user's data set may raise anything; reading the image will report it
            return None
        return content

    def item_name(self, index: int) -> str:
        """Return the name of an image for messages: its path if the source knows it."""
        position = int(self.indices[index])
        if self.name:
            return f"{self.name}[{position}]"
        named = getattr(self.source, "item_name", None)
        return f"item {position}" if named is None else str(named(position))

    def path_of(self, index: int) -> str:
        """Return the path of an image inside its data set if it is a file, and otherwise its name."""
        return self.item_name(index)

    def at(
        self,
        indices: np.ndarray | Sequence[int] | slice,
        labels: np.ndarray | None = None,
        class_names: Sequence[str] | None = None,
    ) -> Self:
        """Return the images at `indices`, with the same labels and class names or with the given ones."""
        part = copy.copy(self)
        part.indices = self.indices[indices]
        part.labels = self.labels[indices] if labels is None else labels
        part.class_names = self.class_names if class_names is None else tuple(class_names)
        part.groups = None if self.groups is None else self.groups[indices]
        return part

    def grouped(self, groups: Sequence[object] | np.ndarray) -> Self:
        """Return the images with a group for each: images of one animal, burst or site belong together.

        Groups are texts or whole numbers. Equal ones are the same group in all data sets.
        """
        if len(groups) != len(self):
            raise ValueError(f"groups has {len(groups)} entries, but there are {len(self)} images")
        part = self.at(slice(None))
        texts = [str(group).encode("utf-8", "surrogatepass") for group in groups]
        part.groups = np.array([int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1 for text in texts])
        return part

    def select(self, class_names: Sequence[str], others: bool = False) -> Self:
        """Return the images of some classes, labelled by their position in `class_names`.

        Raises a `ValueError` if the data set does not know one of the classes, unless `others` is true.
        """
        wanted = check_class_names(class_names)
        absent = sorted(set(wanted) - set(self.class_names))
        if absent and not others:
            raise ValueError(f"the dataset has no class {absent[0]!r}")
        place = {name: label for label, name in enumerate(wanted)}
        places = np.array([place.get(name, -1) for name in self.class_names], dtype=np.int64)
        chosen = np.flatnonzero(places[self.labels] >= 0)
        return self.at(chosen, places[self.labels[chosen]], wanted)

    def renamed(self, file: str | Path) -> Self:
        """Return the images with the class names of a text file, see `names_from_file`."""
        return self.at(slice(None), class_names=names_from_file(self.class_names, file))

    def fingerprint(self, look: bool = True) -> str:
        """Return the SHA-256 of labels, class names, contents and groups, but not of paths.

        Without `look`, contents are included only if the images are files.
        """
        digest = hashlib.sha256(b"dulbe_peft dataset 3")
        contents = self.contents() if look or self.stored else []
        for chunk in (
            f"{len(self)} images, {len(self.class_names)} classes".encode(),
            self.labels.astype("<i8").tobytes(),
            *(name.encode() for name in self.class_names),
            *(content or b"" for content in contents),
            *([] if self.groups is None else [self.groups.astype("<i8").tobytes()]),
        ):
            digest.update(len(chunk).to_bytes(8, "little") + chunk)
        return digest.hexdigest()

    def _item(self, position: int) -> tuple[object, int]:
        return _image_and_label(self.source, position)


# Maps the name of a split to a function that opens it; the name is None if there are no splits.
Splits = dict[str | None, Callable[[], LabelledImages]]


def labelled_images(dataset: object) -> LabelledImages:
    """Convert a user's data set to `LabelledImages`, with class names if the data set has them."""
    if isinstance(dataset, LabelledImages) and type(dataset).__getitem__ is LabelledImages.__getitem__:
        return dataset
    if isinstance(dataset, Mapping):
        raise TypeError(f"dataset is a mapping with the keys {sorted(map(str, dataset))}; pass one of its splits")
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise TypeError(f"dataset is a {type(dataset).__name__}; it must have __len__ and __getitem__")
    inner = None
    if hasattr(dataset, "dataset") and hasattr(dataset, "indices"):
        inner = labelled_images(dataset.dataset).at(np.asarray(dataset.indices, dtype=np.int64))
        from torch.utils.data import Subset

        if type(dataset) is Subset:
            return inner
    labels = _labels_of(dataset, inner)
    if len(labels) != len(dataset):
        raise ValueError(f"dataset has {len(labels)} labels but {len(dataset)} images")
    if len(labels) and labels.max() < 0:
        raise UnlabelledError(f"all of its labels are {labels.max()}")
    if len(labels) and labels.min() < 0:
        index = int(labels.argmin())
        raise ValueError(f"the label of sample {index} is {labels[index]}; labels must not be negative")
    names = _carried_names(dataset) or (() if inner is None else inner.class_names)
    rows = undecoded(dataset)
    return LabelledImages(dataset if rows is None else rows, labels, names, stored=rows is not None)


def named_images(
    dataset: object, class_names: Sequence[str] | None = None, default: Sequence[str] = (), title: str = "dataset"
) -> LabelledImages:
    """Convert a user's data set, which must not be empty, with the given class names, its own, or `default`."""
    images = labelled_images(dataset)
    labels, carried = images.labels, images.class_names
    names = check_class_names(class_names) if class_names is not None else carried or tuple(default)
    if not names:
        raise ValueError("the dataset has no class names; pass class_names")
    if not len(labels):
        raise ValueError(f"{title} is empty; at least one image is needed")
    if labels.max() >= len(names):
        index = int(labels.argmax())
        raise ValueError(
            f"the label of {title} sample {index} is {labels[index]}; there are {len(names)} classes, so labels must "
            f"lie in 0..{len(names) - 1}"
        )
    for label in np.unique(labels) if carried and names != carried else ():
        expected = carried[label] if label < len(carried) else None
        if expected != names[label]:
            raise ValueError(
                f"label {label} is {names[label]!r} in class_names but {expected!r} in the dataset's class names: "
                "leave class_names out, or pass the names in the dataset's order"
            )
    return images.at(slice(None), class_names=names)


def undecoded(dataset: object) -> Any:
    """Return a dataset of `datasets` with its images as stored, or None for anything else.

    The library's decoder is avoided because it accepts every format that Pillow knows.
    """
    features = getattr(dataset, "features", None)
    feature = features.get("image") if isinstance(features, Mapping) else None
    if feature is None or type(feature).__name__ != "Image" or not hasattr(dataset, "cast_column"):
        return None
    if getattr(dataset, "format", {}).get("type") is not None:
        return None
    return dataset.cast_column("image", type(feature)(decode=False))


def column_of(rows: Sequence[Mapping[str, str]], name: str) -> list[str]:
    """Return a column of a table's rows, for `LabelledImages.columns`; "" for a row without it."""
    return [row.get(name, "") for row in rows]


def content_of(image: Any) -> bytes | None:
    """Return the SHA-256 of a file's bytes, or of the type, size and values of an image, array or tensor, or None."""
    if isinstance(image, FILES):
        return hashlib.sha256(stored_bytes(image)).digest()
    if isinstance(image, Image.Image):
        image = to_rgb(image)
        kind, values = f"{image.mode} {image.size}", image.tobytes()
    elif hasattr(image, "shape") and hasattr(image, "dtype"):
        array = image.detach().cpu() if hasattr(image, "detach") else image
        kind = f"{type(image).__name__} {array.dtype} {tuple(array.shape)}"
        # NumPy has no bfloat16, whose values are all exact in float32.
        values = np.asarray(array.float() if "bfloat16" in str(array.dtype) else array).tobytes()
    else:
        return None
    return hashlib.sha256(f"dulbe_peft pixels {kind}\0".encode() + values).digest()


def _entry_of(image: object) -> object:
    """Return the identity, size and times of a file; while they are the same, it need not be read again."""
    if not isinstance(image, Path):
        return None
    status = os.stat(image)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _entry_or_none(image: object) -> object:
    """Return `_entry_of`, or None if the file cannot be found; reading it will say why."""
    with suppress(Exception):
        return _entry_of(image)
    return None


def _opened_from(image: object) -> Any:
    """Return the path or file of an image as `datasets` stores it; anything else is returned as it is."""
    if not isinstance(image, Mapping) or not {"bytes", "path"} <= set(image):
        return image
    if image["bytes"] is not None:
        return io.BytesIO(image["bytes"])
    if image["path"] and "://" not in image["path"]:
        return Path(image["path"])
    raise UnreadableImageError(f"it has no bytes and no file on this machine: {image}")


def _image_and_label(dataset: Any, index: int) -> tuple[object, int]:
    """Return the image and label of an item of a user's data set."""
    try:
        sample = dataset[index]
    except IndexError as error:
        raise ValueError(f"the dataset gives no item {index}, though its length is {len(dataset)}") from error
    if isinstance(sample, Mapping):
        if "image" not in sample or "label" not in sample:
            raise ValueError(f"sample {index} has the keys {sorted(map(str, sample))}; 'image' and 'label' are needed")
        image, label = sample["image"], sample["label"]
    elif isinstance(sample, (tuple, list)) and len(sample) == 2:
        image, label = sample
    else:
        raise TypeError(f"sample {index} is a {type(sample).__name__}; it must be a mapping or (image, label) pair")
    value = _array(label, f"the label of sample {index}")
    if value.ndim or value.dtype.kind not in "iu":
        raise TypeError(f"the label of sample {index} is {label!r} of type {type(label).__name__}; it must be an int")
    return image, int(value)


def _labels_of(dataset: Any, inner: LabelledImages | None) -> np.ndarray:
    """Return the labels of a user's data set, (n,), int64, without decoding images if possible."""
    columns = getattr(dataset, "column_names", None)
    for attribute in ("labels", "targets"):
        if getattr(dataset, attribute, None) is not None:
            return _label_array(getattr(dataset, attribute), f"dataset.{attribute}")
    if isinstance(columns, list):
        if "label" not in columns:
            raise ValueError(f"dataset has the columns {columns}; rename the column with the labels to 'label'")
        return _label_array(dataset.with_format(None)["label"][:], "dataset['label']")
    if inner is not None:
        return inner.labels
    labels = []
    for index in range(len(dataset)):
        try:
            labels.append(_image_and_label(dataset, index)[1])
        except OSError as error:
            raise ValueError(f"image {index} (item {index}) cannot be preprocessed: {error}") from error
    return _label_array(labels, "the dataset's labels")


def _label_array(values: Any, source: str) -> np.ndarray:
    """Convert labels to int64, refusing bools and floats, which a cast would accept."""
    for index, value in enumerate(values if isinstance(values, (list, tuple)) else ()):
        if isinstance(value, (bool, np.bool_)):
            raise TypeError(f"{source}[{index}] is {value!r}; labels must be ints")
    array = _array(values, source)
    if array.ndim != 1:
        raise ValueError(f"{source} has {array.ndim} dimensions; one label per image is needed")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{source} must hold ints, got values of type {array.dtype}, the first is {values[0]!r}")
    return array.astype(np.int64)


def _array(values: object, source: str) -> np.ndarray:
    """Convert labels to a NumPy array, also from a tensor on an accelerator."""
    try:
        return np.asarray(values.cpu() if hasattr(values, "cpu") else values)
    except (TypeError, ValueError) as error:  # bfloat16 tensors, lists of different lengths
        raise TypeError(f"{source} must hold ints: {error}") from error


def _carried_names(dataset: object) -> tuple[str, ...]:
    """Return the class names of a user's data set: `.class_names`, `.classes`, or those of its "label" column."""
    for attribute in ("class_names", "classes"):
        names = getattr(dataset, attribute, None)
        if names is not None:
            return check_class_names(names)
    features = getattr(dataset, "features", None)
    names = getattr(features.get("label"), "names", None) if isinstance(features, Mapping) else None
    return () if names is None else check_class_names(names)
