"""Answer the requests of the page: predictions, and changes that are saved and can be undone."""

import base64
import io
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path

from dulbe_peft.arguments import Query
from dulbe_peft.classifiers.calibration import HARDLY
from dulbe_peft.data.decoding import decode_image, header_of_file, open_image
from dulbe_peft.data.images import named_images
from dulbe_peft.data.names import NONE
from dulbe_peft.data.unlabelled import unlabelled_images
from dulbe_peft.photos.report.html import jpeg_address
from dulbe_peft.photos.serving.changes import Changes
from dulbe_peft.photos.serving.gallery import correct, listed
from dulbe_peft.photos.serving.labelling import jpeg, known_spelling
from dulbe_peft.utils.terminal import counted

MOST_BYTES = 64 * 2**20  # size of an upload
MOST_PIXELS = 2**26  # of an uploaded image; a file of 20 KiB can have nearly three times as many
MOST_IMAGES = 200  # images in an upload
SHOWN = 5  # classes in a prediction
REJECT = 0.05  # accepted share of false alarms for "none of these"
BROWSERS_SHOW = {"JPEG", "PNG", "WEBP", "GIF", "BMP"}


class App(Changes):
    """Answers the requests of the page. Each change is saved in the folder `output`, if given, before the answer."""

    def undo(self, request: dict[str, object]) -> dict[str, object]:
        """Undo the last change. A page that has not seen it names another one as its `last`."""
        words = self.undo_last(request.get("last"))
        return self.facts() | {"said": f"undone: {words}"}

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
            "picture": None if shown else jpeg_address(jpeg(image)),
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
        labelling, name = self.photographs(), self.class_of(request)
        if request.get("ask") and (question := self.question(name)):
            return self.facts() | {"ask": question}
        self.table.check()
        with self.kept():
            photo = labelling.add_label(request.get("photo"), name)
            self.remember(f"the label {name}", None, photo, name)
            self.table.write()
            self.learn_if_enough()
        self.trim()
        return self.facts() | {"said": f"{name}, {len(labelling.labels)} labelled"}

    def look(self, request: dict[str, object]) -> dict[str, object]:
        """Return the photographs of a list, see `gallery.listed`."""
        return listed(self.photographs(), request)

    def correct(self, request: dict[str, object]) -> dict[str, object]:
        """Give a photograph of the list the label `class`: "" is "none of these", and None takes its label away."""
        given, identity = request.get("class"), request.get("id")
        key = bytes.fromhex(identity) if isinstance(identity, str) else b""
        name = self.class_of(request) if given else None if given is None else ""
        if name and request.get("ask") and (question := self.question(name)):
            return self.facts() | {"ask": question}
        self.photographs()
        words = correct(self, key, name)
        return self.facts() | {"said": words}

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
        self.table.check()
        with self.kept():
            photo = self.photographs().dismiss(request.get("photo"))
            self.remember(NONE, None, photo, "")
            self.table.write()
        self.trim()
        return self.facts() | {"said": NONE}

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
