"""Records which images a learner has learned and was tested on, so that no image silently counts twice."""

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np

from dulbe_peft.data.images import LabelledImages

FORMAT = "dulbe-images-1"
Contents = dict[str, tuple[bytes, ...]]


@dataclass(frozen=True)
class KnownImages:
    """Contents of images by class, see `LabelledImages.contents`.

    Attributes:
        learned, tested: Contents of the images that were learned and tested on.
        complete: False if some images were not recorded.
        ways: How the learned images were encoded, see `Encoder.way`.
        groups: The groups of learned images by content, see `LabelledImages.grouped`.
    """

    learned: Contents = field(default_factory=dict)
    tested: Contents = field(default_factory=dict)
    complete: bool = True
    ways: frozenset[tuple[str, int]] = frozenset()
    groups: dict[bytes, int] = field(default_factory=dict)

    def add_learned(self, images: LabelledImages, way: tuple[str, int]) -> Self:
        """Return a copy that also records learned images, which were encoded in the given way."""
        numbers = [] if images.groups is None else images.groups.tolist()
        groups = {content: number for content, number in zip(images.contents(), numbers) if content is not None}
        return self.merged(KnownImages(learned=_by_class(images), ways=frozenset([way]), groups=groups))

    def add_tested(self, images: LabelledImages) -> Self:
        """Return a copy that also records tested images."""
        return self.merged(KnownImages(tested=_by_class(images)))

    def without_class(self, name: str) -> Self:
        """Return a copy without the images of a forgotten class."""
        learned, tested = (
            {other: contents for other, contents in kind.items() if other != name}
            for kind in (self.learned, self.tested)
        )
        return replace(self, learned=learned, tested=tested)._with_groups_of_learned()

    def renamed(self, old: str, new: str) -> Self:
        """Return a copy with class `old` renamed to `new`, which may already have images."""
        moved = KnownImages({new: self.learned.get(old, ())}, {new: self.tested.get(old, ())}, groups=self.groups)
        return self.without_class(old).merged(moved)

    def without_contents(self, gone: Collection[bytes]) -> Self:
        """Return a copy without the learned images whose content is in `gone`."""
        kept = {name: tuple(content for content in of if content not in gone) for name, of in self.learned.items()}
        return replace(self, learned=kept)._with_groups_of_learned()

    def _with_groups_of_learned(self) -> Self:
        """Return a copy with the groups of images that are still learned under any class."""
        learned = self.class_of()
        return replace(self, groups={content: group for content, group in self.groups.items() if content in learned})

    def merged(self, other: "KnownImages") -> Self:
        """Return a copy that also records the images of another learner."""
        learned, tested = (
            {name: (*ours.get(name, ()), *theirs.get(name, ())) for name in {**ours, **theirs}}
            for ours, theirs in ((self.learned, other.learned), (self.tested, other.tested))
        )
        complete, groups = self.complete and other.complete, self.groups | other.groups
        return type(self)(learned, tested, complete, self.ways | other.ways, groups)

    def class_of(self) -> dict[bytes, str]:
        """Return the class under which each content was learned."""
        return {content: name for name, contents in self.learned.items() for content in contents}

    def class_of_tested(self) -> dict[bytes, str]:
        """Return the class under which each content was tested, without contents that were tested under several."""
        several = Counter(content for contents in self.tested.values() for content in {*contents})
        return {
            content: name for name, contents in self.tested.items() for content in contents if several[content] == 1
        }

    def with_tests_moved(self, moved: Mapping[bytes, str | None]) -> Self:
        """Return a copy in which tested contents have another class, or with None are no longer tested."""
        tested = {name: [content for content in of if content not in moved] for name, of in self.tested.items()}
        for of in self.tested.values():
            for content in of:
                if (name := moved.get(content)) is not None:
                    tested.setdefault(name, []).append(content)
        return replace(self, tested={name: tuple(of) for name, of in tested.items()})

    def new_rows(self, images: LabelledImages) -> tuple[list[int], dict[str, list[int]]]:
        """Split images into rows to use and rows that would count twice, keyed by the reason.

        Rows to use are those of images that are new or cannot be read.
        """
        learned, seen, rows, twice = self.class_of(), dict[bytes, int](), list[int](), dict[str, list[int]]()
        for row, (content, label) in enumerate(zip(images.contents(), images.labels.tolist(), strict=True)):
            if content is not None and content in learned:
                same = label < 0 or learned[content] == images.class_names[label]
                twice.setdefault("learned before" if same else "of another class", []).append(row)
            elif content in seen:
                why = "in the data twice" if seen[content] == label else "in two classes, of which the first counts"
                twice.setdefault(why, []).append(row)
            else:
                rows.append(row)
            if content is not None:
                seen.setdefault(content, label)
        return rows, twice

    def regrouped(self, images: LabelledImages) -> LabelledImages:
        """Return images with the groups with which they were learned before; others are groups of their own."""
        contents = [content or b"" for content in images.contents()]
        if not self.groups.keys() & {*contents}:
            return images
        part = images.at(slice(None))
        own = (int.from_bytes(content[:8], "little") >> 1 for content in contents)
        part.groups = np.array([self.groups.get(*each) for each in zip(contents, own, strict=True)])
        return part

    def arrays(self, class_names: Sequence[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """Return the arrays and metadata to save: contents, (n, 32) in uint8, and each content's class index, (n,)."""
        place = {name: row for row, name in enumerate(class_names)}
        arrays = {"complete": np.array([self.complete], dtype=np.uint8)}
        arrays["ways"] = np.frombuffer(json.dumps(sorted(self.ways)).encode(), dtype=np.uint8).copy()
        for kind, contents in (("learned", self.learned), ("tested", self.tested)):
            rows = [(content, place[name]) for name, of in contents.items() if name in place for content in of]
            joined = np.frombuffer(b"".join(content for content, _ in rows), dtype=np.uint8)
            arrays[kind] = joined.reshape(-1, 32).copy()
            arrays[f"{kind} class"] = np.array([label for _, label in rows], dtype=np.int64)
        if self.groups:
            joined = np.frombuffer(b"".join(self.groups), dtype=np.uint8)
            arrays["grouped"], arrays["group"] = joined.reshape(-1, 32).copy(), np.array([*self.groups.values()])
        return arrays, {"format": FORMAT}  # a single entry, because safetensors writes several in any order

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], metadata: Mapping[str, str], class_names: Sequence[str]) -> Self:
        """Return the record from which `arrays` made the given arrays and metadata."""
        if metadata.get("format") != FORMAT:
            raise ValueError(f"the record of images has the format {metadata.get('format')!r}, expected {FORMAT!r}")
        both = []
        for kind in ("learned", "tested"):
            labels, contents = np.asarray(arrays[f"{kind} class"]), _rows(arrays[kind])
            if labels.dtype != np.int64 or labels.ndim != 1 or not set(labels.tolist()) <= {*range(len(class_names))}:
                raise ValueError(f"the record of {kind} images has labels outside of its {len(class_names)} classes")
            both.append(_grouped([class_names[label] for label in labels.tolist()], contents))
        ways = json.loads(np.asarray(arrays["ways"], dtype=np.uint8).tobytes()) if "ways" in arrays else []
        numbers = np.asarray(arrays.get("group", np.zeros(0, dtype=np.int64)))
        if numbers.dtype != np.int64 or numbers.ndim != 1:
            raise ValueError(
                f"the groups of images are {numbers.dtype} of shape {numbers.shape}, expected int64, (n,)"
            )
        groups = dict(zip(_rows(arrays["grouped"]) if "grouped" in arrays else [], numbers.tolist(), strict=True))
        return cls(both[0], both[1], bool(arrays["complete"][0]), frozenset(map(tuple, ways)), groups)


