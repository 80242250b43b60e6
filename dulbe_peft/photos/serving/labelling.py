"""Show photographs to label, the most useful first, and learn the labels, a few at a time."""

import io
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from dulbe_peft.arguments import Query
from dulbe_peft.data.decoding import decode_image
from dulbe_peft.data.names import check_class_names, class_key
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.metrics.prediction import Answers
from dulbe_peft.photos.serving.label_table import Label, LabelTable
from dulbe_peft.photos.suggesting import new_photographs, suggestions

SHOWN_SIDE = 1024  # pixels of a picture on the page
FEW = 5  # labels that are learned together
NEXT = 10  # photographs that are ranked after that
SHOWN = 5  # proposed classes, each with a key


class Labelling:
    """The photographs of a folder that the learner has not learned yet, the most useful first.

    Labels that `table` has already, from an earlier start of the server, count as given: a photograph with a class
    waits to be learned, and one of no class is not shown.
    """

    def __init__(
        self,
        learner: ClassIncrementalLearner,
        folder: str | Path,
        table: LabelTable,
        group: str | None = None,
        group_seconds: float | None = None,
        only: Callable[[], tuple[str, ...] | None] = lambda: None,
    ) -> None:
        self.learner, self.table = learner, table
        self.only = only  # returns the classes that are proposed now; None: all
        fresh = new_photographs(learner, [str(folder)], group, group_seconds)
        self.images, self.features, self.left_out, self.labelled, _ = fresh
        self.content = [content or b"" for content in self.images.contents()]
        places = {key: place for place, key in enumerate(self.content)}
        given = {places[key]: label for key, label in table.labels.items() if key in places}  # in the table's order
        known, self.labels = {class_key(name): name for name in learner.class_names}, dict[int, str]()
        for place, label in given.items():
            if label.name:
                (name,) = check_class_names([label.name])
                self.labels[place] = known.setdefault(class_key(name), name)
        self.none = [place for place, label in given.items() if not label.name]  # belong to no class
        self.left = [place for place in range(len(self.images)) if place not in given]
        self.skipped: list[int] = []  # shown last
        self.sort()

    def sort(self) -> None:
        """Put the most useful photographs first, and skipped photographs last."""
        places = [place for place in self.left if place not in self.skipped]
        groups, labelled = None, set(self.labelled)
        if self.images.groups is not None:
            groups = self.images.groups[places]
            labelled |= set(self.images.groups[[*self.labels, *self.none]].tolist())
        rows, classifier = self.features[places], self.learner.classifier
        given: dict[str, Any] = {"groups": groups, "labelled": labelled, "only": self.only()}
        ranked = suggestions(rows, NEXT, classifier, **given) if places else []
        self.reasons = {places[suggestion.row]: suggestion.reason for suggestion in ranked}
        skipped = [place for place in self.skipped if place in self.left]
        self.left = list(dict.fromkeys([*self.reasons, *places, *skipped]))

    def facts(self) -> dict[str, object]:
        """Return the photograph to label now with its most probable classes, and how many are left and labelled."""
        counts = {"left": len(self.left), "labelled": len(self.labels), "none": len(self.none)}
        if not self.left:
            return counts | {"photo": None}
        place, *after = self.left
        answers = Answers(self.learner.classifier, Query(only=self.only()))
        shares = answers.probabilities(self.features[place][None])[0]
        best = shares.topk(min(SHOWN, len(shares)))
        names = [answers.names[label] for label in best.indices.tolist()]
        proposed = [{"class": n, "probability": p} for n, p in zip(names, best.values.tolist(), strict=True)]
        shown = {"name": self.images.item_name(place), "reason": self.reasons.get(place, ""), "best": proposed}
        return counts | {"photo": place, "after": after[:1]} | shown

    def add_label(self, place: Any, name: str) -> None:
        """Label a photograph. After an error, it is still the photograph to label."""
        self._check(place)
        (content,) = self.images.at([place]).contents()
        learned = self.learner.state.known.class_of().get(content or b"")
        if learned is not None:
            raise ValueError(
                f"this photograph was learned as {learned!r} in the meantime: skip it, or move it under “Teach it”"
            )
        self.left.remove(place)
        self.labels[place] = name
        self._note(place, name)

    def skip(self, place: Any) -> None:
        """Move a photograph to the end."""
        self._check(place)
        self.left.remove(place)
        self.left.append(place)
        self.skipped = [*(other for other in self.skipped if other != place), place]

    def dismiss(self, place: Any) -> None:
        """Record that a photograph belongs to no class. It is not shown again, and its label in the table is empty."""
        self._check(place)
        self.left.remove(place)
        self.none.append(place)
        self._note(place, "")

    def undo_label(self, place: Any) -> None:
        """Remove the label, or "none of these", of a photograph, and show the photograph next."""
        if place in self.none:
            self.none.remove(place)
        else:
            del self.labels[place]
        self.table.labels.pop(self.content[place], None)
        self.left.insert(0, place)

    def _note(self, place: int, name: str) -> None:
        self.table.labels.pop(self.content[place], None)  # so that the table is in the order of the labels
        self.table.labels[self.content[place]] = Label(os.path.abspath(self.images.item_name(place)), name)

    def _check(self, place: object) -> None:
        if type(place) is not int or place not in self.left:  # True and 1.0 are equal to 1
            raise ValueError(f"photograph {place!r} is no longer to be labelled: reload the page")

    def learn(self, places: list[int]) -> None:
        """Teach the learner the labels of some photographs. Classes that are new to it become one further task."""
        known, names = self.learner.class_names, dict.fromkeys(self.labels[place] for place in places)
        for learn, classes in (
            (self.learner.update_classes, [name for name in names if name in known]),
            (self.learner.learn_task, [name for name in names if name not in known]),
        ):
            at = [place for place in places if self.labels[place] in classes]
            if at:
                learn(self.images.at(at, np.array([classes.index(self.labels[place]) for place in at]), classes))

    def lost(self, places: list[int]) -> list[int]:
        """Return those photographs whose files are gone or have changed since the server looked at them."""
        contents = self.images.at(places).contents()
        return [place for place, now in zip(places, contents, strict=True) if now != self.content[place]]


def known_spelling(name: str, known: Iterable[str]) -> str:
    """Return a class name in the spelling that is known, if one is. Raise a ValueError if the name is invalid."""
    (name,) = check_class_names([name.strip()])
    return {class_key(other): other for other in known}.get(class_key(name), name)


def jpeg(file: Any) -> bytes:
    """Return an image as JPEG for the page: upright, and at most 1024 pixels wide and high."""
    image, packed = decode_image(file).copy(), io.BytesIO()
    image.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
    image.save(packed, "JPEG", quality=85)
    return packed.getvalue()
