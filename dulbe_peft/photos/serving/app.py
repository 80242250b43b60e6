"""What the page can ask for: answers, and changes that are saved or taken back."""

import base64
import io
import shutil
import tempfile
import threading
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

MOST_BYTES = 64 * 2**20  # of one upload
MOST_IMAGES = 200  # of one upload
SHOWN = 5  # classes of an answer
REJECT = 0.05  # false alarms accepted for "none of these"
MOST_UNDOS = 20  # states that an undo can lead back to; each keeps what the classifiers were
BROWSERS_SHOW = {"JPEG", "PNG", "WEBP", "GIF", "BMP"}


@dataclass
class Change:
    """What was done, the state before it, and the photograph of the folder that was labelled, if that was it.

    A label `waits` until it is learned with others, from the state that is then `state`. A photograph of no class
    (`none`) changes no state.
    """

    words: str
    state: LearnerState
    photo: int | None = None
    waits: bool = False
    none: bool = False


class App:
    """What the page can ask for, one request at a time; a change is saved in `output`, if any, before an answer."""

    def __init__(
        self, learner: ClassIncrementalLearner, output: str | Path | None = None, photographs: str | Path | None = None
    ) -> None:
        self.learner, self.output = learner, output
        self.labelling = None if photographs is None else Labelling(learner, photographs)
        self.kept = learner.state  # what is on a disk
        self.before: list[Change] = []
        self.turn = threading.Lock()

    @property
    def waiting(self) -> list[int]:
        """Photographs whose labels are not learned yet."""
        return [one.photo for one in self.before if one.photo is not None and one.waits]

    @property
    def unsaved(self) -> bool:
        """Whether the learner is another one than any folder or download holds."""
        return self.learner.state is not self.kept or bool(self.waiting)

    def facts(self) -> dict[str, Any]:
        """The classes, their images, whether new classes can be added, what an undo takes back, and what is saved."""
        state = self.learner.state
        return {
            "classes": list(state.class_names),
            "counts": state.image_counts(),
            "classifier": state.classifier.name,
            "teachable": not state.strategy.adapts,
            "undo": self.before[-1].words if self.before else None,
            "output": None if self.output is None else str(self.output),
            "unsaved": self.unsaved,
            "most_bytes": MOST_BYTES,
            "labelling": self.labelling and self.labelling.facts() | {"waiting": len(self.waiting)},
        }

    def predict(self, request: dict[str, Any]) -> dict[str, Any]:
        """The best classes of an image, whether it is one at all, as which it was learned, and a JPEG for browsers."""
        (image,) = pictures(request, 1)
        images, area = unlabelled_images(image), self.learner.classifier.roc_area
        try:
            reject = None if area is not None and area < HARDLY else REJECT
            (found,) = self.learner.predictions(images, SHOWN, reject=reject)
        except ValueError:  # too few images were held back to say what is none of the classes
            (found,) = self.learner.predictions(images, SHOWN)
        best = [{"class": name, "probability": p} for name, p in zip(found.classes, found.probabilities, strict=True)]
        (content,) = images.contents()
        shown = open_image(image).format in BROWSERS_SHOW
        return {
            "best": best,
            "known": bool(found.known),
            "learned": self.learner.state.known.class_of().get(content or b""),
            "picture": None if shown else f"data:image/jpeg;base64,{base64.b64encode(jpeg(image)).decode()}",
        }

    def teach(self, request: dict[str, Any]) -> dict[str, Any]:
        """Give images to a class, a known or a new one; one that was learned as another class is taken out of that."""
        name, files = self.named(request), pictures(request, MOST_IMAGES)
        self.finish()
        known, state = name in self.learner.class_names, self.learner.state
        given = named_images([{"image": file, "label": 0} for file in files], [name])
        rows, twice = state.known.new_rows(given)
        contents = given.contents()
        moved = {contents[row]: row for row in twice.pop("of another class", [])}
        why = "; ".join(f"{counted(len(which), 'photograph')} {reason}" for reason, which in twice.items())
        if not rows and not moved:
            raise ValueError(f"nothing was learned: {why}")

        def learn() -> None:
            if moved:
                self.learner.forget_images([files[row] for row in moved.values()])
            (self.learner.update_classes if known else self.learner.learn_task)(given.at([*rows, *moved.values()]))

        self.change(learn)
        self.before.append(Change(f"{counted(len(rows) + len(moved), 'image')} of {name}", state))
        self.trim()
        were = {state.known.class_of()[content or b""] for content in moved}
        parts = [f"learned: {name}"] + [f"no longer: {', '.join(sorted(were))}"] * bool(were)
        return self.facts() | {"said": "; ".join(parts + [f"left out: {why}"] * bool(why))}

    def named(self, request: dict[str, Any]) -> str:
        """The class of a request, a known one or one that can be learned."""
        name = request.get("class")
        if not isinstance(name, str) or not name.strip():
            raise ValueError("the class needs a name")
        (name,) = check_class_names([name.strip()])
        waits = self.labelling.labels.values() if self.labelling else ()
        check_class_names([name], {*self.learner.class_names, *waits} - {name})  # another spelling
        if name not in self.learner.class_names and self.learner.strategy.adapts:
            raise ValueError(f"{name!r} is a new class, for which this learner trains: use dulbe-peft learn")
        return name

    def label(self, request: dict[str, Any]) -> dict[str, Any]:
        """Say of which class a photograph of the folder is; after each few, the learner has learned them."""
        work, name, photo = self.photographs(), self.named(request), request.get("photo")
        work.say(photo, name)
        self.before.append(Change(f"the label {name}", self.learner.state, photo, waits=True))
        try:
            if len(self.waiting) >= FEW:
                self.finish()
        except BaseException:
            self.before.pop()
            work.unsay(photo)
            raise
        self.trim()
        return self.facts() | {"said": f"{name}, {len(work.labels)} labelled"}

    def skip(self, request: dict[str, Any]) -> dict[str, Any]:
        """Leave a photograph for the end."""
        self.photographs().skip(request.get("photo"))
        return self.facts() | {"said": "skipped"}

    def none(self, request: dict[str, Any]) -> dict[str, Any]:
        """Note that a photograph is of no class, so that it is not asked about again."""
        photo = request.get("photo")
        self.photographs().dismiss(photo)
        self.before.append(Change("none of these", self.learner.state, photo, none=True))
        self.trim()
        return self.facts() | {"said": "none of these"}

    def photographs(self) -> Labelling:
        """The photographs to label."""
        if self.labelling is None:
            raise ValueError("there are no photographs to label: start with --photos FOLDER")
        return self.labelling

    def finish(self) -> None:
        """Learn the labels that wait for others."""
        if places := self.waiting:
            work, state = self.photographs(), self.learner.state
            self.change(lambda: work.learn(places))
            for one in self.before:
                if one.waits:
                    one.state, one.waits = state, False
            work.sort()

    def undo(self, request: dict[str, Any]) -> dict[str, Any]:
        """Take the last label or other change back; labels that were learned with this one wait again."""
        if not self.before:
            raise ValueError("there is nothing to undo")
        last = self.before[-1]
        if not last.waits and not last.none:
            self.change(lambda: self.learner.use_state(last.state))
        self.before.pop()
        if last.photo is not None:
            self.photographs().unsay(last.photo)
            if not last.waits and not last.none:
                for one in self.before:
                    one.waits = one.photo is not None and not one.none and one.state is last.state
        return self.facts() | {"said": f"taken back: {last.words}"}

    def change(self, make: Callable[[], Any]) -> None:
        """Make a change and save it, or leave the learner as it was."""
        before = self.learner.state
        try:
            make()
            if self.output is not None:
                self.learner.save_pretrained(self.output)
                self.kept = self.learner.state
        except BaseException:
            self.learner.use_state(before)
            raise

    def trim(self) -> None:
        """Forget the oldest of too many changes."""
        while len({id(one.state) for one in self.before}) > MOST_UNDOS:
            del self.before[0]

    def download(self) -> bytes:
        """The learner as it is, as `save_pretrained` writes it, in a zip archive."""
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root, "learner")
            self.learner.save_pretrained(folder)
            return Path(shutil.make_archive(str(folder), "zip", root, folder.name)).read_bytes()


def pictures(request: dict[str, Any], most: int) -> list[io.BytesIO]:
    """The files of the images of a request, which come as base64; a ValueError says which cannot be read, and why."""
    given = request.get("images")
    if not isinstance(given, list) or not 1 <= len(given) <= most:
        raise ValueError(f"from 1 to {most} images can be sent at once")
    found = []
    for number, text in enumerate(given, start=1):
        try:
            found.append(io.BytesIO(base64.b64decode(text, validate=True)))
            decode_image(found[-1])
        except (TypeError, ValueError) as error:
            raise ValueError(f"image {number} cannot be read: {error}") from error
    return found
