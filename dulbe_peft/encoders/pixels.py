"""A dataset's images as the model takes them."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset, get_worker_info

from dulbe_peft.data.decoding import UnreadableImageError, to_rgb
from dulbe_peft.data.samples import item_name, read_sample
from dulbe_peft.encoders.loading import ImageOnlyProcessor, image_size, pixel_values

IMAGE_RESIZES = ("crop", "squash")


def with_image_resize(processor: Any, model: Any, resize: str) -> Any:
    """A processor like this one that brings images to the model's size in another way.

    Args:
        processor: the processor of a CLIP.
        model: the model.
        resize: "crop" resizes the short side and crops the centre; "squash" resizes the whole image to a square.

    Raises:
        ValueError: `resize` is something else, or the image processor cannot crop.
    """
    if resize not in IMAGE_RESIZES:
        raise ValueError(f"image_resize must be one of {', '.join(IMAGE_RESIZES)}, got {resize!r}")
    old, size = processor.image_processor, image_size(model)
    if not hasattr(old, "do_center_crop"):
        raise ValueError(f"image_resize is {resize!r}, but {type(old).__name__} cannot crop: leave it out")
    square, crop = {"height": size, "width": size}, resize == "crop"
    new = type(old).from_dict(
        old.to_dict()
        | {"do_resize": True, "do_center_crop": crop, "size": {"shortest_edge": size} if crop else square}
        | {"crop_size": square}
    )
    if isinstance(processor, ImageOnlyProcessor):
        return ImageOnlyProcessor(new)
    return type(processor)(image_processor=new, tokenizer=processor.tokenizer)


class PixelDataset(Dataset[tuple[torch.Tensor, int, int]]):
    """A dataset's images as pixel values with label and index, kept in memory while they fit.

    Args:
        dataset: len and getitem of {"image", "label"} dicts or (image, label) pairs.
        labels: label of each image, (n,), which must be the item's own; None: -1.
        processor: has an `image_processor`.
        image_size: height and width in pixels that the model takes.
        cache_bytes: how much to keep at most.
    """

    def __init__(self, dataset: Any, labels: Any, processor: Any, image_size: int, cache_bytes: int) -> None:
        self.dataset = dataset
        self.labels = labels
        self.processor = processor
        self.image_size = image_size
        self.cache_bytes = cache_bytes
        self.cache: dict[int, torch.Tensor] | None = {} if cache_bytes else None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        pixels = self.cache.get(index) if self.cache is not None else None
        if pixels is None:
            try:
                image, label = read_sample(self.dataset, index)
                self._check_label(index, label)
                if isinstance(image, Image.Image):
                    image = to_rgb(image)
                pixels = pixel_values(self.processor, image)
                if pixels.shape[1:] != (self.image_size, self.image_size):
                    size = f"{self.image_size} x {self.image_size}"
                    raise ValueError(f"it is {tuple(pixels.shape)} pixels large, the model takes {size}")
            except UnreadableImageError:  # it says all, with the place in the whole data set
                raise
            except Exception as error:
                # A process that reads images hands its errors on by pickle, and not every class of errors can be.
                expected = isinstance(error, (TypeError, ValueError, OSError))
                if not expected and get_worker_info() is None:
                    raise
                kind = "" if expected else f"{type(error).__name__}: "
                name = item_name(self.dataset, index)
                raise ValueError(f"image {index} ({name}) cannot be preprocessed: {kind}{error}") from error
            if self.cache is not None:
                if pixels.nbytes * len(self) <= self.cache_bytes:
                    self.cache[index] = pixels
                else:
                    self.cache = None
        return pixels, -1 if self.labels is None else int(self.labels[index]), index

    def _check_label(self, index: int, label: int) -> None:
        """Raise where the item itself says another label than the data set's list of labels does."""
        if self.labels is not None and label != int(self.labels[index]):
            raise ValueError(
                f"its own label is {label}, but the dataset's list of labels says {int(self.labels[index])}; "
                "make both the same"
            )


UNREADABLE = -2


class ReadableImages(Dataset[tuple[torch.Tensor, int, int]]):
    """A data set's images; one that cannot be read is black, and its label is `UNREADABLE`.

    Args:
        images: the images, which raise a ValueError for one that cannot be read.
    """

    def __init__(self, images: PixelDataset) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        try:
            return self.images[index]
        except ValueError:
            return torch.zeros(3, self.images.image_size, self.images.image_size), UNREADABLE, index

    def reason(self, index: int) -> str:
        """Why an image cannot be read: the first error, without those that add where it happened."""
        try:
            self.images[index]
        except ValueError as error:
            first: BaseException = error
            while first.__cause__ is not None:
                first = first.__cause__
            return str(first)
        return "it could not be read the first time"
