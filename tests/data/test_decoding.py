"""Test decoding of image files to upright RGB images, and the errors for files that are not photographs."""

import importlib.util
import io
import multiprocessing
import re
import struct
import warnings
import zlib
from functools import cache
from unittest.mock import MagicMock

import numpy as np
import pytest
from PIL import EpsImagePlugin, ExifTags, Image, ImageCms, ImageOps

from dulbe_peft.data import decoding
from dulbe_peft.data.decoding import (
    UnreadableImageError,
    decode_file,
    decode_image,
    image_suffixes,
    to_rgb,
    why_not_read,
)
from dulbe_peft.data.folders import folder_content
from dulbe_peft.data.images import labelled_images
from dulbe_peft.data.unlabelled import as_image
from dulbe_peft.photos.deployment.graph import rgb

CORNERS = np.zeros((40, 60, 3), dtype=np.uint8)  # four quarters in different colours
CORNERS[:20, :30], CORNERS[:20, 30:], CORNERS[20:, :30] = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def tagged(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", ["jpg", "png", "tiff", "webp"])
def test_exif_orientation_is_applied_exactly_once(tmp_path, orientation, suffix):
    """The reference is Pillow's `exif_transpose`."""
    path = tmp_path / f"photo.{suffix}"
    Image.fromarray(CORNERS).save(path, exif=tagged(orientation))
    with Image.open(path) as opened:
        expected = np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    image = decode_image(path)
    assert np.array_equal(image, expected) and to_rgb(image) is image
    assert image.size == ((40, 60) if orientation >= 5 else (60, 40))
    with Image.open(path) as opened:  # an image passed directly, decoded or not
        assert np.array_equal(labelled_images([(opened, 0)])[0]["image"], expected)
        assert np.array_equal(to_rgb(opened), expected) and np.array_equal(to_rgb(to_rgb(opened)), expected)


def test_damaged_exif_does_not_change_the_pixels(tmp_path):
    Image.fromarray(CORNERS).save(tmp_path / "a.png", exif=b"Exif\0\0MM\0*\0\0\0\x08\xff\xff\x01\x12")
    assert np.array_equal(decode_image(tmp_path / "a.png"), CORNERS)


def test_code_in_export_cards_converts_images_like_the_learner():
    """A plain `convert` would turn 16-bit grey white, and would keep the note of a transparent colour."""
    noise = np.random.default_rng(0).integers(0, 65536, (9, 7), dtype=np.uint16)
    swapped, clear = Image.fromarray(CORNERS // 2 + 60), Image.new("RGBA", (9, 9), (0, 0, 0, 90))
    swapped.info["icc_profile"] = rotated_profile()
    photo = Image.fromarray(np.random.default_rng(3).integers(0, 256, (26, 20, 3), dtype=np.uint8))
    colours = photo.quantize(8)
    colours.info["transparency"] = 3
    plain = colours.convert("RGB")
    for image in (Image.fromarray(noise), colours, plain, photo.convert("LA"), swapped, clear):
        expected = to_rgb(image)
        assert rgb(image).tobytes() == expected.tobytes() and not rgb(image).info and not expected.info
    assert "transparency" in plain.info
    with pytest.raises(ValueError, match="8 or 16 bits"):
        rgb(Image.new("F", (2, 2)))


def test_orientation_in_xmp_is_ignored_as_browsers_do(tmp_path):
    packet = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    Image.fromarray(CORNERS).save(tmp_path / "a.jpg", xmp=packet, quality=95)
    with Image.open(tmp_path / "a.jpg") as opened:
        assert opened.getexif()[274] == 6, "Pillow reads it"
    for image in (decode_image(tmp_path / "a.jpg"), rgb(Image.open(tmp_path / "a.jpg"))):
        assert image.size == (60, 40) and abs(np.asarray(image).astype(int) - CORNERS).mean() < 9


def test_fourth_channel_without_a_meaning_is_not_alpha(tmp_path):
    """Alpha of 0 everywhere, as GDI programs write it, and a TIFF that does not declare its fourth sample as alpha."""
    four = np.dstack([CORNERS, np.zeros((40, 60), dtype=np.uint8)])
    Image.fromarray(four, "RGBA").save(tmp_path / "a.png")
    four[..., 3] = np.arange(60)
    Image.fromarray(four, "RGBA").save(tmp_path / "b.tiff")
    content = (tmp_path / "b.tiff").read_bytes()
    place = content.index(struct.pack("<HHI", 338, 3, 1))
    with Image.open(tmp_path / "b.tiff") as declared:
        assert np.asarray(to_rgb(declared))[30, 50].tolist() != [0, 0, 0], "declared alpha is blended with white"
    (tmp_path / "b.tiff").write_bytes(content[:place] + struct.pack("<H", 65000) + content[place + 2 :])
    for name in ("a.png", "b.tiff"):
        assert np.array_equal(decode_image(tmp_path / name), CORNERS)
        assert np.array_equal(rgb(Image.open(tmp_path / name)), CORNERS)


def test_first_page_of_a_tiff_that_is_no_reduced_copy_is_read(tmp_path):
    small, full, other = (Image.fromarray(CORNERS).resize(size) for size in ((6, 4), (60, 40), (30, 20)))
    small.encoderinfo, pages = {"tiffinfo": {254: 1}}, [full, other]
    small.save(tmp_path / "a.tiff", save_all=True, append_images=pages, tiffinfo={254: 1})
    content = bytearray((tmp_path / "a.tiff").read_bytes())
    tags = [m.start() for m in re.finditer(re.escape(struct.pack("<HHI", 254, 4, 1)), bytes(content))]
    for place in tags[1:]:
        content[place + 8 : place + 12] = b"\0" * 4
    (tmp_path / "a.tiff").write_bytes(content)
    assert len(tags) == 3 and decode_image(tmp_path / "a.tiff").size == (60, 40)
    full.save(tmp_path / "b.tiff", save_all=True, append_images=[small])
    assert decode_image(tmp_path / "b.tiff").size == (60, 40)


def test_jpeg_that_was_not_copied_completely_is_damaged(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    whole = io.BytesIO()
    Image.fromarray(noise).save(whole, "JPEG", exif=tagged(1))
    content = whole.getvalue()
    half = len(content) // 2
    (tmp_path / "a.jpg").write_bytes(content[:half] + b"\0" * (len(content) - half))
    with pytest.raises(UnreadableImageError, match=f"its last {len(content) - half} bytes are zero: the file was not"):
        decode_image(tmp_path / "a.jpg")
    expected = np.asarray(decode_image(io.BytesIO(content)))
    for padded in (content + b"\0" * 512, content + b"a motion photo" + b"\0" * 99):
        assert np.array_equal(decode_image(io.BytesIO(padded)), expected)


def test_postscript_file_never_starts_ghostscript(tmp_path, monkeypatch):
    started = []
    drawn = Image.new("RGB", (9, 9)).im
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: started.append(1) or drawn)
    content = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(ValueError, match="it is none of the formats JPEG, PNG"):
        decode_image(tmp_path / "a.jpg")
    assert not started
    with Image.open(tmp_path / "a.jpg") as image:  # without the list of formats, Pillow starts it
        image.load()
    assert started


def png_of(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jpg", b"", "it is an empty file"),
        ("a.png", png_of(60000, 60000), "3600000000 pixels. exceeds limit of 178956970 pixels"),
        # A processor that resizes the short side would turn this small file into 448,000,000 x 224 pixels.
        (
            "a.png",
            png_of(2_000_000, 1),
            "its size is 2000000 x 1 pixels: no side may be more than 100 times",
        ),
        ("a.tiff", None, "mode 'F' have no fixed range"),
    ],
)
def test_error_says_why_a_file_is_not_a_photograph(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_bytes(content) if content is not None else Image.new("F", (8, 8), 0.5).save(path)
    with pytest.raises(UnreadableImageError, match=words):
        decode_image(path)
    assert to_rgb(Image.new("RGB", (800, 8))).size == (800, 8)


def test_large_images_are_reduced_by_one_process_at_a_time(monkeypatch):
    """All processes share one lock, so that eight readers do not need 500 MB each."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8).repeat(2, axis=0).repeat(2, axis=1)
    lock = MagicMock()
    assert type(decoding.decoding_lock()) is type(multiprocessing.Lock())
    monkeypatch.setattr(decoding, "decoding_lock", lambda: lock)
    monkeypatch.setattr(decoding, "_LARGE", 24 * 16 // 4)
    for mode, turned in (("RGB", 1), ("RGB", 6), ("L", 1)):
        image = Image.fromarray(pixels).convert(mode)
        image.getexif()[274] = turned
        expected = np.asarray(Image.fromarray(pixels).convert(mode).convert("RGB"))[::2, ::2]
        assert np.array_equal(np.asarray(to_rgb(image)), np.rot90(expected, -1) if turned == 6 else expected)
    assert to_rgb(Image.fromarray(pixels[:8, :12])).size == (12, 8)
    assert lock.__enter__.call_count == lock.__exit__.call_count == 3


def test_image_with_100_million_pixels_raises_no_warning(recwarn):
    """The module's filters must also work in a program that shows all warnings."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        spec = importlib.util.find_spec(decoding.__name__)
        spec.loader.exec_module(importlib.util.module_from_spec(spec))  # appends its filters to the others
        assert decoding.open_image(io.BytesIO(png_of(10000, 10000))).size == (10000, 10000)
    assert not recwarn


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("mode", "colour", "suffix", "expected"),
    [
        ("L", 70, "png", [70, 70, 70]),
        ("LA", (70, 0), "png", [70, 70, 70]),
        ("LA", (70, 255), "png", [70, 70, 70]),
        ("RGBA", (1, 2, 3, 0), "png", [1, 2, 3]),
        ("RGBA", (0, 0, 0, 51), "webp", [204, 204, 204]),
        ("1", 1, "png", [255, 255, 255]),
        ("CMYK", (0, 255, 255, 0), "jpg", [255, 0, 0]),
        ("I;16", 65535 // 2, "png", [127, 127, 127]),
    ],
)
def test_every_mode_is_converted_to_rgb(tmp_path, mode, colour, suffix, expected):
    path = tmp_path / f"image.{suffix}"
    Image.new(mode, (8, 8), colour).save(path)
    image = decode_image(path)
    assert image.mode == "RGB" and np.asarray(image)[0, 0].tolist() == expected


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("clear", [True, False])
@pytest.mark.parametrize(("mode", "colour"), [("1", 0), ("L", 9), ("P", 0), ("RGB", (9, 9, 9)), ("I;16", 9)])
def test_transparent_colour_of_a_png_becomes_white(tmp_path, mode, colour, clear):
    """Every mode that may have a tRNS chunk is tested."""
    options = {"transparency": colour} if clear else {}
    Image.new(mode, (8, 8), colour).save(tmp_path / "icon.png", **options)
    assert (np.asarray(decode_image(tmp_path / "icon.png")) > 250).all() == clear


def rotated_profile() -> bytes:
    """Return the sRGB profile with its red and blue primaries exchanged."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    for old, new in ((b"rXYZ", b"#XYZ"), (b"bXYZ", b"rXYZ"), (b"#XYZ", b"bXYZ")):
        profile = profile.replace(old, new, 1)
    return profile


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp", "tiff"])
def test_colour_profile_is_converted_to_srgb(tmp_path, suffix):
    """The reference is Pillow's conversion. An sRGB profile and a broken one leave the pixels as they are."""
    pixels, srgb = CORNERS // 2 + 60, ImageCms.createProfile("sRGB")
    rotated = rotated_profile()  # made once, because a profile contains the time
    for profile in (rotated, ImageCms.ImageCmsProfile(srgb).tobytes(), b"no profile at all"):
        path = tmp_path / f"photo.{suffix}"
        Image.fromarray(pixels).save(path, icc_profile=profile, **({"lossless": True} if suffix == "webp" else {}))
        with Image.open(path) as opened:
            plain = opened.convert("RGB")
        expected = plain
        if profile == rotated:
            source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            expected = ImageCms.profileToProfile(plain, source, srgb, outputMode="RGB")
            assert np.abs(np.subtract(expected, plain, dtype=np.int16)).max() > 40
        image = decode_image(path)
        assert image.tobytes() == expected.tobytes() and not image.info and to_rgb(image) is image
    clear = Image.new("RGBA", (8, 8), (90, 0, 0, 0))
    clear.putpixel((0, 0), (255, 255, 255, 255))
    clear.save(tmp_path / "clear.png", icc_profile=rotated_profile())
    assert (np.asarray(decode_image(tmp_path / "clear.png")) == 255).all()


@pytest.mark.parametrize("values", [np.zeros((8, 8), np.uint16), np.zeros(8, np.uint8), np.zeros((2, 8, 8), np.uint8)])
def test_ambiguous_array_is_refused_as_an_image(values):
    with pytest.raises(ValueError, match="image 3 is an array of .*expected uint8 from 0 to 255"):
        as_image(3, values)


@pytest.mark.parametrize(
    ("suffix", "words"),
    [
        (".cr2", "camera raw is not read: export JPEG"),
        (".jxl", "convert the files to PNG or JPEG"),
        (".mov", "a video is not read: save some of its frames"),
        (".zip", "it is an archive"),
    ],
)
def test_unsupported_formats_are_refused_with_advice(tmp_path, suffix, words):
    path = tmp_path / f"a{suffix}"
    path.write_bytes(b"xyz")
    with pytest.raises(UnreadableImageError, match=words):
        decode_image(path)
    assert folder_content(tmp_path)[1] == [(str(path), why_not_read(suffix))]
    (tmp_path / "a.jpg").write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(UnreadableImageError, match="git lfs pull"):
        decode_image(tmp_path / "a.jpg")


def test_heic_is_read_if_pillow_heif_is_installed():
    assert (".heic" in image_suffixes()) == bool(importlib.util.find_spec("pillow_heif"))


@pytest.mark.parametrize("suffix", image_suffixes())
def test_every_listed_suffix_can_be_decoded(tmp_path, suffix):
    path = tmp_path / f"image{suffix.upper()}"
    frames = [Image.fromarray(CORNERS), Image.new("RGB", (60, 40), "blue")]
    several = {"save_all": True, "append_images": frames[1:]} if suffix == ".gif" else {}
    frames[0].save(path, {".jfif": "JPEG", ".jpe": "JPEG"}.get(suffix), **several)
    assert np.abs(np.asarray(decode_image(path))[4, 4] - (255.0, 0, 0)).max() < 99, "the first frame must be read"
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(UnreadableImageError):
        decode_image(path)


@cache
def photograph(mode="RGB", size=(1600, 1200)):
    """Return a smooth picture without symmetry, so that a wrong turn or scale would show."""
    width, height = size
    across, down = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    channels = [255 * across, 255 * down**2, 127 + 127 * np.sin(9 * across + 3 * down)]
    return Image.fromarray(np.stack(channels, axis=2).astype(np.uint8)).convert(mode)


@pytest.mark.plain("RGB-6-False", "CMYK-5-True", "L-8-True")
@pytest.mark.parametrize("progressive", [False, True])
@pytest.mark.parametrize(("mode", "orientation"), [("RGB", 1), ("RGB", 6), ("RGB", 3), ("L", 8), ("CMYK", 5)])
def test_large_jpeg_decoded_smaller_shows_the_same(mode, orientation, progressive):
    packed = io.BytesIO()
    settings = {"quality": 95, "exif": tagged(orientation), "progressive": progressive}
    photograph(mode).save(packed, "JPEG", **settings)
    whole, header = decode_file("", packed.getvalue())
    small, same = decode_file("", packed.getvalue(), 250)
    assert header == same and header.size == (1600, 1200)
    assert small.size == tuple(side // 4 for side in whole.size) and small.mode == "RGB"
    expected = np.asarray(whole.reduce(4)).astype(int)
    assert abs(np.asarray(small) - expected).mean() < 1 and abs(np.asarray(small) - expected).max() < 24
    with Image.open(packed) as opened:  # as exports read it
        assert np.array_equal(rgb(opened, 250), small)


@pytest.mark.parametrize(
    ("size", "side", "expected"),
    [
        ((1600, 1200), 150, (200, 150)),
        ((1600, 1200), 151, (400, 300)),
        ((1600, 1200), 600, (800, 600)),
        ((1600, 1200), 601, (1600, 1200)),
        ((1600, 1200), 0, (1600, 1200)),
        ((1604, 1204), 100, (401, 301)),  # no multiples of 8
        ((1602, 1204), 100, (801, 602)),
        ((1601, 1200), 100, (1601, 1200)),
    ],
)
def test_scale_leaves_enough_whole_pixels(size, side, expected):
    packed = io.BytesIO()
    photograph(size=size).save(packed, "JPEG")
    image, _ = decode_file("", packed.getvalue(), side)
    assert image.size == expected
    if expected == size:  # the same bits as without `side`
        assert image.tobytes() == decode_file("", packed.getvalue())[0].tobytes()


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "MPO"])
def test_only_jpeg_files_are_decoded_smaller(kind):
    packed = io.BytesIO()
    photograph().save(packed, kind, **({"save_all": True, "append_images": [photograph()]} if kind == "MPO" else {}))
    image, _ = decode_file("", packed.getvalue(), 150)
    assert image.size == ((200, 150) if kind == "MPO" else (1600, 1200))
