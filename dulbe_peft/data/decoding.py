"""One image file as an upright RGB image, and a quick look at its header.

Pillow gets a fixed list of formats. Without it, a PostScript file that is named like a photograph starts Ghostscript.
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
from typing import IO, Any

import numpy as np
from PIL import ExifTags, Image, ImageCms, features

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
_INSTEAD = {  # what to do with files that hold pictures, and are not read
    "it is an archive: unzip it, and name the folder that comes out": ARCHIVES,
    "camera raw is not read: export JPEG files from the program that develops it": (
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
    "a table is not read here: --labels FILE reads labels from one": (".csv", ".tsv", ".jsonl"),
    "drawings and documents are not read: export PNG files": (".svg", ".psd", ".xcf", ".pdf"),
}
_LFS = b"version https://git-lfs"
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
READING = "2"  # goes up where the same file gives other pixels or another view: kept features are then made anew
MOST_OBLONG = 100  # a processor that resizes the short side makes the long one as many times longer
_LARGE = 2**25  # pixels; of larger images, all processes that read images decode one at a time, and keep a smaller one


class UnreadableImageError(ValueError):
    """A stored image cannot be read; the message says why."""


@cache
def image_formats() -> tuple[str, ...]:
    """The formats that are read: WEBP and AVIF are not in every build of Pillow, HEIF has a package of its own."""
    absent = {"WEBP", "AVIF", "HEIF"} - set(map(str.upper, features.get_supported_modules()))
    with suppress(ImportError):
        from pillow_heif import register_heif_opener

        register_heif_opener()
        absent.discard("HEIF")
    return tuple(name for name in _SUFFIXES if name not in absent)


@cache
def image_suffixes() -> tuple[str, ...]:
    """What the names of image files end in, in lower case."""
    return tuple(suffix for name in image_formats() for suffix in _SUFFIXES[name])


@cache
def one_at_a_time() -> Any:
    """A lock that processes share which are forked after the first call."""
    return multiprocessing.Lock()


def why_not_read(suffix: str) -> str:
    """Why files with a suffix, in lower case, are left out."""
    for why, suffixes in _INSTEAD.items():
        if suffix in suffixes:
            return why
    if suffix in _SUFFIXES["HEIF"]:
        return f'{suffix} files of phones need a package: pip install "dulbe_peft[heic]"'
    return f"a file ending in {suffix} is not read" if suffix else "without a suffix; if it is an image, give it one"


def to_rgb(image: Image.Image) -> Image.Image:
    """An image as `standard_rgb`, and upright, as its EXIF tag says."""
    if max(image.size) > MOST_OBLONG * min(image.size):
        shape = f"{image.width} x {image.height}"
        raise ValueError(f"it is {shape} pixels large: no side may be more than {MOST_OBLONG} times the other")
    large = image.width * image.height > _LARGE
    with one_at_a_time() if large else nullcontext():
        image.load()  # Pillow turns a TIFF here by itself, and then forgets its tag
        try:
            turn = _UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
        except Exception:  # damaged EXIF raises almost anything, and the pixels may be whole
            turn = None
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
    image.info.clear()  # the tag, too: a second call must not turn the image again
    return image


# The cards of exports take the text of the next two functions.
def standard_rgb(image: Image.Image) -> Image.Image:
    """An image in sRGB with 8 bits, over white where it is transparent; 16-bit grey is scaled."""
    if image.mode in ("I", "F"):  # 32 bits say nothing about where white is
        raise ValueError(f"pixels of mode {image.mode!r} have no fixed range; save it with 8 or 16 bits a channel")
    profile, grey = image.info.get("icc_profile"), image.mode[0] in "1LI"
    if image.mode.startswith("I;16"):
        values = np.asarray(image)
        values = np.where(values == image.info.get("transparency", -1), 65535, values)
        image = Image.fromarray((values // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    if profile:
        image = managed(image, profile, "CMYK" if image.mode == "CMYK" else "L" if grey else "RGB")
    image = image.convert("RGB")
    image.info.clear()  # else a processor may take a colour for transparent
    return image


def managed(image: Image.Image, profile: bytes, mode: str) -> Image.Image:
    """An image of an ICC profile in sRGB; as it is where that changes nothing, or the profile is not its own."""
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
    """Open a path or binary file with the decoders of `image_formats` alone; decodes no pixel."""
    return Image.open(source, formats=image_formats())


def stored_bytes(source: Source) -> bytes:
    """All bytes of a path or binary file."""
    try:
        if isinstance(source, (str, os.PathLike)):
            return Path(source).read_bytes()
        source.seek(0)
        return source.read()
    except OSError as error:
        raise UnreadableImageError(_reason(error, source)) from error


def decode_image(source: Source, content: bytes | None = None) -> Image.Image:
    """A path or binary file as an upright RGB image, from its bytes where they were read; of frames, the first."""
    content = stored_bytes(source) if content is None else content
    try:
        with open_image(io.BytesIO(content)) as image:
            return to_rgb(image)
    except Exception as error:  # Pillow's decoders raise almost anything on damaged files
        raise UnreadableImageError(_reason(error, source, content)) from error


def _reason(error: Exception, source: Any, content: bytes = b"") -> str:
    """An error in words that need no path, which the caller gives."""
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
            return "it is a pointer of Git LFS, and no image: `git lfs pull` fetches the image"
        return f"it is none of the formats {', '.join(image_formats())}"
    return (isinstance(error, OSError) and error.strerror) or str(error) or type(error).__name__
