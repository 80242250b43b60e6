"""Handwritten digits that are included in the package, for demonstrations without a network."""

from importlib import resources
from pathlib import Path

import numpy as np
from PIL import Image

from dulbe_peft.data.images import LabelledImages

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, CC BY 4.0: the
# 1,797 test images of 8 x 8 pixels from 0 to 16, as in scikit-learn's `load_digits`. The rows of the split "train"
# come first.
_FILE = Path(str(resources.files("dulbe_peft") / "assets" / "digits.npz"))
_NUM_TRAIN = 1347


def digit_images(pixels: np.ndarray, labels: np.ndarray) -> LabelledImages:
    """Return labelled images of digits, from pixels, (n, 8, 8), with values from 0 to 16, and labels from 0 to 9."""
    grey = (pixels * (255 / 16)).round().astype(np.uint8)
    images = [Image.fromarray(image).convert("RGB") for image in grey]
    return LabelledImages(list(zip(images, labels.tolist(), strict=True)), labels.astype(np.int64), DIGITS)


def load_digit_images(split: str) -> LabelledImages:
    """Load the split "train", three quarters of the 1,797 digits, or "test", the rest.

    >>> len(load_digit_images("train")), len(load_digit_images("test"))
    (1347, 450)
    """
    rows = {"train": slice(_NUM_TRAIN), "test": slice(_NUM_TRAIN, None)}
    if split not in rows:
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    with np.load(_FILE) as digits:
        return digit_images(digits["pixels"][rows[split]], digits["labels"][rows[split]])
