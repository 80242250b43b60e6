"""Show photographs to label, the most useful first, and learn the labels, a few at a time."""

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dulbe_peft.arguments import Query
from dulbe_peft.data.decoding import Source, decode_image
from dulbe_peft.data.glance import as_jpeg
from dulbe_peft.data.names import check_class_names, class_key
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.metrics.prediction import Answers
from dulbe_peft.photos.serving.label_table import Label, LabelTable
from dulbe_peft.photos.suggesting import new_photographs, suggestions

SHOWN_SIDE = 1024  # pixels of a picture on the page
FEW = 5  # labels that are learned together
NEXT = 10  # photographs that are ranked after that
SHOWN = 5  # proposed classes, each with a key
AT_ONCE = 1024  # photographs that are classified at once


class Labelling:
    """The photographs of a folder, and those of them to label, the most useful first.

    Labels that `table` has already, from an earlier start of the server, count as given: a photograph with a class
    waits to be learned, and one of no class is not asked for.

    Attributes:
        images: The photographs of the folder that can be read.
        features: (n, d).
        content: The SHA-256 of each photograph's bytes.
        places: A photograph's number by its content.
        paths: The absolute path of each photograph.
        left: The numbers of photographs without a label, in the order in which they are asked for.
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
        self.learner, self.table, self.folder = learner, table, str(folder)
        self.only = only  # returns the classes that are proposed now; None: all
        fresh = new_photographs(learner, [str(folder)], group, group_seconds, learned_too=True)
        self.images, self.features, self.left_out, self.labelled = fresh[:4]
        self.content = [content or b"" for content in self.images.contents()]
        self.places = {key: place for place, key in enumerate(self.content)}
        self.paths = [os.path.abspath(self.images.item_name(place)) for place in range(len(self.images))]
        known = {class_key(name): name for name in learner.class_names}
        for key, label in table.labels.items():
            if label.name and key in self.places:
                (name,) = check_class_names([label.name])
                table.labels[key] = replace(label, name=known.setdefault(class_key(name), name))
        self._best: Any = None  # see `best_answers`
        self.left = list[int]()
        self.skipped: list[int] = []  # shown last
        self.follow()
        self.sort()

    @property
    def labels(self) -> dict[int, str]:
        """The class of each labelled photograph of the folder, in the order of the labels."""
        given = self.table.labels.items()
        return {self.places[key]: label.name for key, label in given if label.name and key in self.places}

    @property
    def none(self) -> list[int]:
        """The photographs of the folder that belong to no class."""
        return [self.places[key] for key, label in self.table.labels.items() if not label.name and key in self.places]

    def follow(self) -> None:
        """Ask for those photographs that have no label now, first for those that had one."""
        known = {*self.learner.state.known.class_of(), *self.table.labels}
        without = {place for place, key in enumerate(self.content) if key not in known}
        self.left = [*sorted(without.difference(self.left)), *(place for place in self.left if place in without)]

    def sort(self) -> None:
        """Put the most useful photographs first, and skipped photographs last."""
        places = [place for place in self.left if place not in self.skipped]
        groups, labelled = None, set(self.labelled)
        if self.images.groups is not None:
            groups = self.images.groups[places]
            labelled |= set(self.images.groups[[*self.labels, *self.none]].tolist())
        rows, classifier = self.features[places], self.learner.classifier
        only = self.only()
        ranked = suggestions(rows, NEXT, classifier, 0, groups, labelled, only) if places else []
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

    def best_answers(self) -> tuple[tuple[str, ...], list[float], list[int]]:
        """Return the learner's classes, and for each photograph the probability and the number of the best one."""
        key = self.learner.state, self.only()
        if self._best is None or self._best[0][0] is not key[0] or self._best[0][1] != key[1]:
            answers = Answers(self.learner.classifier, Query(only=key[1]))
            parts = [answers.probabilities(rows).max(dim=1) for rows in self.features.split(AT_ONCE)]
            shares, labels = ([x for part in parts for x in part[which].tolist()] for which in (0, 1))
            self._best = key, (answers.names, shares, labels)
        return self._best[1]

    def add_label(self, photo: object, name: str) -> int:
        """Label a photograph, and return its number. After an error, it is still the photograph to label."""
        place = self._checked(photo, unchanged=True)
        learned = self.learner.state.known.class_of().get(self.content[place])
        if learned is not None:
            raise ValueError(
                f"this photograph was learned as {learned!r} in the meantime: skip it, or correct it in the list"
            )
        self.left.remove(place)
        self.note(self.content[place], name)
        return place

    def skip(self, photo: object) -> None:
        """Move a photograph to the end."""
        place = self._checked(photo)
        self.left.remove(place)
        self.left.append(place)
        self.skipped = [*(other for other in self.skipped if other != place), place]

    def dismiss(self, photo: object) -> int:
        """Give a photograph the empty label of no class, so that it is not shown again, and return its number."""
        place = self._checked(photo, unchanged=True)
        self.left.remove(place)
        self.note(self.content[place], "")
        return place

    def path(self, key: bytes) -> str:
        """Return the absolute path of a photograph of the folder, or else the one that the table has."""
        place = self.places.get(key)
        return self.table.labels[key].path if place is None else self.paths[place]

    def note(self, key: bytes, name: str) -> None:
        """Write the label of a photograph, by its content, at the end of the table."""
        label = Label(self.path(key), name)
        self.table.labels.pop(key, None)  # so that the table is in the order of the labels
        self.table.labels[key] = label

    def _checked(self, place: object, unchanged: bool = False) -> int:
        if type(place) is not int or place not in self.left:  # True and 1.0 are equal to 1
            raise ValueError(f"photograph {place!r} is no longer to be labelled: reload the page")
        if unchanged and self.lost([place]):  # the page may have shown another photograph under this name
            name = self.images.item_name(place)
            raise ValueError(f"{name} was changed, moved or deleted since the server was started: skip it")
        return place

    def learn(self, places: list[int]) -> None:
        """Teach the learner the labels of some photographs. Classes that are new to it become one further task."""
        labels, known = self.labels, self.learner.class_names
        names = dict.fromkeys(labels[place] for place in places)
        for learn, classes in (
            (self.learner.update_classes, [name for name in names if name in known]),
            (self.learner.learn_task, [name for name in names if name not in known]),
        ):
            at = [place for place in places if labels[place] in classes]
            if at:
                learn(self.images.at(at, np.array([classes.index(labels[place]) for place in at]), classes))

    def lost(self, places: list[int]) -> list[int]:
        """Return those photographs whose files are gone or have changed since the server looked at them."""
        contents = self.images.at(places).contents()
        return [place for place, now in zip(places, contents, strict=True) if now != self.content[place]]


def known_spelling(name: str, known: Iterable[str]) -> str:
    """Return a class name in the spelling that is known, if one is. Raise a ValueError if the name is invalid."""
    (name,) = check_class_names([name.strip()])
    return {class_key(other): other for other in known}.get(class_key(name), name)


def jpeg(file: Source) -> bytes:
    """Return an image as JPEG for the page: upright, and at most 1024 pixels wide and high."""
    image = decode_image(file).copy()
    image.thumbnail((SHOWN_SIDE, SHOWN_SIDE))
    return as_jpeg(image, 85)
