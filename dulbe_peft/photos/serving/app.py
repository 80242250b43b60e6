"""Answer the requests of the page: predictions, and changes that are saved and can be undone."""

import base64
import io
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any, cast

from dulbe_peft.arguments import Query
from dulbe_peft.classifiers.calibration import HARDLY
from dulbe_peft.data.decoding import decode_image, header_of_file, open_image
from dulbe_peft.data.images import named_images
from dulbe_peft.data.names import NONE, class_key
from dulbe_peft.data.unlabelled import unlabelled_images
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.photos.serving.gallery import correct, listed
from dulbe_peft.photos.serving.label_table import LABELS_FILE, Label, LabelTable
from dulbe_peft.photos.serving.labelling import FEW, Labelling, jpeg, known_spelling
from dulbe_peft.streams.progress import renamed_classes
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils.folders import MANIFEST, CheckpointError
from dulbe_peft.utils.terminal import counted

MOST_BYTES = 64 * 2**20  # size of an upload
MOST_PIXELS = 2**26  # of an uploaded image; a file of 20 KiB can have nearly three times as many
MOST_IMAGES = 200  # images in an upload
SHOWN = 5  # classes in a prediction
REJECT = 0.05  # accepted share of false alarms for "none of these"
MOST_UNDOS = 20  # states that undo can return to; each of them keeps the classifiers in memory
BROWSERS_SHOW = {"JPEG", "PNG", "WEBP", "GIF", "BMP"}


@dataclass(eq=False)  # a change is equal to itself only
class Change:
    """A change that can be undone.

    A label `waits` until it is learned together with others; then `state` becomes the state before they were learned.
    """

    words: str
    state: LearnerState  # before the change
    photo: int | None = None  # the photograph of the folder that was labelled, if the change is a label
    waits: bool = False  # whether a label has not been learned yet
    none: bool = False  # whether the label is "none of these", which is not learned
    labels: dict[bytes, Label] | None = None  # the table before the change; None: that without this label
    number: int = field(default_factory=count(1).__next__)


