"""Keep what commands need of a photograph besides the features, so that it is decoded only once.

A glance is made whenever an image file is decoded.
"""

import io
import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NamedTuple, Self

from PIL import ExifTags, Image

SIDE = 16  # width and height in pixels of the grey pictures that are compared
PICTURE_SIDE = 160  # pixels; a page shows pictures at half this size and enlarges them on a click
GLANCE_BYTES, MOST_BYTES = 2**13, 2**26  # about the size of one glance, and of all that a data set keeps


class Header(NamedTuple):
    """What the header of an image file says.

    Attributes:
        size: Width and height as stored, in pixels.
        pages: Number of pages of a TIFF; 1 for other formats.
        taken: When the photograph was taken, in seconds since 1970 by the camera's clock, or None.
    """

    size: tuple[int, int]
    pages: int
    taken: float | None


class Glance(NamedTuple):
    """What is kept of a decoded image: its header, 16 x 16 grey pixels as bytes, and a small JPEG."""

    header: Header
    grey: bytes
    picture: bytes

    def packed(self) -> bytes:
        """Return the glance as the feature store keeps it."""
        return json.dumps(self.header).encode() + b"\n" + self.grey + self.picture

    @classmethod
    def unpacked(cls, packed: bytes) -> Self:
        """Return the glance that `packed` has packed."""
        header, _, rest = packed.partition(b"\n")
        size, pages, taken = json.loads(header)
        return cls(Header(tuple(size), pages, taken), rest[: SIDE * SIDE], rest[SIDE * SIDE :])


class Glances(dict[int, tuple[Glance, object]]):
    """Glances by position, with the file's entry on the disk when it was read. Slices of a data set share them.

    Attributes:
        stored: Returns the glance that the feature store has of a content, or None.
    """

    stored: Callable[[bytes], Glance | None] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), ()  # other processes make their own


def pages_of(opened: Image.Image) -> int:
    """Return the number of pages of an open TIFF, or 1 for other formats."""
    return getattr(opened, "n_frames", 1) if opened.format == "TIFF" else 1


def time_taken(opened: Image.Image) -> float | None:
    """Return when a photograph was taken, in seconds since 1970 by the camera's clock, or None if EXIF lacks it."""
    try:
        exif = opened.getexif().get_ifd(ExifTags.IFD.Exif)
        text = str(exif[ExifTags.Base.DateTimeOriginal]).strip("\0 ")
        fraction = str(exif.get(ExifTags.Base.SubsecTimeOriginal, "")).strip("\0 ")
        time = datetime.strptime(text, "%Y:%m:%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
        return time + (float(f"0.{fraction}") if fraction.isdecimal() else 0.0)
    except Exception:  # there is no time, or Pillow raises almost anything on damaged EXIF
        return None


def glance_at(header: Header, image: Image.Image) -> Glance:
    """Return what is kept of an image, upright and in RGB."""
    picture = thumbnail(image)
    grey = (picture if max(image.size) > PICTURE_SIDE else image).convert("L")
    return Glance(header, grey.resize((SIDE, SIDE), Image.Resampling.BOX).tobytes(), as_jpeg(picture))


def as_jpeg(picture: Image.Image, quality: int = 80) -> bytes:
    """Return the bytes of a JPEG file."""
    packed = io.BytesIO()
    picture.save(packed, "JPEG", quality=quality)
    return packed.getvalue()


def thumbnail(image: Image.Image, side: int = PICTURE_SIDE) -> Image.Image:
    """Return an RGB image at most `side` pixels wide and high. Tiny images are enlarged to show their pixels."""
    factor = side // max(image.size)
    if factor > 1:
        width, height = image.size
        return image.resize((width * factor, height * factor), Image.Resampling.NEAREST)
    factor = max(image.size) // (2 * side)
    picture = image.reduce(factor) if factor > 1 else image.copy()
    picture.thumbnail((side, side))
    return picture
