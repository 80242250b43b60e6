"""Keep the labels that a person gives in a CSV file, so that no label depends on the life of the server."""

import io
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from dulbe_peft.data.names import class_key
from dulbe_peft.data.tables import csv_lines
from dulbe_peft.utils.files import replacing, write_rows
from dulbe_peft.utils.folders import CheckpointError

LABELS_FILE = "labels.csv"  # in the folder of the learner that is taught
HEADER = ["path", "label", "sha256"]


@dataclass(frozen=True)
class Label:
    """What a person said about a photograph: its absolute path and its class, which is "" for "none of these"."""

    path: str
    name: str


class LabelTable:
    """The labels that were given, by the SHA-256 of each photograph's bytes, in the order in which they were given.

    With a `file`, `write` keeps them there. It refuses to replace a file that another program has changed meanwhile.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.file, self.labels = file, dict[bytes, Label]()
        self._written: bytes | None = None
        if file is not None and file.exists():
            self._written = file.read_bytes()
            self.labels = _read(file)

    def content(self) -> bytes:
        """Return the table as CSV with the columns path, label and sha256."""
        text = io.StringIO(newline="")
        write_rows(text, HEADER, [[label.path, label.name, key.hex()] for key, label in self.labels.items()])
        return text.getvalue().encode("utf-8", "surrogateescape")

    def write(self, labels: dict[bytes, Label] | None = None) -> None:
        """Write the table completely, or raise an error and leave the file as it was.

        `labels`, if given, replace those of the table, unless there is an error.

        Raises:
            CheckpointError: If another program has changed or removed the file since it was read or written.
            OSError: If the file cannot be written.
        """
        self.check()
        before = self.labels
        self.labels = before if labels is None else labels
        try:
            content = self.content()
            if self.file is not None and content != self._written and (self.labels or self._written is not None):
                with replacing(self.file) as temporary:
                    temporary.write_bytes(content)
                self._written = content
        except BaseException:
            self.labels = before
            raise

    def check(self) -> None:
        """Raise a CheckpointError if another program has changed or removed the file since it was read or written."""
        if self.file is not None and self._written != (self.file.read_bytes() if self.file.exists() else None):
            raise CheckpointError(
                f"{self.file} was changed or removed by another program: stop the server, check the file, and start "
                "the server again, which reads it"
            )

    def follow(self, before: Mapping[bytes, str], after: Mapping[bytes, str]) -> None:
        """Take over a change of the learner: its images' classes `before` and `after` it, by SHA-256.

        A photograph that was learned and is in another class now has that label. One whose class was forgotten loses
        its label.
        """
        for key, name in before.items():
            if key in self.labels and after.get(key) != name:
                if key in after:
                    self.labels[key] = replace(self.labels[key], name=after[key])
                elif self.labels[key].name == name and name not in after.values():
                    del self.labels[key]

    def rename(self, names: Mapping[str, str | None]) -> None:
        """Give all labels the new names of their classes, also those that wait; None removes a forgotten class."""
        new, kept = {class_key(old): name for old, name in names.items()}, dict[bytes, Label]()
        for key, label in self.labels.items():
            name = new.get(class_key(label.name), label.name) if label.name else ""
            if name is not None:
                kept[key] = replace(label, name=name)
        self.labels = kept


def carry_labels(source: str, output: str, names: Mapping[str, str | None], forgotten: Container[bytes] = ()) -> None:
    """Write the labels that were kept beside the learner `source` beside its corrected copy in `output`.

    They follow the correction: `names` has the new name of each renamed class, and None for a forgotten one, and the
    labels of `forgotten` photographs are left out. Otherwise a server of the copy would learn them again.
    """
    file = Path(source, LABELS_FILE)
    if not file.is_file():
        return
    table = LabelTable(file)
    table.rename(names)
    carried = {key: label for key, label in table.labels.items() if key not in forgotten}
    LabelTable(Path(output, LABELS_FILE)).write(carried)


def _read(file: Path) -> dict[bytes, Label]:
    """Return the labels in a file that `LabelTable.write` wrote; its labels may have been edited since."""
    try:
        header, *rows = csv_lines(file) or [HEADER]
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    if header != HEADER:
        raise CheckpointError(
            f"{file} has the columns {', '.join(header)}, expected {', '.join(HEADER)}: move it away"
        )
    labels = dict[bytes, Label]()
    for number, row in enumerate(rows, start=2):
        try:
            path, name, digest = row
            key = bytes.fromhex(digest)
            if len(key) != 32:
                raise ValueError
        except ValueError:
            problem = f"{file} line {number} is {','.join(row)!r:.200}"
            raise CheckpointError(f"{problem}, expected a path, a label and a SHA-256 of 64 digits") from None
        if key in labels and labels[key].name != name:
            raise CheckpointError(f"{file} line {number} labels a photograph a second time, in another class: {path}")
        labels[key] = Label(path, name)
    return labels