def compared(
    images: LabelledImages | None,
    known: Contents,
    names: Sequence[str],
    renamed: Mapping[str, str] | None = None,
    look: bool = True,
) -> tuple[dict[int, str], list[int], int]:
    """Compare images with those recorded in `known` for the classes `names`.

    `renamed` maps the images' class names to their present names. Without `look`, only the class is compared, not the
    content.

    Returns:
        The recorded class by row, the rows that are not recorded, and the number of recorded images that are missing
        in `images`.
    """
    left = Counter((name, content if look else b"") for name in names for content in known.get(name, ()))
    recorded, others = dict[int, str](), list[int]()
    if images is None:
        return recorded, others, left.total()
    for row, content in enumerate(images.contents() if look else [None] * len(images)):
        label, image = images.class_names[images.labels[row]], content or b""
        name = next((name for name in (label, (renamed or {}).get(label, label)) if left[name, image] > 0), None)
        if name is None:
            others.append(row)
        else:
            left[name, image] -= 1
            recorded[row] = name
    return recorded, others, left.total()


def _by_class(images: LabelledImages) -> Contents:
    """Group the contents of images that were just encoded by class.

    Raises a `ValueError` if a content is missing, because the image could later be counted twice.
    """
    contents = images.contents()
    if None in contents:
        raise ValueError(f"{images.item_name(contents.index(None))} can no longer be read: start again")
    return _grouped([images.class_names[label] for label in images.labels], [content or b"" for content in contents])


def _rows(contents: object) -> list[bytes]:
    """Return the rows of a saved array of contents, (n, 32) in uint8."""
    rows = np.asarray(contents)
    if rows.dtype != np.uint8 or rows.shape[1:] != (32,):
        raise ValueError(f"contents of images are {rows.dtype} of shape {rows.shape}, expected uint8, (n, 32)")
    return [row.tobytes() for row in rows]


def _grouped(names: Sequence[str], contents: Sequence[bytes]) -> Contents:
    grouped: dict[str, list[bytes]] = {}
    for name, content in zip(names, contents, strict=True):
        grouped.setdefault(name, []).append(content)
    return {name: tuple(contents) for name, contents in grouped.items()}
