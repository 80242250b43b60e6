"""The changes that are made on the page: each is saved before the answer, and can be undone."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any

from dulbe_peft.data.names import NONE, class_key
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.photos.serving.label_table import LABELS_FILE, Label, LabelTable
from dulbe_peft.photos.serving.labelling import FEW, Labelling
from dulbe_peft.streams.progress import renamed_classes
from dulbe_peft.training.state import LearnerState
from dulbe_peft.utils.folders import MANIFEST, CheckpointError
from dulbe_peft.utils.terminal import counted

MOST_UNDOS = 20  # states that undo can return to; each of them keeps the classifiers in memory


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


class Changes:
    """A learner and the labels of photographs, which change together. After an error, both are as before.

    Each change is saved in the folder `output`, if given.
    """

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
        if self.labelling is not None:
            learned, places = learner.state.known.class_of(), self.labelling.places
            for key, label in self.table.labels.items():
                if key in places and key not in learned:
                    self.remember(f"the label {label.name}" if label.name else NONE, None, places[key], label.name)
        if self.output is not None and self.labelling is not None and not Path(self.output).exists():
            self.save()  # the table of labels needs a place from the first label on
        self.begun = token_hex(8)  # tells requests of a page that an earlier server sent
        self.notes = self._differing()  # sentences for the person who starts the server
        self.lock = threading.Lock()

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

    def emptied(self, leaving: Counter[str]) -> list[str]:
        """Return the classes that have no image left without these numbers of theirs. Refuse to empty all classes."""
        counts = self.learner.state.image_counts()
        emptied = [name for name, number in leaving.items() if counts[name] == number]
        if len(emptied) == len(self.learner.class_names):
            raise ValueError(f"{emptied[0]!r} is the only class and would have no image left: rename it instead")
        return emptied

    def remember(
        self,
        words: str,
        labels: dict[bytes, Label] | None = None,
        photo: int | None = None,
        name: str | None = None,
        state: LearnerState | None = None,
    ) -> None:
        """Let the last change be undone, which is a label if it has a `name`. `labels` and `state` were before it."""
        self.changes.append(Change(words, state or self.learner.state, photo, bool(name), name == "", labels))

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

    def trim(self) -> None:
        """Drop the oldest changes if there are more than undo keeps."""
        while len({id(change.state) for change in self.changes if not change.waits}) > MOST_UNDOS:
            self.changes.remove(next(change for change in self.changes if not change.waits))

    def undo_last(self, number: object) -> str:
        """Undo the last change, and return what it was. If it was a label, those learned together with it wait again.

        `number` is that of the last change that the person has seen, or None.
        """
        if not self.changes:
            raise ValueError("there is nothing to undo")
        self.table.check()
        last = self.changes[-1]
        if number not in (None, last.number):
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
        return last.words
