"""Which images a learner has learned and was tested on, by class and content: no image counts twice unsaid."""

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
    """Contents of images by class, see `LabelledImages.contents`; not `complete` where some were not noted.

    `ways` are those in which images were learned, as `Encoder.way` has them.
    """

    learned: Contents = field(default_factory=dict)
    tested: Contents = field(default_factory=dict)
    complete: bool = True
    ways: frozenset[tuple[str, int]] = frozenset()

    def with_learned(self, images: LabelledImages, way: tuple[str, int]) -> Self:
        """With images that were learned in some way."""
        return self.merged(KnownImages(learned=_by_class(images), ways=frozenset([way])))

    def with_tested(self, images: LabelledImages) -> Self:
        """With images that were tested on."""
        return self.merged(KnownImages(tested=_by_class(images)))

    def without_class(self, name: str) -> Self:
        """Without the images of a class that is forgotten."""
        learned, tested = ({n: of for n, of in kind.items() if n != name} for kind in (self.learned, self.tested))
        return replace(self, learned=learned, tested=tested)

    def renamed(self, old: str, new: str) -> Self:
        """With another name of a class, which may have images already."""
        moved = KnownImages({new: self.learned.get(old, ())}, {new: self.tested.get(old, ())})
        return self.without_class(old).merged(moved)

    def without_contents(self, gone: Collection[bytes]) -> Self:
        """Without some images that were learned."""
        kept = {name: tuple(one for one in of if one not in gone) for name, of in self.learned.items()}
        return replace(self, learned=kept)

    def merged(self, other: "KnownImages") -> Self:
        """With the images of another learner."""
        learned, tested = (
            {name: (*one.get(name, ()), *more.get(name, ())) for name in {**one, **more}}
            for one, more in ((self.learned, other.learned), (self.tested, other.tested))
        )
        return type(self)(learned, tested, self.complete and other.complete, self.ways | other.ways)

    def class_of(self) -> dict[bytes, str]:
        """Content -> the class as which an image was learned."""
        return {content: name for name, contents in self.learned.items() for content in contents}

    def new_rows(self, images: LabelledImages) -> tuple[list[int], dict[str, list[int]]]:
        """The rows of images that are new or cannot be read, and of others by why they would count twice."""
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

    def arrays(self, class_names: Sequence[str]) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """Tensors and metadata of a file: contents, (n, 32) in uint8, and the place of each one's class, (n,)."""
        place = {name: row for row, name in enumerate(class_names)}
        found = {"complete": np.array([self.complete], dtype=np.uint8)}
        found["ways"] = np.frombuffer(json.dumps(sorted(self.ways)).encode(), dtype=np.uint8).copy()
        for kind, contents in (("learned", self.learned), ("tested", self.tested)):
            rows = [(content, place[name]) for name, of in contents.items() if name in place for content in of]
            joined = np.frombuffer(b"".join(content for content, _ in rows), dtype=np.uint8)
            found[kind] = joined.reshape(-1, 32).copy()
            found[f"{kind} class"] = np.array([label for _, label in rows], dtype=np.int64)
        return found, {"format": FORMAT}  # one entry alone, for safetensors writes several in any order

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], metadata: Mapping[str, str], class_names: Sequence[str]) -> Self:
        """What `arrays` gave."""
        if metadata.get("format") != FORMAT:
            raise ValueError(f"the notes of images have the format {metadata.get('format')!r}, expected {FORMAT!r}")
        both = []
        for kind in ("learned", "tested"):
            names = [class_names[label] for label in np.asarray(arrays[f"{kind} class"]).tolist()]
            both.append(_grouped(names, [row.tobytes() for row in np.asarray(arrays[kind], dtype=np.uint8)]))
        ways = json.loads(np.asarray(arrays["ways"], dtype=np.uint8).tobytes()) if "ways" in arrays else []
        return cls(both[0], both[1], bool(arrays["complete"][0]), frozenset(map(tuple, ways)))


def compared(
    images: LabelledImages | None,
    noted: Contents,
    names: Sequence[str],
    renamed: Mapping[str, str] | None = None,
    look: bool = True,
) -> tuple[dict[int, str], list[int], int]:
    """The rows of images that are noted as of some classes, with these; the other rows; how many noted ones lack.

    `renamed`: what the images' classes may be called now. Without `look` the class alone tells, not the content.
    """
    left = Counter((name, content if look else b"") for name in names for content in noted.get(name, ()))
    found, others = dict[int, str](), list[int]()
    if images is None:
        return found, others, left.total()
    for row, content in enumerate(images.contents() if look else [None] * len(images)):
        own, image = images.class_names[images.labels[row]], content or b""
        name = next((name for name in (own, (renamed or {}).get(own, own)) if left[name, image] > 0), None)
        if name is None:
            others.append(row)
        else:
            left[name, image] -= 1
            found[row] = name
    return found, others, left.total()


def _by_class(images: LabelledImages) -> Contents:
    """The contents of images that were just encoded, by class; without its content, one could count twice later."""
    contents = images.contents()
    if None in contents:
        raise ValueError(f"{images.item_name(contents.index(None))} cannot be read any more: begin again")
    return _grouped([images.class_names[label] for label in images.labels], [of or b"" for of in contents])


def _grouped(names: Sequence[str], contents: Sequence[bytes]) -> Contents:
    grouped: dict[str, list[bytes]] = {}
    for name, content in zip(names, contents, strict=True):
        grouped.setdefault(name, []).append(content)
    return {name: tuple(of) for name, of in grouped.items()}
