"""One image file as an upright RGB image, and a quick look at its header.

Pillow gets a fixed list of formats. Without it, a PostScript file that is named like a photograph starts Ghostscript.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import threading
import warnings
from contextlib import nullcontext
from typing import IO, Any

import numpy as np
from PIL import ExifTags, Image, features

_SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jfif"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "AVIF": (".avif",),
    "HEIF": (".heic", ".heif"),
}
_OPTIONAL = {"WEBP", "AVIF", "HEIF"}  # not in every build of Pillow, and what phones write in a package of its own
_PRESENT = [name.upper() for name in features.get_supported_modules()]
try:
    from pillow_heif import register_heif_opener

    register_heif_opener()
    _PRESENT.append("HEIF")
except ImportError:
    pass
IMAGE_FORMATS = tuple(name for name in _SUFFIXES if name not in _OPTIONAL or name in _PRESENT)
IMAGE_SUFFIXES = tuple(suffix for name in IMAGE_FORMATS for suffix in _SUFFIXES[name])
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".rar", ".7z")


def why_not_read(suffix: str) -> str:
    """Why files with a suffix, in lower case, are left out."""
    if suffix in ARCHIVES:
        return "it is an archive: unzip it, and name the folder that comes out"
    if suffix in _SUFFIXES["HEIF"]:
        return f'{suffix} files of phones need a package: pip install "dulbe_peft[heic]"'
    return f"files ending in {suffix} are not read" if suffix else "a file without a suffix"


_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Pillow refuses images of more than twice `Image.MAX_IMAGE_PIXELS`, and warns from half of that on. The refusal is
# our limit: cameras of 100 million pixels exist. Damaged EXIF is no news either, where the pixels are whole. These
# filters stand behind the user's own.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning, append=True)
warnings.filterwarnings("ignore", message="Corrupt EXIF data", category=UserWarning, append=True)
_one_at_a_time = threading.Lock()
MOST_OBLONG = 100  # a processor that resizes the short side makes the long one as many times longer
_LARGE = 2**25  # pixels; of larger images, all processes that read images decode one at a time, and keep a smaller one
_one_large = multiprocessing.Lock()


def to_rgb(image: Image.Image) -> Image.Image:
    """An image in RGB and upright, as its EXIF tag says; alpha is dropped, 16-bit grey is scaled to 8 bits."""
    _check_shape(image)
    large = image.width * image.height > _LARGE
    with _one_large if large else nullcontext():
        image.load()  # Pillow turns a TIFF here by itself, and then forgets its tag
        turn = _UPRIGHT.get(_orientation(image))
        # A processor takes the colour that `info` names for transparent. `convert` leaves it there.
        plain = type(image) is Image.Image and image.mode == "RGB" and "transparency" not in image.info
        if plain and turn is None and not large:
            return image
        image = _converted(image)
        if large:
            image = image.reduce(math.ceil(math.sqrt(image.width * image.height / _LARGE)))
        if turn is not None:
            image = image.transpose(turn)
    image.info.clear()  # the tag, too: a second call must not turn the image again
    return image


def _check_shape(image: Image.Image) -> None:
    if max(image.size) > MOST_OBLONG * min(image.size):
        shape = f"{image.width} x {image.height}"
        raise ValueError(f"it is {shape} pixels large: no side may be more than {MOST_OBLONG} times the other")


def _converted(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) // 257).astype(np.uint8))
    if image.mode in ("I", "F"):  # 32 bits say nothing about where white is
        raise ValueError(f"pixels of mode {image.mode!r} have no fixed range; save it with 8 or 16 bits a channel")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow warns about the direct way
    return image.convert("RGB")


def _orientation(image: Image.Image) -> Any:
    try:
        return image.getexif().get(ExifTags.Base.Orientation)
    except Exception:  # damaged EXIF raises almost anything, and the pixels may be whole
        return None


def open_image(source: str | os.PathLike[str] | IO[bytes]) -> Image.Image:
    """Open a path or binary file with the decoders of `IMAGE_FORMATS` alone; decodes no pixel."""
    try:
        try:
            return Image.open(source, formats=IMAGE_FORMATS)
        except Warning:  # where a program makes errors of warnings, it must read the same images
            with _one_at_a_time, warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return Image.open(source, formats=IMAGE_FORMATS)
    except Image.DecompressionBombError as error:  # which is no ValueError
        raise ValueError(str(error)) from error


class UnreadableImageError(ValueError):
    """A stored image cannot be read; the message says why."""


def decode_image(source: str | os.PathLike[str] | IO[bytes]) -> Image.Image:
    """Open a path or binary file as an upright RGB image; of several frames, the first."""
    try:
        with open_image(source) as image:
            return to_rgb(image)
    except Exception as error:  # Pillow's decoders raise almost anything on damaged files
        raise UnreadableImageError(_reason(error, source)) from error


def image_problem(source: str | os.PathLike[str] | IO[bytes], in_full: bool = False) -> str | None:
    """Why an image cannot be read, as far as its header and its length say; None where they say that it can.

    A file that does not end as its format demands is decoded to be sure: it may be truncated, or have other data after
    the image. With `in_full` every file is decoded.
    """
    try:
        with open(source, "rb") if isinstance(source, (str, os.PathLike)) else nullcontext(source) as file:
            file.seek(0)
            image = open_image(file)
            _check_shape(image)
            if image.mode in ("I", "F"):
                to_rgb(image)  # raises, unless the file turns out to have another mode
            if in_full or not _is_whole(image, file):
                file.seek(0)
                open_image(file).load()
    except Exception as error:  # as in decode_image
        return _reason(error, source)
    return None


def _is_whole(image: Image.Image, file: IO[bytes]) -> bool:
    """Whether the file reaches to where its format says that it ends."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - 64))
    tail = file.read()
    file.seek(0)
    head = file.read(12)
    match image.format:
        case "JPEG" | "MPO":
            return tail.endswith(b"\xff\xd9")
        case "PNG":
            return tail.endswith(b"IEND\xaeB`\x82")
        case "GIF":
            return tail.endswith(b";")
        case "WEBP":
            return int.from_bytes(head[4:8], "little") + 8 <= size
        case "BMP":
            return 0 < int.from_bytes(head[2:6], "little") <= size
        case "TIFF":
            return _tiff_end(image) <= size
    return True


def _tiff_end(image: Any) -> int:
    """Where the last strip or tile of a TIFF ends, in bytes."""
    for offsets, counts in ((273, 279), (324, 325)):
        if offsets in image.tag_v2 and counts in image.tag_v2:
            return max(a + b for a, b in zip(image.tag_v2[offsets], image.tag_v2[counts]))
    return 2**63  # unknown: decode it


def _reason(error: Exception, source: Any) -> str:
    """An error in words that need no path, which the caller gives."""
    if isinstance(source, (str, os.PathLike)) and os.path.islink(source) and not os.path.exists(source):
        return f"{os.path.basename(source)} is a link to {os.readlink(os.fspath(source))}, which does not exist"
    suffix = os.path.splitext(source)[1].lower() if isinstance(source, (str, os.PathLike)) else ""
    if isinstance(error, Image.UnidentifiedImageError):
        if suffix in (*ARCHIVES, *_SUFFIXES["HEIF"]) and suffix not in IMAGE_SUFFIXES:
            return why_not_read(suffix)
        return f"it is none of the formats {', '.join(IMAGE_FORMATS)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
