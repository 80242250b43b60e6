"""`dulbe-peft predict`: the best classes of images that nobody has labelled."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterable, Iterator
from typing import IO, TYPE_CHECKING, Any

from dulbe_peft.commands.loading import add_learner, load_learner
from dulbe_peft.commands.outputs import check_outputs, output_file
from dulbe_peft.commands.parser import Parser

if TYPE_CHECKING:  # torch is imported by the commands that need it
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


def add(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser: Parser = commands.add_parser("predict", help="name the classes of images", epilog=EXAMPLE)
    add_learner(parser)
    parser.add_argument(
        "paths",
        nargs="+",
        metavar="PATH",
        help="image file or folder; - reads an image, or paths, from standard input",
    )
    parser.add_argument("--top-k", type=int, default=1, help="how many classes for each image (%(default)s)")
    parser.add_argument("--csv", metavar="FILE", help="write path, class, probability; - is standard output")
    parser.add_argument("--json", metavar="FILE", help="write the same as JSON; - is standard output")
    parser.add_argument("--reject", type=float, metavar="SHARE", help='answer "none of these"; accepted false alarms')
    parser.set_defaults(call=predict)


def predict(arguments: argparse.Namespace) -> int:
    """Write the answers; returns 2 where no image could be read."""
    from dulbe_peft.data.inventory import counted

    check_outputs(("--csv", arguments.csv, ".csv"), ("--json", arguments.json, ".json"))
    images = list(_images(arguments.paths))
    if not images:
        raise ValueError("standard input is empty: neither an image nor a path is there")
    workers = min(8, os.cpu_count() or 1)  # with a small model, reading files takes longer than the model does
    many = len(images) > 64 or any(os.path.isdir(path) for path in arguments.paths)
    learner = load_learner(arguments, num_workers=workers if many else 0)
    rows = learner.predictions(images, arguments.top_k, arguments.reject)
    for row in rows:
        if row.error is not None:
            print(f"dulbe-peft: {row.image} cannot be read: {row.error}", file=sys.stderr)
    read = [row for row in rows if row.error is None]
    if arguments.csv:
        with output_file(arguments.csv) as file:
            _write_csv(file, read)
    if arguments.json:
        with output_file(arguments.json) as file:
            json.dump([_as_json(row) for row in rows], file, indent=1, ensure_ascii=False)
            file.write("\n")
    if not arguments.csv and not arguments.json:
        for row in read:
            print(_line(row))
    unread, refused = len(rows) - len(read), sum(not row.known for row in read)
    if arguments.csv or arguments.json or unread or arguments.reject is not None:
        parts = [counted(len(read), "image")]
        parts += [f"{refused} of them {NONE}"] * (arguments.reject is not None)
        parts += [f"{unread} could not be read"] * bool(unread)
        files = [file for file in (arguments.csv, arguments.json) if file not in (None, "-")]
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
