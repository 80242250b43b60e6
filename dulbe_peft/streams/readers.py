"""Images on disk: a folder per class, one `.npz` file, or a dataset of the Hugging Face hub.

Every reader has `len`, `reader[i]` giving {"image": PIL image in RGB, "label": int}, `labels`, `class_names`,
`item_name(i)` for messages and `content_id(i)` for `fingerprint`; all can be sent to the workers of a DataLoader.
"""

from __future__ import annotations

import importlib
import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dulbe_peft.streams.names import check_class_names
from dulbe_peft.streams.samples import dataset_class_names, dataset_labels

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
NPZ_KEYS = ("blob", "offsets", "labels", "split", "names")
NPZ_SPLITS = {"train": 0, "test": 1}


def to_rgb(image: Image.Image) -> Image.Image:
    """A copy of an image in RGB; alpha is dropped, not blended, and 16-bit grey is scaled, not clipped.

    Raises:
        ValueError: the image is 32-bit, which says nothing about where white is.
    """
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode!r} have no fixed range; save it with 8 or 16 bits a channel")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns about the direct way
    return image.convert("RGB")


def decode_image(source: Any, index: int, name: str) -> Image.Image:
    """Open a path or binary file as an RGB image.

    Raises:
        ValueError: it cannot be read; the message has `index` and `name`.
    """
    try:
        with Image.open(source) as image:
            return to_rgb(image)
    except Exception as error:  # Pillow's decoders raise almost anything on damaged files
        raise ValueError(f"image {index} ({name}) cannot be read: {error}") from error


def _check_index(index: int, length: int) -> int:
    if not -length <= index < length:
        raise IndexError(f"index {index} is out of range for {length} images")
    return int(index) % length


def _folders(path: Path) -> list[str]:
    """Names of the folders in `path` that are not hidden, sorted by code point on every system."""
    with os.scandir(path) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _image_files(path: Path) -> list[str]:
    """Names of the image files in `path` that are not hidden, sorted."""
    names = []
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.name.startswith(".") or not entry.name.lower().endswith(IMAGE_SUFFIXES):
                continue
            if entry.is_file():
                names.append(entry.name)
            elif entry.is_symlink() and not os.path.exists(entry.path):
                raise FileNotFoundError(f"{entry.path} is a link to {os.readlink(entry.path)}, which does not exist")
    return sorted(names)


