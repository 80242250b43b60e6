"""`dulbe-peft predict`: the best classes of images that nobody has labelled."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any

from dulbe_peft.commands.options import argument, command, learner_options, option
from dulbe_peft.commands.outputs import check_outputs, output_file

if TYPE_CHECKING:  # torch is imported by the commands that need it
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.metrics.prediction import Prediction

EXAMPLE = """examples:
  dulbe-peft predict out photo.jpg
  dulbe-peft predict out holidays --top-k 3 --csv holidays.csv
  find . -name '*.jpg' | dulbe-peft predict out -

Folders are read at any depth. A file that cannot be read is reported on standard error and
stepped over. With --reject 0.05, an image is "none of these" where its best probability is below
that of all but 5 % of the training images that were held back. `dulbe-peft evaluate --reject`
measures how many images of known classes that refuses.
"""
NONE = "none of these"


@command(EXAMPLE)
@learner_options()
@argument("paths", "image files or folders; -: an image or paths on standard input", nargs=-1, required=True)
@option("--top-k", type=int, default=1, help="how many classes for each image (1)")
@option("--csv", metavar="FILE", help="write path, class, probability; - is standard output")
@option("--json", "json_file", metavar="FILE", help="write the same as JSON; - is standard output")
@option("--reject", type=float, metavar="SHARE", help='answer "none of these"; accepted false alarms')
def predict(
    learner: str,
    load: Callable[..., ClassIncrementalLearner],
    paths: tuple[str, ...],
    top_k: int,
    csv: str | None,
    json_file: str | None,
    reject: float | None,
) -> int:
    """Write the answers; returns 2 where no image could be read."""
    from dulbe_peft.data.inventory import counted

    check_outputs(("--csv", csv, ".csv"), ("--json", json_file, ".json"))
    images = list(_images(paths))
    if not images:
        raise ValueError("standard input is empty: neither an image nor a path is there")
    workers = min(8, os.cpu_count() or 1)  # with a small model, reading files takes longer than the model does
    many = len(images) > 64 or any(os.path.isdir(path) for path in paths)
    rows = load(num_workers=workers if many else 0).predictions(images, top_k, reject)
    for row in rows:
        if row.error is not None:
            print(f"dulbe-peft: {row.image} cannot be read: {row.error}", file=sys.stderr)
    read = [row for row in rows if row.error is None]
    if csv:
        with output_file(csv) as file:
            _write_csv(file, read)
    if json_file:
        with output_file(json_file) as file:
            print(json.dumps([_as_json(row) for row in rows], indent=1, ensure_ascii=False), file=file)
    if not csv and not json_file:
        for row in read:
            print(_line(row))
    unread, refused = len(rows) - len(read), sum(not row.known for row in read)
    if csv or json_file or unread or reject is not None:
        parts = [counted(len(read), "image")]
        parts += [f"{refused} of them {NONE}"] * (reject is not None)
        parts += [f"{unread} could not be read"] * bool(unread)
        files = [file for file in (csv, json_file) if file not in (None, "-")]
        print(", ".join(parts) + (f"; written: {' and '.join(files)}" if files else ""), file=sys.stderr)
    return 0 if read else 2


def _images(paths: Iterable[str]) -> Iterator[Any]:
    """The paths, with the image or the paths that standard input holds in place of "-"."""
    from PIL import UnidentifiedImageError

    from dulbe_peft.data.decoding import open_image

    for path in paths:
        if path != "-":
            yield path
            continue
        data = sys.stdin.buffer.read()
        file: Any = io.BytesIO(data)
        file.name = "standard input"
        try:
            open_image(file)
            listed = False
        except UnidentifiedImageError:
            listed = b"\0" not in data  # which no path has
        if listed:
            yield from (os.fsdecode(line.rstrip(b"\r")) for line in data.split(b"\n") if line.strip())
        else:
            yield file


def _line(row: Prediction) -> str:
    names = [f"{name} {100 * p:.2f} %" for name, p in zip(row.classes, row.probabilities, strict=True)]
    if not row.known:
        names = [f"{NONE} (best: {names[0]})"]
    return "\t".join([row.image, *names])


def _write_csv(file: IO[str], rows: Iterable[Prediction]) -> None:
    """One line for each class of each image; an unknown image has one line, without a class."""
    from dulbe_peft.utils.files import write_rows

    lines: list[list[Any]] = []
    for row in rows:
        answers = list(zip(row.classes, row.probabilities, strict=True)) if row.known else [("", row.probabilities[0])]
        lines += [[row.image, name, f"{probability:.6f}"] for name, probability in answers]
    write_rows(file, ["path", "class", "probability"], lines)


def _as_json(row: Prediction) -> dict[str, Any]:
    if row.error is not None:
        return {"path": row.image, "error": row.error}
    answers = [{"class": n, "probability": p} for n, p in zip(row.classes, row.probabilities, strict=True)]
    return {"path": row.image, "known": row.known, "classes": answers}
