"""Preprocess images as an image processor does, with only Pillow and numpy; model cards quote these functions."""

import inspect
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from dulbe_peft.data.decoding import managed, standard_rgb

SIZES = ((301, 200), (97, 331), (64, 64), (17, 23), (640, 481))
TOLERANCE = 1e-5


def rgb(image: Image.Image) -> Image.Image:
    """Return an image as the learner reads it: upright, in sRGB, over white where it is transparent."""
    return standard_rgb(ImageOps.exif_transpose(image))


# The source of the functions that read an image, for model cards.
READS = "\n\n".join(inspect.getsource(function) for function in (managed, standard_rgb, rgb))


def pixel_values(image: Image.Image, steps: dict) -> np.ndarray:
    """Return the model's input for an image, float32, (3, height, width)."""
    image = rgb(image)
    size = steps["size"] or [steps["shortest_edge"] * side // min(image.size) for side in image.size]
    image = image.resize(size, steps["resample"])
    if steps["crop"]:
        left, top = [(side - part) // 2 for side, part in zip(image.size, steps["crop"], strict=True)]
        image = image.crop((left, top, left + steps["crop"][0], top + steps["crop"][1]))
    values = np.asarray(image, dtype=np.float32) * np.float32(steps["rescale"])
    return ((values - np.float32(steps["mean"])) / np.float32(steps["std"])).transpose(2, 0, 1)


def processor_steps(processor: Any) -> dict[str, Any] | None:
    """Return the `steps` with which `pixel_values` reproduces a transformers processor, or None if it cannot."""
    image_processor = processor.image_processor
    try:
        settings = image_processor.to_dict()
        size, crop = settings["size"], settings.get("crop_size") or {}
        steps = {
            "size": [size["width"], size["height"]] if "width" in size else None,
            "shortest_edge": size.get("shortest_edge"),
            "resample": int(settings["resample"]),
            "crop": [crop["width"], crop["height"]] if settings.get("do_center_crop") else None,
            "rescale": settings["rescale_factor"],
            "mean": list(settings["image_mean"]),
            "std": list(settings["image_std"]),
        }
        random = np.random.default_rng(0)
        for width, height in SIZES:
            image = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
            expected = np.asarray(image_processor(images=image, return_tensors="np")["pixel_values"][0])
            values = pixel_values(image, steps)
            if values.shape != expected.shape or np.abs(values - expected).max() > TOLERANCE:
                return None
    except (AttributeError, KeyError, TypeError, ValueError):  # the processor has different settings
        return None
    return steps
