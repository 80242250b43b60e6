"""Decode an image file to an upright RGB image, or read only its header.

Pillow is given a fixed list of formats. Without it, a PostScript file named like a photograph would start Ghostscript.
"""

import io
import math
import multiprocessing
import os
import warnings
from contextlib import nullcontext, suppress
from functools import cache
from itertools import chain
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import IO, Any

import numpy as np
from PIL import ExifTags, Image, ImageCms, features

from dulbe_peft.data.glance import Header, pages_of, time_taken
from dulbe_peft.utils.extras import install_command

Source = str | os.PathLike[str] | IO[bytes]
_SUFFIXES = {
    "JPEG": (".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "AVIF": (".avif",),
    "HEIF": (".heic", ".heif"),
}
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".rar", ".7z")
_INSTEAD = {  # advice for files that contain pictures in formats that are not read
    "it is an archive: unpack it and pass the folder": ARCHIVES,
    "camera raw is not read: export JPEG files from your raw converter": (
        *(".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".raf", ".pef", ".srw"),
    ),
    "JPEG XL and JPEG 2000 are not read: convert the files to PNG or JPEG": (".jxl", ".jp2", ".j2k", ".jpx", ".jpf"),
    "a video is not read: save some of its frames as images": (
        ".mp4",
        ".mov",
        ".avi",
        ".mkv",
        ".webm",
        ".m4v",
        ".3gp",
    ),
    "a table is not an image: pass it as --labels FILE if it contains labels": (
        *(".csv", ".tsv", ".jsonl", ".json", ".xlsx", ".xlsm", ".xls", ".ods"),
    ),
    "drawings and documents are not read: export PNG files": (".svg", ".psd", ".xcf", ".pdf"),
}
_LFS = b"version https://git-lfs"
# Pillow refuses images of more than twice `Image.MAX_IMAGE_PIXELS` and warns above that number. Only the refusal is a
# limit here, because there are cameras with 100 million pixels. A warning about damaged EXIF does not help either if
# the pixels are intact. The filters are appended so that the user's filters take precedence.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning, append=True)
warnings.filterwarnings("ignore", message="Corrupt EXIF data", category=UserWarning, append=True)
READING = "3"  # increase it when the same file gives other pixels or another view, so that features are recomputed
MOST_OBLONG = 100  # limits the long side after a processor has resized the short one
_LARGE = 2**25  # pixels; to limit memory, larger images are decoded by one process at a time and then reduced


class UnreadableImageError(ValueError):
    """Raised when a stored image cannot be read; the message says why."""


@cache
def image_formats() -> tuple[str, ...]:
    """Return the formats that can be read: not every Pillow has WEBP and AVIF, and HEIF needs a separate package."""
    absent = {"WEBP", "AVIF", "HEIF"} - set(map(str.upper, features.get_supported_modules()))
    with suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()
        absent.discard("HEIF")
    return tuple(name for name in _SUFFIXES if name not in absent)


@cache
def image_suffixes() -> tuple[str, ...]:
    """Return the file suffixes of `image_formats`, in lower case."""
    return tuple(suffix for name in image_formats() for suffix in _SUFFIXES[name])


@cache
def decoding_lock() -> Any:
    """Return the lock for decoding large images. Processes forked after the first call share it."""
    # Such a lock has no name in the system, which a killed process would leave behind.
    return multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else None).Lock()


def why_not_read(suffix: str) -> str:
    """Return the reason why files with this suffix, in lower case, are not read."""
    for why, suffixes in _INSTEAD.items():
        if suffix in suffixes:
            return why
    if suffix in _SUFFIXES["HEIF"]:
        return f"{suffix} files need an extra package: {install_command('heic')}"
    return f"a file ending in {suffix} is not read" if suffix else "the name has no suffix; if it is an image, add one"


