"""The images of an opened source, and its steps: leave out, group, hold out, compare, rename and draw images.

Images are held out and drawn by their content; `grouping` says which of them belong together.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from dulbe_peft.data.images import LabelledImages, labelled_images
from dulbe_peft.photos.data import looking
from dulbe_peft.photos.data.grouping import Parts, grouped, in_one_group
from dulbe_peft.photos.data.inventory import Inventory
from dulbe_peft.utils.settings import check_int
from dulbe_peft.utils.terminal import counted


class Opened(NamedTuple):
    """The training images, the test images or None, and the inventory of both; each step returns a changed one."""

    train: LabelledImages
    test: LabelledImages | None
    inventory: Inventory  # of the images before any were drawn

    @classmethod
    def of(cls, parts: Parts, left_out: Sequence[tuple[str, str]] = (), notes: Sequence[str] = ()) -> "Opened":
        """Return the images of one or two splits, with the files that were left out and notes on guesses."""
        skipped = [*left_out, *(row for images in parts.values() for row in images.left_out)]
        inventory = Inventory(looking.count_images(parts), left_out=list(dict.fromkeys(skipped)), notes=[*notes])
        train, *tests = parts.values()
        return cls(train, tests[0] if tests else None, inventory)

    @property
    def parts(self) -> dict[str, LabelledImages]:
        """The images by the names of their splits."""
        both = zip(self.inventory.counts, (self.train, self.test), strict=False)
        return {split: images for split, images in both if images is not None}

    def _with(self, parts: Parts, **found: Any) -> "Opened":
        train, *tests = parts.values()
        return Opened(train, tests[0] if tests else None, replace(self.inventory, **found))

    def readable(self, name: str, strict: bool, look: looking.Look | None = None) -> "Opened":
        """Leave out unreadable images, see `looking.unreadable`; if `strict`, an error calls the data `name`."""
        problems = looking.unreadable(self.parts, look)
        bad = {split: [image.place for image, _ in problems if image.split == split] for split in self.parts}
        kept = {n: images.at(np.setdiff1d(np.arange(len(images)), bad[n])) for n, images in self.parts.items()}
        opened = self._with(kept, unreadable=problems)
        if problems and strict:
            first = f"{len(problems)} of the images in {name} cannot be read:"
            advice = "repair or remove them, or leave them out by omitting --strict (strict=False in Python)"
            raise ValueError("\n".join([first, *opened.inventory.unreadable_lines(), advice]))
        return opened

    def grouped(self, group: str | None, seconds: float | None) -> "Opened":
        """Give the images their groups, see the function `grouped`; other columns of the data are dropped."""
        timed = {} if seconds is None else {split: looking.times_taken(images) for split, images in self.parts.items()}
        parts, names, notes = grouped(self.parts, group, seconds, timed)
        named = {
            int(number): key
            for split, of in names.items()
            if (numbers := parts[split].groups) is not None
            for number, key in zip(numbers, of, strict=True)
            if key is not None
        }
        first = next(iter(names), None)
        single = [] if first is None else in_one_group(parts[first], names[first])
        for images in parts.values():
            images.columns = {}  # a table of a million rows would travel to every worker that reads images
        return self._with(parts, notes=[*self.inventory.notes, *notes], group_names=named, single=single)

    def held_out(self, fraction: float, split: str) -> "Opened":
        """Hold out a share of the training images as the test split, which is called `split`."""
        train, test = hold_out(self.train, fraction)
        parts = {next(iter(self.inventory.counts)): train, split: test}
        notes = [*self.inventory.notes]
        if train.groups is not None and test.groups is not None and (n := len({*train.groups} & {*test.groups})):
            notes.append(f"{counted(n, 'group')} in training and test images, with the only images of some class")
        return self._with(parts, counts=looking.count_images(parts), notes=notes)

    def compared(self, every: bool) -> "Opened":
        """Count the readable images, and find duplicates and blank images.

        Copies of a file are always found. Pictures are compared with each other if `every` is true; otherwise a
        sample of them is checked for being blank.
        """
        parts = self.parts
        pictures = looking.look_at(parts, None if every else looking.SAMPLE)
        return self._with(
            parts,
            counts=looking.count_images(parts),
            blank=looking.blank_lines(parts, pictures, 1 if every else max(3, len(pictures) // 8)),
            pictures=pictures,
            duplicates=looking.find_duplicates(parts, pictures if every else None),
        )

    def renamed(self, file: str) -> "Opened":
        """Rename the classes as a file of names says."""
        test = None if self.test is None else self.test.renamed(file)
        return self._replace(train=self.train.renamed(file), test=test)

    def drawn(
        self,
        validation_fraction: float | None,
        images_per_class: int | Sequence[int] | str | None,
        test_images_per_class: int | None,
        seed: int,
    ) -> "Opened":
        """Test on a share of the training images instead, and draw images of each class; None draws nothing."""
        train, test = self.train, self.test
        if validation_fraction is not None:
            train, test = hold_out(train, validation_fraction, seed, "validation")
        if images_per_class is not None:
            train = draw_per_class(train, images_per_class, seed)
        if test_images_per_class is not None:
            if test is None:
                raise ValueError(f"test_images_per_class is {test_images_per_class}, but there are no test images")
            test = draw_per_class(test, test_images_per_class, seed)
        return self._replace(train=train, test=test)


def hold_out(
    dataset: object, fraction: float, seed: int = 0, purpose: str = "test"
) -> tuple[LabelledImages, LabelledImages]:
    """Divide a data set into training images and held-out test images.

    A hash of the image's content and the seed decides where an image goes. File names, their order and the other
    images therefore do not matter: an image stays where it is when images are added, and copies within a class stay
    together. If the images have groups, the hash is that of the group, so all images of a group stay together. Every
    class keeps at least one training image. A class with two or more images, or groups, of which `fraction` is half an
    image or more, gets at least one test image, unless its groups are also those of other classes. If each group has
    the only images of some class, these images are trained on, and the others of their group may be held out.

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
        whole = tested & ~np.isin(images.groups, images.groups[~tested])
        if not whole.any():  # so that a site can be tested although it has the only images of some class
            members = zip(labels.tolist(), images.groups.tolist(), strict=True)
            places = np.bincount([label for label, _ in set(members)], minlength=len(images.class_names))
            whole = tested & ~np.isin(images.groups, images.groups[~tested & (places[labels] > 1)])
        tested = whole
    if not tested.any():
        groups = "" if images.groups is None else ", or enough groups"
        raise ValueError(f"no class has enough images{groups} to hold out {fraction} of them")
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
    groups = None if purpose == "draw" else images.groups
    keys = images.contents() if groups is None else [str(group).encode() for group in groups]
    digests = (hashlib.sha256(f"{seed} {purpose}\0".encode() + (key or b"")) for key in keys)
    return np.array([int.from_bytes(digest.digest()[:8], "little") / 2**64 for digest in digests])