class ImageFolder:
    """Images in `root/split/class name/*`, or `root/class name/*` without a split.

    Files are .jpg, .jpeg, .png, .webp or .bmp in either case; classes and files are sorted by name.

    Args:
        root: folder that holds the splits, or the classes.
        split: name of the folder of the split; None where there are no splits.

    Raises:
        FileNotFoundError: `root` or the split is not there, or a file is a link to nothing.
        ValueError: there is no class folder, or one of them has no image.
    """

    def __init__(self, root: str | os.PathLike[str], split: str | None = None) -> None:
        folder = Path(root)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder of images")
        if split is not None:
            splits = _folders(folder)
            if split not in splits:
                raise FileNotFoundError(f"{folder} has no split {split!r}; its folders are {splits}")
            folder = folder / split
        self.root, self.split = folder, split
        names = _folders(folder)
        if not names:
            raise ValueError(f"{folder} has no folder; one folder per class is needed")
        self.class_names = check_class_names(names)
        self._files: list[tuple[int, str]] = []
        for label, name in enumerate(self.class_names):
            files = _image_files(folder / name)
            if not files:
                inner = _folders(folder / name)
                hint = f"; it holds folders, so {name!r} may be a split" if inner and split is None else ""
                raise ValueError(f"class folder {folder / name} has no {', '.join(IMAGE_SUFFIXES)} file{hint}")
            self._files += [(label, file) for file in files]
        self.labels = np.array([label for label, _ in self._files], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = _check_index(index, len(self))
        path = self.item_name(index)
        return {"image": decode_image(path, index, path), "label": self._files[index][0]}

    def item_name(self, index: int) -> str:
        """Path of an image."""
        label, file = self._files[index]
        return str(self.root / self.class_names[label] / file)

    def content_id(self, index: int) -> str:
        """Name and size of an image's file, wherever the root folder stands."""
        label, file = self._files[index]
        return f"{self.class_names[label]}/{file}:{os.path.getsize(self.item_name(index))}"


def _map_stored_member(path: Path, member: str) -> np.ndarray | None:
    """Map an uncompressed array of an `.npz` into memory; None where it is compressed and must be read whole."""
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(member)
    if info.compress_type != zipfile.ZIP_STORED:
        return None
    with open(path, "rb") as file:
        file.seek(info.header_offset)
        local = file.read(30)  # a zip's local header; its name and extra field may be longer than the directory's
        file.seek(int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little"), os.SEEK_CUR)
        version = np.lib.format.read_magic(file)
        read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(file)
        if dtype.hasobject:
            raise ValueError(f"{member} holds Python objects")
        return np.memmap(path, dtype=dtype, mode="r", offset=file.tell(), shape=shape)


class NpzImages:
    """One split of an `.npz` file with the arrays `blob`, `offsets`, `labels`, `split` and `names`.

    Image i is the file `blob[offsets[i]:offsets[i + 1]]` (JPEG or another format Pillow knows), `labels[i]` indexes
    `names`, and `split[i]` is 0 for training and 1 for test. Save it with `numpy.savez`: the images are then mapped
    into memory and shared by all processes; a compressed file is read whole by each.

    Args:
        path: the file.
        split: "train" or "test".

    Raises:
        FileNotFoundError: the file is not there.
        ValueError: the split is another one or has no image, or the file does not have this layout.
    """

    def __init__(self, path: str | os.PathLike[str], split: str) -> None:
        self.path = Path(path)
        if split not in NPZ_SPLITS:
            raise ValueError(f"split is {split!r}; {self.path} has the splits {', '.join(NPZ_SPLITS)}")
        if not self.path.is_file():
            raise FileNotFoundError(f"{self.path} is not a file")
        self.split = split
        arrays = self._read()
        self._blob: np.ndarray | None = arrays["blob"]
        self._offsets = arrays["offsets"].astype(np.int64)
        self._items = np.flatnonzero(arrays["split"] == NPZ_SPLITS[split])
        self.labels = arrays["labels"].astype(np.int64)[self._items]
        self.class_names = check_class_names(arrays["names"].tolist())
        if not len(self._items):
            raise ValueError(f"{self.path} has no image in the split {split!r}")

    def _read(self) -> dict[str, np.ndarray]:
        try:
            if not zipfile.is_zipfile(self.path):
                raise ValueError("it is damaged or of another kind")
            with np.load(self.path, allow_pickle=False) as file:
                absent = [key for key in NPZ_KEYS if key not in file.files]
                if absent:
                    raise ValueError(f"the array {absent[0]!r} is missing; it has {file.files}")
                arrays = {key: file[key] for key in NPZ_KEYS if key != "blob"}
            blob = self._open_blob()
        except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
            raise ValueError(f"{self.path} is no .npz file of images: {error}") from error
        arrays["blob"] = blob
        problem = _npz_problem(arrays)
        if problem:
            raise ValueError(f"{self.path}: {problem}")
        return arrays

    def _open_blob(self) -> np.ndarray:
        blob = _map_stored_member(self.path, "blob.npy")
        if blob is None:
            with np.load(self.path, allow_pickle=False) as file:
                blob = file["blob"]
        return blob

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_blob": None}  # a worker process opens the file itself

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = _check_index(index, len(self))
        if self._blob is None:
            self._blob = self._open_blob()
        item = self._items[index]
        data = self._blob[self._offsets[item] : self._offsets[item + 1]].tobytes()
        return {
            "image": decode_image(io.BytesIO(data), index, self.item_name(index)),
            "label": int(self.labels[index]),
        }

    def item_name(self, index: int) -> str:
        """The file and the image's position in it."""
        return f"{self.path}[{self._items[index]}]"

    def content_id(self, index: int) -> str:
        """Where the image's bytes begin and end."""
        item = self._items[index]
        return f"{self._offsets[item]}:{self._offsets[item + 1]}"


def _npz_problem(arrays: dict[str, np.ndarray]) -> str | None:
    """What contradicts the layout, or None."""
    kinds = {"blob": "u", "offsets": "iu", "labels": "iu", "split": "iu", "names": "U"}
    for key, kind in kinds.items():
        if arrays[key].ndim != 1 or arrays[key].dtype.kind not in kind:
            return f"{key} has shape {arrays[key].shape} and type {arrays[key].dtype}, which the layout does not allow"
    blob, offsets, labels, split, names = (arrays[key] for key in NPZ_KEYS)
    if blob.dtype != np.uint8:
        return f"blob has type {blob.dtype}; it must be uint8, the bytes of the images"
    if len(offsets) != len(labels) + 1 or len(split) != len(labels):
        return (
            f"offsets, labels and split have the lengths {len(offsets)}, {len(labels)} and {len(split)}; "
            "for n images they must be n + 1, n and n"
        )
    steps = np.diff(offsets.astype(np.int64))
    if len(steps) and steps.min() <= 0:
        return f"offsets must increase, but image {int(steps.argmin())} has {steps.min()} bytes"
    if offsets[0] < 0 or offsets[-1] > len(blob):
        return f"offsets run from {offsets[0]} to {offsets[-1]}, but blob has {len(blob)} bytes"
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(names):
        return f"labels run from {labels.min()} to {labels.max()}; they must lie in 0..{len(names) - 1}"
    if len(split) and not np.isin(split, list(NPZ_SPLITS.values())).all():
        return f"split holds {sorted(set(split.tolist()))}; only 0 (train) and 1 (test) are allowed"
    return None


class HubImages:
    """A Hugging Face `datasets.Dataset` with an image column and a `ClassLabel` column.

    Args:
        dataset: one split.
        name: what messages call it.
        image_column: column with the images.
        label_column: column with the labels.

    Raises:
        ValueError: a column is missing or the labels have no names.
    """

    def __init__(self, dataset: Any, name: str, image_column: str = "image", label_column: str = "label") -> None:
        for column in (image_column, label_column):
            if column not in dataset.column_names:
                raise ValueError(f"{name} has no column {column!r}; its columns are {dataset.column_names}")
        if getattr(dataset.features[label_column], "names", None) is None:
            raise ValueError(
                f"column {label_column!r} of {name} has no class names; make it one with class_encode_column"
            )
        columns = dataset.with_format(None).select_columns([image_column, label_column])
        for old, new in ((image_column, "image"), (label_column, "label")):
            if old != new:
                columns = columns.rename_column(old, new)
        self.name = name
        self.dataset = columns
        self.labels = dataset_labels(columns)
        self.class_names = dataset_class_names(columns)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = _check_index(index, len(self))
        try:
            image = to_rgb(self.dataset[index]["image"])
        except Exception as error:  # as in decode_image
            raise ValueError(f"image {index} ({self.item_name(index)}) cannot be read: {error}") from error
        return {"image": image, "label": int(self.labels[index])}

    def item_name(self, index: int) -> str:
        """The dataset and the row."""
        return f"{self.name}[{index}]"


def _import_datasets() -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise ImportError(
            'reading a Hugging Face dataset needs the package datasets: pip install "dulbe_peft[datasets]"'
        ) from error


def _load_saved(path: Path, split: str | None) -> Any:
    """One split of what `save_to_disk` wrote."""
    saved = _import_datasets().load_from_disk(str(path))
    if hasattr(saved, "keys"):
        if split not in saved:
            raise FileNotFoundError(f"{path} has no split {split!r}; its splits are {sorted(saved)}")
        return saved[split]
    if split is not None and saved.split is not None and str(saved.split) != split:
        raise FileNotFoundError(f"{path} holds the split {str(saved.split)!r} alone, not {split!r}")
    return saved


def load_data(
    path_or_name: str | os.PathLike[str],
    split: str | None = "train",
    *,
    image_column: str = "image",
    label_column: str = "label",
) -> ImageFolder | NpzImages | HubImages:
    """Open a dataset by what its path is.

    Args:
        path_or_name: a folder of images, an `.npz` file, a folder written by `datasets.save_to_disk`, or "hf:" and
            the name of a dataset on the Hugging Face hub.
        split: the split to read; None for a folder of classes without splits.
        image_column: column with the images, where the dataset is one of Hugging Face.
        label_column: column with the labels, where the dataset is one of Hugging Face.

    Raises:
        FileNotFoundError: there is nothing under this path, or it lacks the split.
        ImportError: the package `datasets` is needed and not installed.
        ValueError: the path is a file of another kind, or what is there does not have the layout.
    """
    text = os.fspath(path_or_name)
    if text.startswith("hf:"):
        if split is None:
            raise ValueError(f"{text} needs a split, got None")
        dataset = _import_datasets().load_dataset(text.removeprefix("hf:"), split=split)
        return HubImages(dataset, text, image_column, label_column)
    path = Path(text)
    if path.is_dir():
        if any((path / name).is_file() for name in ("dataset_dict.json", "state.json")):
            return HubImages(_load_saved(path, split), text, image_column, label_column)
        return ImageFolder(path, split)
    if not path.exists():
        raise FileNotFoundError(f'{path} does not exist; a dataset of the Hugging Face hub is written "hf:{text}"')
    if path.suffix.lower() != ".npz":
        raise ValueError(f"{path} is neither a folder nor an .npz file")
    if split is None:
        raise ValueError(f"{path} needs a split, one of {', '.join(NPZ_SPLITS)}, got None")
    return NpzImages(path, split)
