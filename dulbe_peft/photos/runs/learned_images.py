"""Keep learned and tested photographs apart: recognise them, and follow corrected labels of tests."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import TYPE_CHECKING

from dulbe_peft.utils.terminal import counted, print_once, printable

if TYPE_CHECKING:
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.data.known import KnownImages
    from dulbe_peft.learner import ClassIncrementalLearner

AT_ONCE = 4096  # how many features are read from the store at once


def equal_features(learner: ClassIncrementalLearner, images: LabelledImages) -> dict[int, set[str]]:
    """Return, for the rows of images whose features equal those of learned images, the classes of these.

    A program that writes a keyword into a file changes its bytes but not its pixels, so the features are those in the
    store. They are equal, too, if two images differ only where the preprocessing crops them. The result is empty if
    the learner has no store, trains the model, or gets features instead of images.
    """
    encoder, store = learner.encoder, learner.encoder.store
    if encoder.adapted or store is None or images.features is not None or not len(images):
        return {}
    class_of, rows_of, found = learner.state.known.class_of(), dict[bytes, list[int]](), dict[int, set[str]]()
    for row, feature in enumerate(learner.image_embeds(images).cpu().numpy()):
        rows_of.setdefault(feature.tobytes(), []).append(row)
    learned = list(class_of)
    for start in range(0, len(learned), AT_ONCE):
        for content, feature in store.get(encoder.key, learned[start : start + AT_ONCE]).items():
            for row in rows_of.get(feature.tobytes(), ()):
                found.setdefault(row, set()).add(class_of[content])
    return found


def without_learned(learner: ClassIncrementalLearner, images: LabelledImages) -> LabelledImages:
    """Return the images that were not learned under any class; print the number of the others."""
    learned = learner.state.known.class_of()
    seen = {row for row, content in enumerate(images.contents()) if content in learned}
    seen |= equal_features(learner, images).keys()
    if seen:
        example = printable(images.item_name(min(seen)))
        print(
            f"left out, because they were learned: {counted(len(seen), 'image')}, such as {example}", file=sys.stderr
        )
    if not learner.state.known.complete:
        print("this learner has no record of all its images, so learned ones may be among these", file=sys.stderr)
    return images.at([row for row in range(len(images)) if row not in seen])


def correct_tests(learner: ClassIncrementalLearner, *parts: LabelledImages | None) -> int:
    """Move test images of the learner that have another label in `parts` to that class; return and print their number.

    An image whose label is a class that the learner does not know is no longer one of its tests, but may become one of
    the new class.
    """
    known, relabelled, example = learner.state.known, dict[bytes, str](), ""
    tested = known.class_of_tested()
    for part in filter(None, parts):
        for row, content in enumerate(part.contents()):
            name = part.class_names[part.labels[row]]
            if content is not None and tested.get(content, name) != name and content not in relabelled:
                relabelled[content] = name
                example = example or f"{part.item_name(row)} from {tested[content]!r} to {name!r}"
    if relabelled:
        changed = {content: name if name in learner.class_names else None for content, name in relabelled.items()}
        learner.use_state(replace(learner.state, known=known.with_tests_moved(changed)))
        print_once(f"{counted(len(relabelled), 'test image')} moved to another class, such as {example}")
    return len(relabelled)


def without_tested(images: LabelledImages, known: KnownImages) -> LabelledImages:
    """Return the images on which the learner was not tested, and print the number of the others."""
    tested = known.class_of_tested()
    seen = {row for row, content in enumerate(images.contents()) if content in tested}
    return _without(seen, images, "the learner is tested on them")


def without_equal_features(images: LabelledImages, learner: ClassIncrementalLearner) -> LabelledImages:
    """Return the images without those whose features equal those of a learned image of the same class.

    The images left out are printed, and so are images that were learned with another class.
    """
    name_of = [images.class_names[label] for label in images.labels.tolist()]
    found = equal_features(learner, images)
    same = {row for row, classes in found.items() if name_of[row] in classes}
    what = " that the model sees like a learned image in another file"
    left = _without(same, images, "they would count twice", what)
    if moved := found.keys() - same:
        name = f"{images.item_name(min(moved))}, learned as {min(found[min(moved)])!r} before"
        print_once(f"{counted(len(moved), 'image')}{what} and of another class: both count, such as {name}")
    return left


def _without(rows: set[int], images: LabelledImages, why: str, what: str = "") -> LabelledImages:
    """Return the images without some rows, and print how many these are, with an example."""
    if rows:
        example = f"{counted(len(rows), 'image')}{what}, such as {images.item_name(min(rows))} (--again)"
        print_once(f"left out, because {why}: {example}")
    return images.at([row for row in range(len(images)) if row not in rows])


def as_tested(images: LabelledImages, known: KnownImages) -> LabelledImages:
    """Return images with the classes under which they are tested, which may have been corrected since."""
    import numpy as np

    tested = known.class_of_tested()
    names = [images.class_names[label] for label in images.labels.tolist()]
    names = [tested.get(content or b"", name) for content, name in zip(images.contents(), names, strict=True)]
    place = {name: label for label, name in enumerate(dict.fromkeys([*images.class_names, *names]))}
    return images.at(slice(None), np.array([place[name] for name in names], dtype=np.int64), [*place])
