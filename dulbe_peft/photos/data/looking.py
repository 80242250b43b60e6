"""Look at the images of a data set: find those that cannot be read, are blank, or are copies of others.

This is the only place where the application looks at pictures before they are encoded.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tqdm.auto import tqdm

from dulbe_peft.data.columns import times_in
from dulbe_peft.data.glance import SIDE
from dulbe_peft.data.images import LabelledImages, labelled_images
from dulbe_peft.photos.data.inventory import ALIKE, Duplicate, Found, Inventory, Picture, Pictures
from dulbe_peft.utils import processes
from dulbe_peft.utils.terminal import counted, printable

SAMPLE = 32  # how many images are checked for being blank when not all pictures are compared
# Two pictures with a higher correlation show the same. Among 85 million pairs of different photographs and of
# different handwritten characters, no correlation was above 0.986. It is above 0.99 for 99 of 100 copies that are
# JPEGs of quality 50, have half the size or a third more contrast, and for 95 of 100 that are a fifth brighter.
NEAR = 0.99
_ROWS = 1024  # number of pictures compared with all others in one product
DARK = "nearly black, as 12-bit pixels stored in 16 bits look: scale them"
PAGES = "one page of a file with several pages; the others are not read"
FLAT = "of one flat colour (transparent pixels are read as white)"
SAME = "the same picture as another image, in a different file"
Look = Callable[[LabelledImages], Mapping[int, str]]  # returns index -> reason for unreadable images


def undecodable(
    images: LabelledImages, read: Callable[[int], object] | None = None, progress: bool = True
) -> dict[int, str]:
    """Return index -> reason for the stored images that cannot be decoded, by `read` if it is given.

    In a terminal, a bar shows the progress after a second.
    """
    read = read or images.glance

    def problem(index: int) -> str | None:
        try:
            read(index)
        except Exception as error:  # decoders raise almost anything, and so do libraries that read a damaged table
            return str(error)
        return None

    hidden = None if progress and processes.world()[0] == 0 else True  # None shows the bar only in a terminal
    with ThreadPoolExecutor() as pool:  # decoders release Python's lock, and reading waits for the disk
        problems = pool.map(problem, range(len(images)))
        bar = tqdm(problems, "read", len(images), unit=" images", delay=1.0, leave=False, disable=hidden)
        return {index: why for index, why in enumerate(bar) if why is not None}


def inspect_images(dataset: object, split: str | None = None) -> Inventory:
    """Count the images of a data set, and decode all of them to find those that cannot be read.

    Args:
        dataset: Any data set that can be trained on. Images without a file, as in a list of tensors, are not decoded.
        split: The name for the data set in the table. If None, this is the data set's `split`, or "images".

    Raises:
        TypeError: If `dataset` is not a data set.
        ValueError: If its labels are invalid.
    """
    images = labelled_images(dataset)
    parts = {split or images.split or "images": images}
    return Inventory(count_images(parts), unreadable(parts), left_out=[*images.left_out])


def count_images(parts: Mapping[str, LabelledImages]) -> dict[str, dict[str, int]]:
    """Return split -> class -> number of images. Classes without a name are called by their label's number."""
    counts = {}
    for split, images in parts.items():
        names = images.class_names or tuple(map(str, range(int(images.labels.max(initial=-1)) + 1)))
        counts[split] = dict(zip(names, np.bincount(images.labels, minlength=len(names)).tolist()))
    return counts


def unreadable(parts: Mapping[str, LabelledImages], look: Look | None = None) -> list[tuple[Found, str]]:
    """Return the unreadable images with reasons. `look` finds them; by default, all images are decoded."""
    found = []
    for split, images in parts.items():
        problems = (look or undecodable)(images) if images.stored else {}
        found += [(_locate(split, images, index), problems[index]) for index in sorted(problems)]
    return found


def find_duplicates(parts: Mapping[str, LabelledImages], pictures: Pictures | None = None) -> list[Duplicate]:
    """Return the pairs of images with the same content, within and across splits, and near copies given `pictures`.

    Args:
        parts: Split -> images.
        pictures: What was seen of all images. Near copies are found by comparing them.
    """
    images = [(split, part, index) for split, part in parts.items() for index in range(len(part))]
    first, pairs = dict[bytes, int](), dict[tuple[int, int], str]()
    for number, content in enumerate(content for part in parts.values() for content in part.contents()):
        # The content of an unreadable image is None; the inventory lists it with the reason.
        if content is not None and first.setdefault(content, number) != number:
            pairs[first[content], number] = ALIKE[0]
    stored = [number for number, (split, _, index) in enumerate(images) if (split, index) in (pictures or {})]
    greys = [(pictures or {})[images[number][0], images[number][2]].grey for number in stored]
    for pair in _alike(stored, np.array(greys)):
        a, b = (np.asarray(part.image(index)) for _, part, index in (images[number] for number in pair))
        pairs.setdefault(pair, ALIKE[1] if np.array_equal(a, b) else ALIKE[2])
    return [Duplicate(_locate(*images[a]), _locate(*images[b]), how) for (a, b), how in sorted(pairs.items())]


