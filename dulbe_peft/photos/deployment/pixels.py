"""What an image processor does, in Pillow and numpy alone; model cards take the text of the functions."""

import inspect
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from dulbe_peft.data.decoding import managed, standard_rgb

SIZES = ((301, 200), (97, 331), (64, 64), (17, 23), (640, 481))
TOLERANCE = 1e-5


def rgb(image: Image.Image) -> Image.Image:
    """An image as the learner reads it: upright, in sRGB, over white where it is transparent."""
    return standard_rgb(ImageOps.exif_transpose(image))


# How an image is read, for a model card.
READS = "\n\n".join(inspect.getsource(one) for one in (managed, standard_rgb, rgb))


def pixel_values(image: Image.Image, steps: dict) -> np.ndarray:
    """One image as the model takes it, (3, height, width)."""
    image = rgb(image)
    size = steps["size"] or [steps["shortest_edge"] * side // min(image.size) for side in image.size]
    image = image.resize(size, steps["resample"])
    if steps["crop"]:
        left, top = [(side - part) // 2 for side, part in zip(image.size, steps["crop"], strict=True)]
        image = image.crop((left, top, left + steps["crop"][0], top + steps["crop"][1]))
    values = np.asarray(image, dtype=np.float32) * np.float32(steps["rescale"])
    return ((values - np.float32(steps["mean"])) / np.float32(steps["std"])).transpose(2, 0, 1)


def processor_steps(processor: Any) -> dict[str, Any] | None:
    """What `pixel_values` needs to do as an image processor of transformers does; None where it gives other values."""
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
            found = pixel_values(image, steps)
            if found.shape != expected.shape or np.abs(found - expected).max() > TOLERANCE:
                return None
    except (AttributeError, KeyError, TypeError, ValueError):  # settings of another kind of processor
        return None
    return steps
