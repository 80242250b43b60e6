"""The list of photographs on the page: what was labelled, and what the learner answers, to filter and to correct."""

import hashlib
import io
import os
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dulbe_peft.arguments import Query
from dulbe_peft.data.decoding import Source, UnreadableImageError, decode_file, stored_bytes
from dulbe_peft.data.glance import as_jpeg, thumbnail
from dulbe_peft.data.images import named_images
from dulbe_peft.data.names import NONE
from dulbe_peft.data.unlabelled import unlabelled_images
from dulbe_peft.metrics.prediction import Answers
from dulbe_peft.photos.serving.changes import Changes
from dulbe_peft.photos.serving.label_table import Label
from dulbe_peft.photos.serving.labelling import Labelling
from dulbe_peft.utils.files import below

SIDE = 400  # pixels of a picture in the list, which is shown at 200
KINDS, ORDERS = ("labelled", "answers", "all"), ("newest", "doubt", "name")


@dataclass
class Row:
    """A photograph in the list.

    Attributes:
        id: The SHA-256 of the file.
        name: Its path, and `file` its name alone.
        site: Its folder, as seen from the folder of photographs.
        shown: Its class, or "none of these".
        state: "learned", "waits" or "none", or "answer" if it has no label.
        probability: That of the class, or None if the learner does not know the class.
        note: What the table says, if it was edited after the photograph had been learned.
    """

    id: str
    name: str
    file: str
    site: str
    shown: str
    state: str
    probability: float | None = None
    note: str = ""


def listed(work: Labelling, request: dict[str, Any]) -> dict[str, object]:
    """Return the first rows of a list, their number, and the sites and classes to choose from, with counts.

    The request has `kind` ("labelled", "answers" or "all"), `order` ("newest" label first, "doubt" or "name"), `site`,
    `class`, `most`, the largest probability, and `count`, the largest number of rows.
    """
    kind, order = request.get("kind", "labelled"), request.get("order", "newest")
    most, first = request.get("most"), request.get("count", 60)
    for name, value, possible in (("kind", kind, KINDS), ("order", order, ORDERS)):
        if value not in possible:
            raise ValueError(f"`{name}` is {value!r}, expected one of {', '.join(possible)}")
    if type(first) is not int or first < 1 or not (most is None or type(most) in (int, float)):
        raise ValueError(f"`count` must be a number from 1 on and `most` a probability, got {first!r} and {most!r}")
    rows = [] if kind == "answers" else _labelled(work)
    rows += [] if kind == "labelled" else _answers(work)
    sites, classes = Counter(row.site for row in rows), Counter(row.shown for row in rows)
    for field, wanted in (("site", request.get("site")), ("shown", request.get("class"))):
        rows = [row for row in rows if wanted is None or getattr(row, field) == wanted]
    if most is not None:
        rows = [row for row in rows if row.probability is not None and row.probability <= most]
    if order == "doubt":
        rows.sort(key=lambda row: 2 if row.probability is None else row.probability)
    elif order == "name":
        rows.sort(key=lambda row: row.name)
    shown = [asdict(row) | {"missing": not os.path.isfile(row.name)} for row in rows[:first]]
    return {"rows": shown, "total": len(rows), "sites": sorted(sites.items()), "classes": sorted(classes.items())}


def _labelled(work: Labelling) -> list[Row]:
    """Return the labelled photographs, the newest label first, and then those that were learned elsewhere."""
    learned, rows = work.learner.state.known.class_of(), []
    given = {key: label.name for key, label in reversed(work.table.labels.items())}
    others = {key: learned[key] for key in work.content if key in learned and key not in given}
    for key, name in (given | others).items():
        now = learned.get(key, name)
        state = "learned" if key in learned else "waits" if name else "none"
        note = "" if now == name else f"not learned again: the table says {name or NONE}"
        rows.append(_row(work, key, now or NONE, state, note))
    places = [place for row in rows if (place := work.places.get(bytes.fromhex(row.id))) is not None]
    answers = Answers(work.learner.classifier, Query(only=work.only()))
    shares = dict(zip(places, answers.probabilities(work.features[places]), strict=True)) if places else {}
    for row in rows:
        place = work.places.get(bytes.fromhex(row.id))
        if place is not None and row.shown in answers.names:
            row.probability = float(shares[place][answers.names.index(row.shown)])
    return rows