def _locate(split: str, images: LabelledImages, index: int) -> Found:
    label = images.labels[index]
    name = images.class_names[label] if images.class_names else str(label)
    return Found(split, index, images.item_name(index), name)


def picture_of(images: LabelledImages, index: int) -> Picture:
    """Look at an image: 16 x 16 grey pixels, or zeros if it cannot be read, and its size."""
    zeros = np.zeros(SIDE * SIDE, dtype=np.float32)
    try:
        (size, pages, _), grey, _ = images.glance(index)
    except Exception:  # Pillow's decoders raise almost anything on damaged files
        return Picture(zeros, "", (0, 0))
    pixels = np.frombuffer(grey, dtype=np.uint8).astype(np.float32)
    centred = pixels - pixels.mean()
    length = np.linalg.norm(centred)
    blank = DARK if pixels.max() < 16 else FLAT if np.ptp(pixels) <= 1 else PAGES if pages > 1 else ""
    # Nearly blank images would correlate with each other by chance, so they are zeros and match nothing.
    return Picture(centred / length if length > SIDE else zeros, blank, size)


def look_at(parts: Mapping[str, LabelledImages], most: int | None = None) -> Pictures:
    """Look at the stored images, or at `most` of them at equal distances; return the pictures by split and index."""
    keys = [(split, index) for split, part in parts.items() if part.stored for index in range(len(part))]
    if most is not None and len(keys) > most:
        keys = [keys[number] for number in np.linspace(0, len(keys) - 1, most, dtype=int)]
    with ThreadPoolExecutor() as pool:
        return dict(zip(keys, pool.map(lambda key: picture_of(parts[key[0]], key[1]), keys), strict=True))


def times_taken(images: LabelledImages) -> list[float | None]:
    """Return when each image was taken, in seconds since 1970, or None if that is not known.

    It is the time in the table of the images, if it has one, as in Camtrap DP and Timelapse, or else that of the
    camera's clock in the EXIF.
    """

    def taken(index: int) -> float | None:
        try:
            return images.header(index).taken
        except Exception:  # Pillow raises almost anything on damaged files
            return None

    known = times_in(images.columns)
    if known is not None:
        times = [known[position] for position in images.indices.tolist()]
        return [taken(index) if time is None else time for index, time in enumerate(times)]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(taken, range(len(images)))) if images.stored or images.by_path else [None] * len(images)


def blank_lines(parts: Mapping[str, LabelledImages], pictures: Pictures, least: int = 1) -> list[str]:
    """Return a sentence for each kind of blank or repeated picture of which there are at least `least` images."""
    kinds: dict[str, list[str]] = {}
    seen = dict[bytes, bytes | None]()
    for (split, index), (grey, blank, _) in pictures.items():
        part = parts[split]
        if not blank and least > 1 and grey.any():  # with `least` 1, `find_duplicates` reports repeated pictures
            (content,) = part.at([index]).contents()
            blank = SAME if seen.setdefault(grey.tobytes(), content) != content else ""
        kinds.setdefault(blank, []).append(part.item_name(index))
    kinds.pop("", None)
    sample = f"{len(pictures)} of the images were examined; " if least > 1 else ""
    return [
        f"{sample}{counted(len(names), 'image')} {'is' if len(names) == 1 else 'are'} {why}, "
        f"such as {printable(names[0])}"
        for why, names in kinds.items()
        if len(names) >= least
    ]


def _alike(numbers: Sequence[int], greys: np.ndarray) -> Iterator[tuple[int, int]]:
    """Pair each image's number with the first one whose grey pixels, a row of (n, 256), are nearly the same."""
    for start in range(0, len(numbers), _ROWS):
        close = np.triu(greys[start : start + _ROWS] @ greys[start:].T > NEAR, 1)
        firsts = {int(b): int(a) for a, b in np.argwhere(close)[::-1]}
        yield from ((numbers[start + a], numbers[start + b]) for b, a in firsts.items())
