"""Answer the requests of the page: predictions, and changes that are saved and can be undone."""

import base64
import io
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dulbe_peft.classifiers.calibration import HARDLY
from dulbe_peft.data.decoding import decode_image, open_image
from dulbe_peft.data.images import named_images
from dulbe_peft.data.names import check_class_names
from dulbe_peft.data.unlabelled import unlabelled_images
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.photos.serving.labelling import FEW, Labelling, jpeg
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils.terminal import counted

MOST_BYTES = 64 * 2**20  # size of an upload
MOST_IMAGES = 200  # images in an upload
SHOWN = 5  # classes in a prediction
REJECT = 0.05  # accepted share of false alarms for "none of these"
MOST_UNDOS = 20  # states that undo can return to; each of them keeps the classifiers in memory
BROWSERS_SHOW = {"JPEG", "PNG", "WEBP", "GIF", "BMP"}


@dataclass
class Change:
    """A change that can be undone.

    A label `waits` until it is learned together with others; then `state` becomes the state before they were learned.
    """

    words: str
    state: LearnerState  # before the change
    photo: int | None = None  # the photograph of the folder that was labelled, if the change is a label
    waits: bool = False  # whether a label has not been learned yet
    none: bool = False  # whether the label is "none of these", which is not learned


class App:
    """Answers the requests of the page. Each change is saved in the folder `output`, if given, before the answer."""

    def __init__(
        self, learner: ClassIncrementalLearner, output: str | Path | None = None, photographs: str | Path | None = None
    ) -> None:
        self.learner, self.output = learner, output
        self.labelling = None if photographs is None else Labelling(learner, photographs)
        self.saved_state = learner.state
        self.changes: list[Change] = []
        self.lock = threading.Lock()

    @property
    def waiting(self) -> list[int]:
        """Return the photographs whose labels have not been learned yet."""
        return [change.photo for change in self.changes if change.photo is not None and change.waits]

    @property
    def unsaved(self) -> bool:
        """Return whether there are changes that have not been saved."""
        return self.learner.state is not self.saved_state or bool(self.waiting)

    def facts(self) -> dict[str, Any]:
        """Return what the page shows: the classes and their image counts, the last change, and what is saved."""
        state = self.learner.state
        return {
            "classes": list(state.class_names),
            "counts": state.image_counts(),
            "classifier": state.classifier.name,
            "doubt": state.doubt,
            "teachable": not state.strategy.adapts,
            "undo": self.changes[-1].words if self.changes else None,
            "output": None if self.output is None else str(self.output),
            "unsaved": self.unsaved,
            "most_bytes": MOST_BYTES,
            "labelling": self.labelling and self.labelling.facts() | {"waiting": len(self.waiting)},
        }

    def predict(self, request: dict[str, Any]) -> dict[str, Any]:
        """Classify an image.

        Return its most probable classes, whether it belongs to a known class at all, the class that it was learned
        as, if any, and a JPEG of it if browsers cannot show its format.
        """
        (image,) = uploaded_images(request, 1)
        images, area = unlabelled_images(image), self.learner.classifier.roc_area
        try:
            reject = None if area is not None and area < HARDLY else REJECT
            (prediction,) = self.learner.predictions(images, SHOWN, reject=reject)
        except ValueError:  # too few images were held out to detect images of unknown classes
            (prediction,) = self.learner.predictions(images, SHOWN)
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

    def teach(self, request: dict[str, Any]) -> dict[str, Any]:
        """Teach images of a known or new class. Images that were learned as another class are moved to this one."""
        name, files = self.class_of(request), uploaded_images(request, MOST_IMAGES)
        self.finish()
        known, state = name in self.learner.class_names, self.learner.state
        given = named_images([{"image": file, "label": 0} for file in files], [name])
        rows, skipped = state.known.new_rows(given)
        contents = given.contents()
        moved = {contents[row]: row for row in skipped.pop("of another class", [])}
        why = "; ".join(f"{counted(len(which), 'photograph')} {reason}" for reason, which in skipped.items())
        if not rows and not moved:
            raise ValueError(f"nothing was learned: {why}")

        class_of = state.known.class_of()
        previous = Counter(class_of[content or b""] for content in moved)
        counts = state.image_counts()
        emptied = [other for other, number in previous.items() if counts[other] == number]
        if len(emptied) == len(self.learner.class_names):
            raise ValueError(f"{emptied[0]!r} is the only class and would have no image left: rename it instead")

        def learn() -> None:
            stays = [files[row] for content, row in moved.items() if class_of[content or b""] not in emptied]
            if stays:
                self.learner.forget_images(stays)
            for other in emptied:
                self.learner.forget_class(other)
            (self.learner.update_classes if known else self.learner.learn_task)(given.at([*rows, *moved.values()]))

        self.change(learn)
        self.changes.append(Change(f"{counted(len(rows) + len(moved), 'image')} of {name}", state))
        self.trim()
        parts = [f"learned: {name}"] + [f"no longer: {', '.join(sorted(previous))}"] * bool(previous)
        return self.facts() | {"said": "; ".join(parts + [f"left out: {why}"] * bool(why))}

    def class_of(self, request: dict[str, Any]) -> str:
        """Return the class name of a request. Raise a ValueError if it is invalid or cannot be learned."""
        name = request.get("class")
        if not isinstance(name, str) or not name.strip():
            raise ValueError("the class needs a name")
        (name,) = check_class_names([name.strip()])
        waiting = self.labelling.labels.values() if self.labelling else ()
        check_class_names([name], {*self.learner.class_names, *waiting} - {name})  # refuse another spelling
        if name not in self.learner.class_names and self.learner.strategy.adapts:
            raise ValueError(
                f"{name!r} is a new class, and this learner must be trained for new classes: use dulbe-peft learn"
            )
        return name

    def label(self, request: dict[str, Any]) -> dict[str, Any]:
        """Label a photograph of the folder. After every few labels, the learner learns them."""
        labelling, name, photo = self.photographs(), self.class_of(request), request.get("photo")
        labelling.add_label(photo, name)
        self.changes.append(Change(f"the label {name}", self.learner.state, photo, waits=True))
        try:
            if len(self.waiting) >= FEW:
                self.finish()
        except BaseException:
            self.changes.pop()
            labelling.undo_label(photo)
            raise
        self.trim()
        return self.facts() | {"said": f"{name}, {len(labelling.labels)} labelled"}

    def skip(self, request: dict[str, Any]) -> dict[str, Any]:
        """Move a photograph to the end."""
        self.photographs().skip(request.get("photo"))
        return self.facts() | {"said": "skipped"}

    def none(self, request: dict[str, Any]) -> dict[str, Any]:
        """Record that a photograph belongs to no class, so that it is not shown again."""
        photo = request.get("photo")
        self.photographs().dismiss(photo)
        self.changes.append(Change("none of these", self.learner.state, photo, none=True))
        self.trim()
        return self.facts() | {"said": "none of these"}

    def photographs(self) -> Labelling:
        """Return the photographs to label. Raise a ValueError if there are none."""
        if self.labelling is None:
            raise ValueError("there are no photographs to label: start the server with --photos FOLDER")
        return self.labelling

    def finish(self) -> None:
        """Learn the labels that have not been learned yet."""
        if places := self.waiting:
            labelling, state = self.photographs(), self.learner.state
            self.change(lambda: labelling.learn(places))
            for change in self.changes:
                if change.waits:
                    change.state, change.waits = state, False
            labelling.sort()

    def undo(self, request: dict[str, Any]) -> dict[str, Any]:
        """Undo the last change. If it was a label, the labels that were learned together with it wait again."""
        if not self.changes:
            raise ValueError("there is nothing to undo")
        last = self.changes[-1]
        if not last.waits and not last.none:
            self.change(lambda: self.learner.use_state(last.state))
        self.changes.pop()
        if last.photo is not None:
            self.photographs().undo_label(last.photo)
            if not last.waits and not last.none:
                for change in self.changes:
                    change.waits = change.photo is not None and not change.none and change.state is last.state
        return self.facts() | {"said": f"undone: {last.words}"}

    def change(self, make: Callable[[], Any]) -> None:
        """Make a change and save it. After an error, the learner is as before."""
        before = self.learner.state
        try:
            make()
            if self.output is not None:
                self.learner.save_pretrained(self.output)
                self.saved_state = self.learner.state
        except BaseException:
            self.learner.use_state(before)
            raise

    def trim(self) -> None:
        """Drop the oldest changes if there are more than undo keeps."""
        while len({id(change.state) for change in self.changes}) > MOST_UNDOS:
            del self.changes[0]

    def download(self) -> bytes:
        """Return the folder that `save_pretrained` writes, as a zip archive."""
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root, "learner")
            self.learner.save_pretrained(folder)
            return Path(shutil.make_archive(str(folder), "zip", root, folder.name)).read_bytes()


def uploaded_images(request: dict[str, Any], most: int) -> list[io.BytesIO]:
    """Decode the base64 images of a request. Raise a ValueError that says which image cannot be read, and why."""
    given = request.get("images")
    if not isinstance(given, list) or not 1 <= len(given) <= most:
        raise ValueError(f"`images` must be a list of {'one image' if most == 1 else f'1 to {most} images'} in base64")
    files = []
    for number, text in enumerate(given, start=1):
        try:
            files.append(io.BytesIO(base64.b64decode(text, validate=True)))
            decode_image(files[-1])
        except (TypeError, ValueError) as error:
            raise ValueError(f"image {number} cannot be read: {error}") from error
    return files
