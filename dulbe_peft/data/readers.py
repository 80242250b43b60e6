"""Images on disk: a folder per class, one `.npz` file, or a dataset of the Hugging Face hub.

Every reader has `len`, `reader[i]` giving {"image": upright PIL image in RGB, "label": int}, `labels`, `class_names`,
`item_name(i)` for messages and `item_source(i)`, what Pillow opens. All can be sent to the workers of a DataLoader.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dulbe_peft.data.decoding import decode_image, to_rgb
from dulbe_peft.data.digits import DEMO_DIGITS, DigitImages, load_digit_images
from dulbe_peft.data.folders import ImageFolder
from dulbe_peft.data.hub import HubImages, import_datasets, is_saved, load_saved
from dulbe_peft.data.npz import NPZ_SPLITS, NpzImages

__all__ = ["HubImages", "ImageFolder", "NpzImages", "decode_image", "load_data", "to_rgb"]

_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def load_data(
    path_or_name: str | os.PathLike[str],
    split: str | None = "train",
    *,
    image_column: str = "image",
    label_column: str = "label",
) -> ImageFolder | NpzImages | HubImages | DigitImages:
    """Open a dataset by what its path is.

    Args:
        path_or_name: a folder of images, an `.npz` file, a folder written by `datasets.save_to_disk`, or "hf:" and
            the name of a dataset on the Hugging Face hub; or "demo-digits", scikit-learn's handwritten digits.
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
        dataset = import_datasets().load_dataset(text.removeprefix("hf:"), split=split)
        return HubImages(dataset, text, image_column, label_column)
    path = Path(text)
    if text == DEMO_DIGITS and not path.exists():
        return load_digit_images(split)
    if path.is_dir():
        if is_saved(path):
            return HubImages(load_saved(path, split), text, image_column, label_column)
        return ImageFolder(path, split)
    if not path.exists():
        hub = f'; a dataset of the Hugging Face hub is written "hf:{text}"' if _HUB_NAME.fullmatch(text) else ""
        raise FileNotFoundError(f"{text} does not exist{hub}")
    if path.suffix.lower() != ".npz":
        raise ValueError(f"{path} is neither a folder nor an .npz file")
    if split is None:
        raise ValueError(f"{path} needs a split, one of {', '.join(NPZ_SPLITS)}, got None")
    return NpzImages(path, split)
