"""Hold out images of each class, or draw some of them, by the content of the images."""

import hashlib
from collections.abc import Sequence
from numbers import Real

import numpy as np

from dulbe_peft.data.images import LabelledImages, labelled_images
from dulbe_peft.utils.settings import check_int


def hold_out(
    dataset: object, fraction: float, seed: int = 0, purpose: str = "test"
) -> tuple[LabelledImages, LabelledImages]:
    """Divide a data set into training images and held-out test images.

    A hash of the image's content and the seed decides where an image goes. File names, their order and the other
    images therefore do not matter: an image stays where it is when images are added, and copies within a class stay
    together. If the images have groups, the hash is that of the group, so all images of a group stay together. Every
    class keeps at least one training image. A class with two or more images, or groups, of which `fraction` is half an
    image or more, gets at least one test image, unless its groups are also those of other classes.

    Args:
        dataset: A data set with class names.
        fraction: About which share of each class's images to hold out; above 0 and below 1.
        seed: A different seed holds out different images.
        purpose: A different word holds out different images, independently of those held out for other purposes.

    Returns:
        The training images and the test images.

    Raises:
        ValueError: If `fraction` is not between 0 and 1, no class has enough images, or there are no class names.

    Example:
        >>> train, test = hold_out(ImageFolder("photos"), 0.2)
        >>> len(train), len(test)
        (97, 23)
    """
    if not isinstance(fraction, Real) or not 0 < fraction < 1:
        raise ValueError(
            f"fraction must be above 0 and below 1, got {fraction!r}: some images must remain to train on"
        )
    seed = check_int("seed", seed, 0)
    images = labelled_images(dataset)
    drawn, labels = _draws(images, seed, purpose), images.labels
    tested = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        order = members[np.argsort(drawn[members], kind="stable")]
        enough = int(len(members) > 1 and fraction * len(members) >= 0.5)
        count = int(np.clip((drawn[members] < fraction).sum(), enough, len(members) - 1))
        edge = drawn[order[count - 1]] if count else -1.0  # copies of an image were given the same number
        tested[members] = drawn[members] <= edge if (drawn[members] > edge).any() else drawn[members] < edge
    if images.groups is not None:  # a group of several classes that is held out of only some of them is trained on
        tested &= ~np.isin(images.groups, images.groups[~tested])
    if not tested.any():
        raise ValueError(f"no class has enough images to hold out {fraction} of them")
    return images.at(np.flatnonzero(~tested)), images.at(np.flatnonzero(tested))


def draw_per_class(images: LabelledImages, count: int | Sequence[int] | str, seed: int = 0) -> LabelledImages:
    """Return at most `count` images of each class.

    Several counts are assigned to the classes in turn. `longtail:32` keeps 32, 32 / 2, 32 / 3, ... images. The seed
    decides which class comes first.
    """
    seed = check_int("seed", seed, 0)
    drawn, labels = _draws(images, seed, "draw"), images.labels
    keys = [hashlib.sha256(f"{seed} classes\0{name}".encode()).digest() for name in images.class_names]
    kept = []
    for rank, label in enumerate(sorted(np.unique(labels).tolist(), key=keys.__getitem__)):
        if isinstance(count, str):
            number = max(1, int(count.removeprefix("longtail:")) // (rank + 1))
        else:
            counts = [count] if isinstance(count, int) else list(count)
            number = check_int("count", counts[rank % len(counts)], 1)
        members = np.flatnonzero(labels == label)
        kept.append(members[np.argsort(drawn[members], kind="stable")[:number]])
    return images.at(np.sort(np.concatenate(kept)))


def _draws(images: LabelledImages, seed: int, purpose: str) -> np.ndarray:
    """Return a number in [0, 1) for each image, (n,), computed from the seed, the purpose and the image's content."""
    if not images.class_names:
        raise ValueError("the dataset has no class names; give it an attribute class_names, a sequence of strings")
    keys = (
        images.contents()
        if images.groups is None or purpose == "draw"
        else [str(group).encode() for group in images.groups]
    )
    digests = (hashlib.sha256(f"{seed} {purpose}\0".encode() + (key or b"")) for key in keys)
    return np.array([int.from_bytes(digest.digest()[:8], "little") / 2**64 for digest in digests])