def to_rgb(image: Image.Image) -> Image.Image:
    """Convert an image with `standard_rgb` and turn it upright, as its EXIF orientation says."""
    if max(image.size) > MOST_OBLONG * min(image.size):
        shape = f"{image.width} x {image.height}"
        raise ValueError(f"its size is {shape} pixels: no side may be more than {MOST_OBLONG} times the other")
    large = image.width * image.height > _LARGE
    with decoding_lock() if large else nullcontext():
        image.load()  # for a TIFF, Pillow applies the orientation here and then drops the tag
        turn = turn_of(image)
        plain = (
            type(image) is Image.Image and image.mode == "RGB" and not {"transparency", "icc_profile"} & {*image.info}
        )
        if plain and turn is None and not large:
            return image
        image = standard_rgb(image)
        if large:
            image = image.reduce(math.ceil(math.sqrt(image.width * image.height / _LARGE)))
        if turn is not None:
            image = image.transpose(turn)
    image.info.clear()  # drop the orientation, so that a second call does not turn the image again
    return image


# The source of the next four functions is copied into the cards of exported models.
def decode_smaller(image: Image.Image, side: int) -> None:
    """Have a JPEG decoded at 1/8, 1/4 or 1/2 of its size if each side then has at least `side` pixels; 0: never.

    Both sides must be multiples of 8, 4 or 2: a part of a pixel at the border would change the proportions.
    """
    width, height = image.size
    for parts in (8, 4, 2):
        if min(width, height) >= parts * side > 0 and width % parts == height % parts == 0:
            image.draft(None, (width // parts, height // parts))
            return


def turn_of(image: Image.Image) -> Image.Transpose | None:
    """Return how to turn an image as its EXIF orientation says. Browsers ignore the one in XMP, which Pillow reads."""
    info = image.info
    image.info = {key: value for key, value in info.items() if key not in ("xmp", "XML:com.adobe.xmp")}
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # damaged EXIF raises almost anything, and the pixels may be intact
        return None
    finally:
        image.info = info
    turns = ["FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"]
    return Image.Transpose[turns[orientation - 2]] if orientation in range(2, 9) else None


def standard_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to 8-bit sRGB; transparent pixels are blended with white, and 16-bit grey is scaled.

    Some programs write a fourth channel without a meaning: alpha that is 0 everywhere, or not declared by a TIFF.
    """
    if image.mode in ("I", "F"):  # 32-bit modes do not define which value is white
        raise ValueError(f"pixels of mode {image.mode!r} have no fixed range; save it with 8 or 16 bits per channel")
    profile, grey = image.info.get("icc_profile"), image.mode[0] in "1LI"
    if image.mode.startswith("I;16"):
        values = np.asarray(image)
        values = np.where(values == image.info.get("transparency", -1), 65535, values)
        image = Image.fromarray((values // 257).astype(np.uint8))
    extra_samples = 338  # the tag with which a TIFF declares its fourth channel as alpha
    if image.has_transparency_data and extra_samples in getattr(image, "tag_v2", (extra_samples,)):
        unused = "A" in image.getbands() and image.getchannel("A").getextrema() == (0, 0)
        image = image.convert("RGBA")
        if not unused:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if profile:
        image = managed(image, profile, "CMYK" if image.mode == "CMYK" else "L" if grey else "RGB")
    image = image.convert("RGB")
    image.info.clear()  # otherwise a processor may treat a colour as transparent
    return image


def managed(image: Image.Image, profile: bytes, mode: str) -> Image.Image:
    """Convert an image from its ICC profile to sRGB, unless the profile has no effect or does not fit the mode."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if source.profile.xcolor_space.strip() != {"L": "GRAY"}.get(mode, mode):
            return image
        transform = ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
        cube = 51 * np.indices((6, 6, 6), dtype=np.uint8).reshape(3, 1, 216).transpose(1, 2, 0)
        colours = Image.fromarray(cube).convert(mode)
        change = np.asarray(transform.apply(colours)).astype(np.int16) - np.asarray(colours.convert("RGB"))
        return image if abs(change).max() <= 2 else transform.apply(image.convert(mode))
    except (OSError, ImageCms.PyCMSError):  # the profile is damaged
        return image


def open_image(source: Source) -> Image.Image:
    """Open a path or binary file with the decoders of `image_formats` only, without decoding pixels.

    Of a TIFF's pages, it is the first that is no reduced copy of another one.
    """
    _check_regular(source)
    image: Any = Image.open(source, formats=image_formats())
    if image.format == "TIFF" and _is_reduced(image):
        for page in range(image.n_frames):
            image.seek(page)
            if not _is_reduced(image):
                return image
        image.seek(0)
    return image


def _is_reduced(image: Any) -> bool:
    """Return whether the current page of a TIFF is a reduced copy of another one, by its tag NewSubfileType."""
    return bool(image.tag_v2.get(254, 0) & 1)


def stored_bytes(source: Source) -> bytes:
    """Return all bytes of a path or binary file."""
    try:
        _check_regular(source)
        if isinstance(source, (str, os.PathLike)):
            return Path(source).read_bytes()
        source.seek(0)
        return source.read()
    except OSError as error:
        raise UnreadableImageError(_reason(error, source)) from error


def _check_regular(source: Source) -> None:
    """Raise an error for the path of a pipe, a device or a socket, which would be read for ever."""
    if isinstance(source, (str, os.PathLike)) and not S_ISREG(mode := os.stat(source).st_mode) and not S_ISDIR(mode):
        raise UnreadableImageError("it is a pipe, a device or a socket, expected a file")


def decode_image(source: Source) -> Image.Image:
    """Decode the first frame of a path or binary file to an upright RGB image."""
    return decode_file(source, stored_bytes(source))[0]


def header_of_file(source: Source) -> Header:
    """Return what the header of a path or binary file says."""
    with open_image(source) as opened:
        return Header(opened.size, pages_of(opened), time_taken(opened))


def decode_file(source: Source, content: bytes, side: int = 0) -> tuple[Image.Image, Header]:
    """Decode the first frame of an image file with the bytes `content` to an upright RGB image; return its header too.

    `side` is that of `decode_smaller`.
    """
    if zeros := _missing(content):
        raise UnreadableImageError(f"its last {zeros} bytes are zero: the file was not copied completely")
    try:
        with open_image(io.BytesIO(content)) as image:
            size, pages = image.size, pages_of(image)
            decode_smaller(image, side)
            rgb = to_rgb(image)
            return rgb, Header(size, pages, time_taken(image))  # Pillow would remember the orientation in XMP earlier
    except Exception as error:  # Pillow's decoders raise almost anything on damaged files
        raise UnreadableImageError(_reason(error, source, content)) from error


def _missing(content: bytes) -> int:
    """Return the number of zeros at the end of a JPEG whose picture does not end before them, otherwise 0.

    A copy that was broken off often has the right size. Decoders fill the missing part with grey, without an error.
    """
    zeros = len(content) - len(content.rstrip(b"\0"))
    if zeros < 16 or content[:2] != b"\xff\xd8":
        return 0
    place = 2
    while content[place : place + 1] == b"\xff" and content[place + 1] != 0xDA:  # until the start of the pixels
        place += 2 + int.from_bytes(content[place + 2 : place + 4])
    return 0 if b"\xff\xd9" in content[place:] else zeros


def _reason(error: Exception, source: Any, content: bytes = b"") -> str:
    """Describe an error without the path, which the caller adds."""
    path = os.fspath(source) if isinstance(source, (str, os.PathLike)) else ""
    if os.path.islink(path) and not os.path.exists(path):
        return f"{os.path.basename(path)} is a link to {os.readlink(path)}, which does not exist"
    if isinstance(error, Image.UnidentifiedImageError):
        suffix = os.path.splitext(path)[1].lower()
        if suffix in chain(_SUFFIXES["HEIF"], *_INSTEAD.values()) and suffix not in image_suffixes():
            return why_not_read(suffix)
        if os.path.isfile(path) and not os.path.getsize(path):
            return "it is an empty file"
        if content.startswith(_LFS):
            return "it is a Git LFS pointer, not an image: run `git lfs pull` to fetch the image"
        return f"it is none of the formats {', '.join(image_formats())}"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