def _answers(work: Labelling) -> list[Row]:
    """Return the photographs that have no label and were not taught meanwhile, with the learner's answer."""
    names, shares, labels = work.best_answers()
    learned = work.learner.state.known.class_of()
    left = [place for place in work.left if work.content[place] not in learned]
    rows = [_row(work, work.content[place], names[labels[place]], "answer") for place in left]
    for row, place in zip(rows, left, strict=True):
        row.probability = shares[place]
    return rows


def _row(work: Labelling, key: bytes, shown: str, state: str, note: str = "") -> Row:
    folder, file = os.path.split(path := work.path(key))
    return Row(key.hex(), path, file, _site(folder, work.folder), shown, state, note=note)


@cache
def _site(folder: str, root: str) -> str:
    """Return a folder as seen from another one, or as it is if it lies elsewhere."""
    return below(folder, root) or folder


def file_of(work: Labelling, key: bytes) -> io.BytesIO:
    """Return the file of a photograph. Raise a ValueError if it is gone or another one has its name."""
    if key not in work.places and key not in work.table.labels:
        raise ValueError("it is not in the folder of photographs: reload the page")
    path = work.path(key)
    try:
        stored = stored_bytes(path)
    except UnreadableImageError as error:
        raise ValueError(f"{path} cannot be read: {error}; put the photograph back") from error
    if hashlib.sha256(stored).digest() != key:
        raise ValueError(f"{path} is another file now: put the photograph back")
    return io.BytesIO(stored)


def small(file: Source) -> bytes:
    """Return a photograph as a small JPEG for the list."""
    return as_jpeg(thumbnail(decode_file(file, stored_bytes(file), SIDE)[0], SIDE))


def correct(app: Changes, key: bytes, name: str | None) -> str:
    """Give a photograph another label, of which "" is "none of these", or take its label away; return what was done.

    `key` is the SHA-256 of the photograph.
    """
    app.table.check()
    work, label = app.photographs(), app.table.labels.get(key)
    if key not in work.places and label is None:
        raise ValueError("this photograph is not in the list any more: reload the page")
    learned, said = app.learner.state.known.class_of().get(key), label.name if label else None
    words = f"{Path(work.path(key)).name}: {'no label' if name is None else name or NONE}"
    if (said if learned is None else learned) != name:
        (_relabel if learned is None else _learn_again)(app, key, name, words)
    elif said != name:  # only the table has another label, because somebody edited it
        with app.kept():
            work.note(key, str(name))
            app.table.write()
    return words


def _relabel(app: Changes, key: bytes, name: str | None, words: str) -> None:
    """Change the label of a photograph that was not learned."""
    work, labels = app.photographs(), dict(app.table.labels)
    with app.kept():
        if name is None:
            del app.table.labels[key]
            app.remember(words, labels)
        else:
            work.note(key, name)
            app.remember(words, labels, work.places.get(key), name)
        work.follow()
        app.table.write()
        app.learn_if_enough()
    app.trim()


def _learn_again(app: Changes, key: bytes, name: str | None, words: str) -> None:
    """Forget a photograph, and learn it again as another class, unless it is to have no class."""
    work = app.photographs()
    file, path = file_of(work, key), work.path(key)
    app.finish()
    state, labels = app.learner.state, dict(app.table.labels)
    learned = state.known.class_of()[key]
    emptied = app.emptied(Counter([learned]))
    after = {other: label for other, label in labels.items() if other != key}
    if name is not None:
        after[key] = Label(path, name)

    def learn() -> None:
        if emptied:
            app.learner.forget_class(learned)
        else:
            app.learner.forget_images(unlabelled_images(file))
        if name:
            images = state.known.regrouped(named_images([{"image": file, "label": 0}], [name]))
            known = name in app.learner.class_names
            (app.learner.update_classes if known else app.learner.learn_task)(images)
        app.possible()

    app.change(learn, after)
    app.remember(words, labels, state=state)
    app.trim()
    work.sort()
    work.follow()
