"""Photographs to label, the most useful first: what is said of them is learned, a few at a time."""

import io
import os
from pathlib import Path
from typing import Any

import numpy as np

from dulbe_peft.data.decoding import decode_image
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.photos.suggesting import new_photographs, suggestions
from dulbe_peft.utils.files import write_rows

SIDE = 1024  # pixels of a picture for the page
FEW = 5  # labels that are learned at once
NEXT = 10  # photographs that are put into order after that
SHOWN = 5  # classes that are proposed, each with a key


class Labelling:
    """The photographs of a folder that a learner has not learned, the most useful first."""

    def __init__(self, learner: ClassIncrementalLearner, folder: str | Path) -> None:
        self.learner = learner
        self.images, self.features, self.left_out = new_photographs(learner, [str(folder)])
        self.left = list(range(len(self.images)))
        self.labels: dict[int, str] = {}  # of this visit
        self.skipped: list[int] = []  # which come last
        self.none: list[int] = []  # of no class, which do not come again
        self.sort()

    def sort(self) -> None:
        """Put the most useful photographs first, and those that were skipped last."""
        places = [place for place in self.left if place not in self.skipped]
        found = suggestions(self.features[places], NEXT, self.learner.classifier) if places else []
        self.reasons = {places[one.row]: one.reason for one in found}
        self.left = list(dict.fromkeys([*self.reasons, *places, *(one for one in self.skipped if one in self.left)]))

    def facts(self) -> dict[str, Any]:
        """The photograph to label now, with the classes that it is likely of, and how many are left and labelled."""
        counts = {"left": len(self.left), "labelled": len(self.labels), "none": len(self.none)}
        if not self.left:
            return counts | {"photo": None}
        place, *after = self.left
        classifier = self.learner.classifier
        shares = classifier.probabilities(self.features[place][None])[0]
        best = shares.topk(min(SHOWN, len(shares)))
        names = [classifier.class_names[label] for label in best.indices.tolist()]
        proposed = [{"class": n, "probability": p} for n, p in zip(names, best.values.tolist(), strict=True)]
        shown = {"name": self.images.item_name(place), "reason": self.reasons.get(place, ""), "best": proposed}
        return counts | {"photo": place, "after": after[:1]} | shown

    def say(self, place: Any, name: str) -> None:
        """Note what a photograph is; one that is refused stays where it is."""
        self._check(place)
        (content,) = self.images.at([place]).contents()
        learned = self.learner.state.known.class_of().get(content or b"")
        if learned is not None:
            raise ValueError(
                f"this photograph was learned as {learned!r} meanwhile: skip it, or teach it above to move it"
            )
        self.left.remove(place)
        self.labels[place] = name

    def skip(self, place: Any) -> None:
        """Put a photograph last."""
        self._check(place)
        self.left.remove(place)
        self.left.append(place)
        self.skipped = [*(one for one in self.skipped if one != place), place]

    def dismiss(self, place: Any) -> None:
        """Note that a photograph is of no class; it is not shown again, and `table` has no label for it."""
        self._check(place)
        self.left.remove(place)
        self.none.append(place)

    def unsay(self, place: Any) -> None:
        """Take back what was said of a photograph, which is the next one again."""
        if place in self.none:
            self.none.remove(place)
        else:
            del self.labels[place]
        self.left.insert(0, place)

    def _check(self, place: Any) -> None:
        if type(place) is not int or place not in self.left:  # True and 1.0 are equal to 1
            raise ValueError(f"photograph {place!r} is not to be labelled any more: load the page again")

    def learn(self, places: list[int]) -> None:
        """Teach the learner what was said of some photographs; classes that it does not know are one further task."""
        known, names = self.learner.class_names, dict.fromkeys(self.labels[place] for place in places)
        for learn, own in (
            (self.learner.update_classes, [name for name in names if name in known]),
            (self.learner.learn_task, [name for name in names if name not in known]),
        ):
            at = [place for place in places if self.labels[place] in own]
            if at:
                learn(self.images.at(at, np.array([own.index(self.labels[place]) for place in at]), own))

    def table(self) -> bytes:
        """What was said in this visit as CSV: path, label, with paths that lead there from everywhere.

        A photograph that was learned has the class that the learner knows it as now, after corrections. The label of
        a photograph of no class is empty: `learn` leaves it out.
        """
        text, now = io.StringIO(newline=""), self.learner.state.known.class_of()
        rows = [*self.labels.items(), *((place, "") for place in self.none)]
        contents = self.images.at([place for place, _ in rows]).contents()
        lines = [
            [os.path.abspath(self.images.item_name(place)), now.get(content or b"", name)]
            for (place, name), content in zip(rows, contents, strict=True)
        ]
        write_rows(text, ["path", "label"], lines)
        return text.getvalue().encode("utf-8", "surrogateescape")


def jpeg(file: Any) -> bytes:
    """An image as a JPEG for the page, upright, and at most 1024 pixels wide and high."""
    image, packed = decode_image(file).copy(), io.BytesIO()
    image.thumbnail((SIDE, SIDE))
    image.save(packed, "JPEG", quality=85)
    return packed.getvalue()