class App:
    """Answers the requests of the page. Each change is saved in the folder `output`, if given, before the answer."""

    def __init__(
        self,
        learner: ClassIncrementalLearner,
        output: str | Path | None = None,
        photographs: str | Path | None = None,
        group: str | None = None,
        group_seconds: float | None = None,
        **answers: Any,
    ) -> None:
        self.learner, self.output = learner, output
        self.answers, self.start = answers, len(learner.state.updates)  # `only` and `sum_up` of a query, at the start
        self.seen = self._manifest()  # what the output folder holds, as far as this server knows
        self.table = LabelTable(None if output is None else Path(output, LABELS_FILE))
        given = group, group_seconds, lambda: self.possible().get("only")
        self.labelling = None if photographs is None else Labelling(learner, photographs, self.table, *given)
        self.saved_state = learner.state
        self.lost: list[int] = []  # labelled photographs that could not be learned, because their files are gone
        self.changes = list[Change]()
        self.begun = token_hex(8)  # tells requests of a page that an earlier server sent
        if self.labelling is not None:
            learned, places = learner.state.known.class_of(), self.labelling.places
            for key, label in self.table.labels.items():
                if key in places and key not in learned:
                    self.remember(f"the label {label.name}" if label.name else NONE, None, places[key], label.name)
        self.notes = self._differing()  # sentences for the person who starts the server
        self.lock = threading.Lock()
        if self.output is not None and self.labelling is not None and not Path(self.output).exists():
            self.save()  # the table of labels needs a place from the first label on

    @property
    def waiting(self) -> list[int]:
        """Return the photographs whose labels have not been learned yet."""
        if self.labelling is None:
            return []
        learned = self.learner.state.known.class_of()
        return [place for place in self.labelling.labels if self.labelling.content[place] not in learned]

    @property
    def unsaved(self) -> bool:
        """Return whether there are changes that have not been saved. With an output folder, each label is."""
        return self.learner.state is not self.saved_state or (self.output is None and bool(self.waiting))

    def possible(self) -> dict[str, Any]:
        """Return the fields `only` and `sum_up` of a query, with the present names of their classes.

        Raises:
            ValueError: If no class of `only` is left.
        """
        now, fields = renamed_classes(self.learner.state.updates[self.start :]), dict(self.answers)
        for asked, given in self.answers.items():
            groups = given if isinstance(given, dict) else dict.fromkeys(given or ())
            left = {now.get(name, name): group for name, group in groups.items()}
            left = {name: group for name, group in left.items() if name in self.learner.class_names}
            fields[asked] = None if given is None else left if isinstance(given, dict) else tuple(left)
        if fields.get("only") == ():
            raise ValueError("no class that is possible would be left: start the server without --only")
        return fields

    def facts(self) -> dict[str, object]:
        """Return what the page shows: the classes and their image counts, the last change, and what is saved."""
        state = self.learner.state
        return {
            "classes": list(state.class_names),
            "counts": state.image_counts(),
            "classifier": state.classifier.name,
            "doubt": state.doubt or state.estimates.doubt,
            "teachable": not state.strategy.adapts,
            "undo": self.changes[-1].words if self.changes else None,
            "last": self._last(),
            "server": self.begun,
            "output": None if self.output is None else str(self.output),
            "unsaved": self.unsaved,
            "most_bytes": MOST_BYTES,
            "labelling": self.labelling
            and self.labelling.facts() | {"waiting": len(self.waiting), "lost": self.lost_names()},
        }

    def predict(self, request: dict[str, object]) -> dict[str, object]:
        """Classify an image.

        Return its most probable classes, whether it belongs to a known class at all, the class that it was learned
        as, if any, and a JPEG of it if browsers cannot show its format.
        """
        (image,) = uploaded_images(request, 1)
        images, area = unlabelled_images(image), self.learner.classifier.roc_area
        try:
            reject = None if area is not None and area < HARDLY else REJECT
            (prediction,) = self.learner.predictions(images, Query(SHOWN, reject, **self.possible()))
        except ValueError:  # too few images were held out to detect images of unknown classes
            (prediction,) = self.learner.predictions(images, Query(SHOWN, **self.possible()))
        pairs = zip(prediction.classes, prediction.probabilities, strict=True)
        best = [{"class": name, "probability": p} for name, p in pairs]
        (content,) = images.contents()
        shown = open_image(image).format in BROWSERS_SHOW
        return {
            "best": best,
            "known": bool(prediction.known),
            "learned": self.learner.state.known.class_of().get(content or b""),
            "picture": None if shown else f"data:image/jpeg;base64,{base64.b64encode(jpeg(image)).decode()}",
        }

    def teach(self, request: dict[str, object]) -> dict[str, object]:
        """Teach images of a known or new class. Images that were learned as another class are moved to this one."""
        name = self.class_of(request)
        if request.get("ask") and (question := self.question(name)):
            return self.facts() | {"ask": question}
        files = uploaded_images(request, MOST_IMAGES)
        self.table.check()
        self.finish()
        known, state, labels = name in self.learner.class_names, self.learner.state, dict(self.table.labels)
        given = state.known.regrouped(named_images([{"image": file, "label": 0} for file in files], [name]))
        rows, skipped = state.known.new_rows(given)
        contents = given.contents()
        moved = {contents[row]: row for row in skipped.pop("of another class", [])}
        why = "; ".join(f"{counted(len(which), 'photograph')} {reason}" for reason, which in skipped.items())
        if not rows and not moved:
            raise ValueError(f"nothing was learned: {why}")

        class_of = state.known.class_of()
        previous = Counter(class_of[content or b""] for content in moved)
        emptied = self.emptied(previous)

        def learn() -> None:
            stays = [files[row] for content, row in moved.items() if class_of[content or b""] not in emptied]
            if stays:
                self.learner.forget_images(stays)
            for other in emptied:
                self.learner.forget_class(other)
            (self.learner.update_classes if known else self.learner.learn_task)(given.at([*rows, *moved.values()]))

        self.change(learn)
        self.remember(f"{counted(len(rows) + len(moved), 'image')} of {name}", labels, state=state)
        self.trim()
        parts = [f"learned: {name}"] + [f"no longer: {', '.join(sorted(previous))}"] * bool(previous)
        return self.facts() | {"said": "; ".join(parts + [f"left out: {why}"] * bool(why))}

    def emptied(self, leaving: Counter[str]) -> list[str]:
        """Return the classes that have no image left without these numbers of theirs. Refuse to empty all classes."""
        counts = self.learner.state.image_counts()
        emptied = [name for name, number in leaving.items() if counts[name] == number]
        if len(emptied) == len(self.learner.class_names):
            raise ValueError(f"{emptied[0]!r} is the only class and would have no image left: rename it instead")
        return emptied

    def class_of(self, request: dict[str, object]) -> str:
        """Return the class of a request, in the spelling that is known if there is one. Refuse an invalid name."""
        name = request.get("class")
        if not isinstance(name, str) or not name.strip():
            raise ValueError("the class needs a name")
        name = known_spelling(name, self.known())
        if name not in self.learner.class_names and self.learner.strategy.adapts:
            raise ValueError(
                f"{name!r} is a new class, and this learner must be trained for new classes: use dulbe-peft learn"
            )
        return name

    def known(self) -> list[str]:
        """Return the learned classes and those of labels that wait."""
        labels = self.labelling.labels if self.labelling else {}
        return list(dict.fromkeys([*self.learner.class_names, *(labels[place] for place in self.waiting)]))

    def rename(self, request: dict[str, object]) -> dict[str, object]:
        """Rename a class. If the new name is that of another class, the two become one."""
        old, new = str(request.get("class")), self.class_of({"class": request.get("to")})
        return self.edit(f"{old} is now {new}", lambda: self.learner.rename_class(old, new), old, new)

    def forget(self, request: dict[str, object]) -> dict[str, object]:
        """Forget a class. Its photographs lose their labels."""
        name = str(request.get("class"))
        return self.edit(f"forgotten: {name}", lambda: self.learner.forget_class(name), name, None)

    def edit(self, words: str, make: Callable[[], object], old: str, new: str | None) -> dict[str, object]:
        """Rename the class `old`, or forget it, after the labels that wait have been learned.

        Labels of photographs that this server does not show, and that wait in the table, follow.
        """
        self.table.check()
        self.finish()
        if waits := [place for place in self.waiting if self.photographs().labels[place] == old]:
            name = self.photographs().images.item_name(waits[0])
            raise ValueError(f"the label of {name} waits, because its file is gone: put it back, or undo the label")
        state, labels = self.learner.state, dict(self.table.labels)

        def change() -> None:
            make()
            self.possible()
            self.table.rename({old: new})

        self.change(change)
        self.remember(words, labels, state=state)
        self.trim()
        if self.labelling is not None:
            self.labelling.follow()
        return self.facts() | {"said": words}

    def label(self, request: dict[str, object]) -> dict[str, object]:
        """Label a photograph of the folder. After every few labels, the learner learns them."""
        labelling, name, photo = self.photographs(), self.class_of(request), cast(int, request.get("photo"))
        if request.get("ask") and (question := self.question(name)):
            return self.facts() | {"ask": question}
        self.table.check()
        with self.kept():
            labelling.add_label(photo, name)
            self.remember(f"the label {name}", None, photo, name)
            self.table.write()
            self.learn_if_enough()
        self.trim()
        return self.facts() | {"said": f"{name}, {len(labelling.labels)} labelled"}

    def remember(
        self,
        words: str,
        labels: dict[bytes, Label] | None = None,
        photo: int | None = None,
        name: str | None = None,
        state: LearnerState | None = None,
    ) -> None:
        """Let the last change be undone, which is a label if it has a `name`. `labels` and `state` were before it."""
        label = {"photo": photo, "waits": bool(name), "none": name == ""}
        self.changes.append(Change(words, state or self.learner.state, labels=labels, **label))

    def learn_if_enough(self) -> None:
        """Learn the labels that wait if they are enough."""
        if len(self.waiting) - len(self.lost) >= FEW:
            self.finish()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Run the block. After an error, labels and changes are as before, and so is the table."""
        work, labels, changes = self.photographs(), dict(self.table.labels), list(self.changes)
        left, skipped = list(work.left), list(work.skipped)
        try:
            yield
        except BaseException:
            self.table.labels, self.changes, work.left, work.skipped = labels, changes, left, skipped
            with suppress(OSError, CheckpointError):  # the first error is the one to report
                self.table.write()
            raise

    def look(self, request: dict[str, object]) -> dict[str, object]:
        """Return the photographs of a list, see `gallery.listed`."""
        return listed(self.photographs(), request)

    def correct(self, request: dict[str, object]) -> dict[str, object]:
        """Give a photograph of the list another label, or take its label away, see `gallery.correct`."""
        return correct(self, request)

    def question(self, name: str) -> str:
        """Return what to ask a person before a new class is made, or "" if the class is known."""
        known = self.known()
        if name in known:
            return ""
        near = next(iter(get_close_matches(name, known, 1)), None)
        return f"new class {name!r}?" + (f" You have {near!r}." if near else "")

    def skip(self, request: dict[str, object]) -> dict[str, object]:
        """Move a photograph to the end."""
        self.photographs().skip(request.get("photo"))
        return self.facts() | {"said": "skipped"}

    def none(self, request: dict[str, object]) -> dict[str, object]:
        """Record that a photograph belongs to no class, so that it is not shown again."""
        photo = cast(int, request.get("photo"))  # `dismiss` checks it
        self.table.check()
        with self.kept():
            self.photographs().dismiss(photo)
            self.remember(NONE, None, photo, "")
            self.table.write()
        self.trim()
        return self.facts() | {"said": NONE}

    def photographs(self) -> Labelling:
        """Return the photographs to label. Raise a ValueError if there are none."""
        if self.labelling is None:
            raise ValueError("there are no photographs to label: start the server with --photos FOLDER")
        return self.labelling

    def finish(self) -> None:
        """Learn the labels that have not been learned yet. Those of photographs whose files are gone go on waiting."""
        if waiting := self.waiting:
            labelling, state = self.photographs(), self.learner.state
            self.lost = labelling.lost(waiting)
            places = [place for place in waiting if place not in self.lost]
            if places:
                self.change(lambda: labelling.learn(places))
            for change in self.changes:
                if change.photo in places:
                    change.state, change.waits = state, False
            labelling.sort()

    def lost_names(self) -> list[str]:
        """Return the paths of the labelled photographs that cannot be learned, because their files are gone."""
        return [self.photographs().images.item_name(place) for place in self.lost]

    def undo(self, request: dict[str, object]) -> dict[str, object]:
        """Undo the last change. If it was a label, the labels that were learned together with it wait again.

        A request that names another change as the `last` comes from a page that has not seen the last one.
        """
        if not self.changes:
            raise ValueError("there is nothing to undo")
        self.table.check()
        last = self.changes[-1]
        if request.get("last", last.number) != last.number:
            raise ValueError(f"the last change is another one now, {last.words}: reload the page")
        labels = dict(self.table.labels if last.labels is None else last.labels)
        if last.labels is None and last.photo is not None:
            labels.pop(self.photographs().content[last.photo], None)
        if last.waits or last.none:
            self.table.write(labels)
        else:
            self.change(lambda: self.learner.use_state(last.state), labels)
        self.changes.pop()
        if last.photo is not None and not last.waits and not last.none:
            for change in self.changes:
                if change.state is last.state and change.photo is not None and not change.none:
                    change.waits = True
        if self.labelling is not None:
            self.labelling.follow()
            self.lost = [place for place in self.lost if place in self.waiting]
        return self.facts() | {"said": f"undone: {last.words}"}

    def _last(self) -> dict[str, object] | None:
        """Return the number of the last change, and its photograph if it is a label."""
        if not self.changes:
            return None
        last = self.changes[-1]
        name = "" if last.photo is None else Path(self.photographs().images.item_name(last.photo)).name
        return {"number": last.number, "photograph": name}

    def change(self, make: Callable[[], object], given: dict[bytes, Label] | None = None) -> None:
        """Make a change and save it, and the labels with it. After an error, the learner is as before.

        The labels follow the learner, unless those after the change are `given`.
        """
        before, labels = self.learner.state, dict(self.table.labels)
        try:
            make()
            if given is None:
                self.table.follow(before.known.class_of(), self.learner.state.known.class_of())
            else:
                self.table.labels = given
            self.save()
        except BaseException:
            self.learner.use_state(before)
            self.table.labels = labels
            with suppress(OSError, CheckpointError):  # the first error is the one to report
                self.table.write()
            raise

    def save(self) -> None:
        """Save the labels and the learner, if there is an output folder.

        Raises:
            CheckpointError: If another program has changed the folder since the server read or wrote it.
        """
        if self.output is None:
            return
        if self.seen != self._manifest():
            raise CheckpointError(
                f"{self.output} was changed by another program: stop the server, and start it again with that learner"
            )
        self.table.write()
        self.learner.save_pretrained(self.output)
        self.saved_state, self.seen = self.learner.state, self._manifest()

    def _manifest(self) -> bytes | None:
        """Return the manifest of the learner in the output folder, or None if there is none."""
        file = Path(self.output or "", MANIFEST)
        return file.read_bytes() if self.output is not None and file.exists() else None

    def _differing(self) -> list[str]:
        """Return a sentence on labels in the table that were edited after their photographs had been learned."""
        learned = self.learner.state.known.class_of()
        found = [
            f"{label.path}, learned as {learned[key]!r}, is {label.name or NONE!r}"
            for key, label in self.table.labels.items()
            if key in learned and class_key(label.name) != class_key(learned[key])
        ]
        if not found:
            return []
        what = f"in {self.table.file}, {counted(len(found), 'label')} not used: {found[0]}"
        return [f"{what}; correct the photographs in the list on the page"]

    def trim(self) -> None:
        """Drop the oldest changes if there are more than undo keeps."""
        while len({id(change.state) for change in self.changes if not change.waits}) > MOST_UNDOS:
            self.changes.remove(next(change for change in self.changes if not change.waits))

    def download(self) -> bytes:
        """Return the folder that `save_pretrained` writes, as a zip archive."""
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root, "learner")
            self.learner.save_pretrained(folder)
            return Path(shutil.make_archive(str(folder), "zip", root, folder.name)).read_bytes()


def uploaded_images(request: dict[str, object], most: int) -> list[io.BytesIO]:
    """Decode the base64 images of a request. Raise a ValueError that says which image cannot be read, and why."""
    given = request.get("images")
    if not isinstance(given, list) or not 1 <= len(given) <= most:
        raise ValueError(f"`images` must be a list of {'one image' if most == 1 else f'1 to {most} images'} in base64")
    files = []
    for number, text in enumerate(given, start=1):
        try:
            files.append(io.BytesIO(base64.b64decode(text, validate=True)))
            width = height = 0
            with suppress(Exception):  # Pillow raises almost anything on damaged files; decoding says why
                width, height = header_of_file(files[-1]).size
            if width * height > MOST_PIXELS:
                limit = f"at most {MOST_PIXELS:,} are read here; use dulbe-peft predict or learn"
                raise ValueError(f"it has {width} x {height} pixels: {limit}")
            decode_image(files[-1])
        except (TypeError, ValueError) as error:
            raise ValueError(f"image {number} cannot be read: {error}") from error
    return files
