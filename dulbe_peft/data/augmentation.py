"""Augmented views of an image: a crop, a flip and a small affine change. Each depends only on its seed."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image


def augmented(image: object, kinds: str, seed: Sequence[int]) -> Image.Image:
    """Return a random view of an upright RGB image; `kinds` are names in `CHANGES`, joined with "+"."""
    if not isinstance(image, Image.Image):
        raise TypeError(
            f"augment={kinds!r} needs images that are not preprocessed, got a {type(image).__name__}: pass PIL images "
            "or files, or leave augment out"
        )
    random = np.random.default_rng(seed)
    for name, change in CHANGES.items():
        if name in kinds.split("+"):
            image = change(image, random)
    return image


def _crop(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """Crop 50 to 100 % of the area, with 3/4 to 4/3 of the image's aspect ratio."""
    area, stretch = random.uniform(0.5, 1), math.exp(random.uniform(-1, 1) * math.log(4 / 3) / 2)
    shares = np.minimum(1, math.sqrt(area) * np.array([stretch, 1 / stretch]))
    sides = np.maximum(1, np.round(shares * image.size))
    left, top = np.floor(random.uniform(0, 1, 2) * (np.array(image.size) - sides + 1))
    return image.crop((int(left), int(top), int(left + sides[0]), int(top + sides[1])))


def _flip(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """Flip the image horizontally with probability 0.5."""
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


def _affine(image: Image.Image, random: np.random.Generator) -> Image.Image:
    """Rotate by up to 10 degrees, shear by up to 5, scale and shift by up to 10 %; fill with the border's colour."""
    angle, shear = np.radians(random.uniform(-10, 10)), np.radians(random.uniform(-5, 5))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = turn @ [[1, np.tan(shear)], [0, 1]] * random.uniform(0.9, 1.1)
    centre = np.array(image.size) / 2
    offset = centre - matrix @ (centre + random.uniform(-0.1, 0.1, 2) * image.size)
    pixels = np.asarray(image)
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    colour = tuple(int(value) for value in np.median(border, axis=0))
    data = (*matrix[0], offset[0], *matrix[1], offset[1])
    return image.transform(
        image.size, Image.Transform.AFFINE, data, resample=Image.Resampling.BICUBIC, fillcolor=colour
    )


CHANGES = {"crop": _crop, "flip": _flip, "affine": _affine}  # in the order in which they are applied
