"""scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels that are there without a network."""

from __future__ import annotations

from typing import Any

import numpy as np
from PIL import Image

from dulbe_peft.data.images import LabelledImages

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# What commands call them where others are named by their path.
DEMO_DIGITS = "demo-digits"


class DigitImages(LabelledImages):
    """Images 8 x 8 of scikit-learn's handwritten digits as PIL images with a label 0 to 9."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray) -> None:
        super().__init__(pixels, labels.astype(np.int64), DIGITS)

    def _item(self, position: int) -> tuple[Any, int]:
        grey = (self.source[position] * (255 / 16)).round().astype(np.uint8)
        return Image.fromarray(grey).convert("RGB"), int(self._own_labels[position])


def load_digit_images(split: str | None) -> DigitImages:
    """Three quarters of the digits, the split "train", or the rest, "test"."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    if split not in ("train", "test"):
        raise FileNotFoundError(f"{DEMO_DIGITS} has the splits 'train' and 'test', got {split!r}")
    digits = load_digits()
    parts = train_test_split(digits.images, digits.target, test_size=0.25, random_state=0, stratify=digits.target)
    first = 0 if split == "train" else 1
    return DigitImages(parts[first], parts[first + 2])
