"""examples:
  dulbe-peft predict out photo.jpg
  dulbe-peft predict out holidays --top-k 3 --csv holidays.csv
  dulbe-peft predict out holidays --sort-into sorted
  find . -name '*.jpg' | dulbe-peft predict out -

Folders are read at any depth. A file that cannot be read is reported on standard error and
stepped over. Answers are printed as they come, and the same command goes on with a table that
was interrupted. Novelty says how unlike all that was learned an image is. With
--reject 0.05, an image is "none of these" where its novelty is above that of all but 5 % of the
training images, each left out. `dulbe-peft evaluate --reject` measures how many images of known
classes that refuses. With --coverage 0.95, each image gets all classes that it may be of; the
right one is among them for 95 of 100 images of known classes.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from csv import writer
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dulbe_peft.commands.given import check_images
from dulbe_peft.commands.options import OVERWRITE, File, Folder, Load, Share, command, learner_options
from dulbe_peft.commands.outputs import FOLDER, as_flags, claim, say_next
from dulbe_peft.utils.files import is_stream, output_file, write_csv
from dulbe_peft.utils.settings import setting
from dulbe_peft.utils.terminal import printable

if TYPE_CHECKING:  # torch is imported by the commands that need it
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.metrics.prediction import Prediction
    from dulbe_peft.utils.tables import Kept

NONE = "none of these"
ROOT = "dulbe"  # of the keywords that are guesses, which tells them from a person's
HEADER = ["path", "class", "probability", "novelty"]


@command()
@learner_options(choose=True)
def predict(
    learner: str,
    load: Load,
    paths: tuple[str, ...] = setting(..., "images or folders; -: paths on standard input", place=True),
    top_k: int = setting(1, "how many classes for each image"),
    csv: File | None = setting(None, "write path, class, probability, novelty; - is standard output"),
    json_file: File | None = setting(None, "write the same as JSON; - is standard output", flag="--json"),
    exiftool: File | None = setting(None, "write keywords below `dulbe`, as `exiftool -csv+=FILE` takes them"),
    sort_into: Folder | None = setting(None, "copy each image into a folder of its class, and replace nothing"),
    reject: Share | None = setting(None, 'answer "none of these"; accepted false alarms'),
    coverage: Share | None = setting(None, "give so many classes that the right one is among them"),
    overwrite: bool = OVERWRITE,
) -> int:
    if coverage is not None and top_k != 1:
        raise ValueError(f"--top-k is {top_k} and --coverage {coverage}: give one of them")
    files = ("--csv", csv, ".csv"), ("--json", json_file, ".json"), ("--exiftool", exiftool, ".csv")
    claim(*files, reads=paths, overwrite=overwrite)
    claim(("--sort-into", sort_into, FOLDER), apart=paths)
    images = list(_images(paths))
    if not images:
        raise ValueError("standard input is empty: no path is there")
    check_images(images)
    many = len(images) > 64 or any(os.path.isdir(path) for path in paths)
    workers = min(8, os.cpu_count() or 1)  # with a small model, reading files takes longer than the model does
    loaded = load(num_workers=workers if many else 0)
    from dulbe_peft.metrics.prediction import Prediction
    from dulbe_peft.utils.tables import kept, sorted_folder

    how = {"top_k": top_k, "reject": reject, "coverage": coverage, "novelty": bool(csv or json_file)}
    _say_what_holds(loaded, reject)
    counts = Counter[str]()
    with ExitStack() as opened:
        copy = opened.enter_context(sorted_folder(sort_into)) if sort_into else None
        began = _facts(loaded, images, sort_into) | how
        table = opened.enter_context(kept(csv, began, overwrite)) if csv and not is_stream(csv) else None
        if table is not None:
            click.get_current_context().meta["kept"] = f"the answers so far are kept in {table.path}"
        before = table.done.items() if table else ()
        done = {name: Prediction(**row) for name, row in before if os.path.lexists(name)}  # else it is gone since then
        answers = dict(done)
        for found in _answers(loaded, images, table, how, named=csv is not None):
            counts.update(_tell(found, quiet=bool(csv or json_file or exiftool)))
            for row in found:
                answers[row.image] = row
                if row.error is None and copy is not None:  # before its line, which stands for the copy, too
                    copy(Path(row.image), row.classes[0] if row.known else NONE)
                if row.error is None and table is not None:
                    table.add(row.image, asdict(row))
        _write(list(answers.values()), csv, json_file, exiftool)
    written = [file for file in (csv, json_file, exiftool, sort_into) if file not in (None, "-")]
    if csv or json_file or exiftool or sort_into or counts["unread"] or reject is not None:
        _sum_up(counts, len(done), reject is not None, written)
    if written and sort_into is None and "-" not in paths:
        which = as_flags({"classifier": loaded.classifier.name} | ({} if reject is None else {"reject": reject}))
        say_next("predict", learner, *paths, *which, "--sort-into", "sorted", to=sys.stderr)
    return 0 if counts["known"] or counts["refused"] or done else 2


def _facts(learner: ClassIncrementalLearner, images: list[str], sort_into: str | None) -> dict[str, Any]:
    """What must be the same where a command goes on."""
    from dulbe_peft.utils.folders import json_sha256

    found = {"learner": learner.checksum, "classifier": learner.classifier.name}
    found["images"] = json_sha256([(image, os.path.abspath(image)) for image in images])
    return found | {"sort into": sort_into and os.path.realpath(sort_into)}


def _write(rows: list[Prediction], csv: str | None, json_file: str | None, exiftool: str | None) -> None:
    """Write all answers into the files that are asked for."""
    if csv:
        write_csv(csv, HEADER, chain.from_iterable(map(_lines, rows)), errors="surrogateescape")
    if json_file:
        with output_file(json_file) as file:
            print(json.dumps([_as_json(row) for row in rows], indent=1, ensure_ascii=False), file=file)
    if exiftool:  # which takes paths as they are: no apostrophe guards a formula
        from dulbe_peft.data.labels import exiftool_rows

        keywords = exiftool_rows(
            [(row.image, row.classes[0]) for row in rows if row.error is None and row.known], ROOT
        )
        with output_file(exiftool) as file:
            writer(file).writerows(keywords)


def _tell(found: list[Prediction], quiet: bool) -> Iterator[str]:
    """Print answers, unless they go into a file, and what cannot be read; gives what became of each image."""
    for row in found:
        if row.error is not None:
            print(f"dulbe-peft: {printable(row.image)} cannot be read: {row.error}", file=sys.stderr)
        elif not quiet:
            print(_line(row))
        yield "unread" if row.error is not None else "known" if row.known else "refused"
    sys.stdout.flush()


def _say_what_holds(learner: ClassIncrementalLearner, reject: float | None) -> None:
    """Say on standard error where unknown classes cannot be told from known ones."""
    from dulbe_peft.classifiers.calibration import HARDLY

    area = learner.classifier.roc_area
    if reject is not None and area is not None and area < HARDLY:
        print(
            "unknown things cannot be told here: where each class was left out in turn, its images were more novel "
            f"than those of known classes in {100 * area:.0f} of 100 pairs; chance gives 50",
            file=sys.stderr,
        )


def _sum_up(counts: Counter[str], done: int, rejects: bool, files: list[Any]) -> None:
    from dulbe_peft.data.inventory import counted

    parts = [counted(counts["known"] + counts["refused"], "image")]
    parts += [f"{done} were answered before"] * bool(done)
    parts += [f"{counts['refused']} of them {NONE}"] * rejects
    parts += [f"{counts['unread']} could not be read"] * bool(counts["unread"])
    print(", ".join(parts) + (f"; written: {' and '.join(map(str, files))}" if files else ""), file=sys.stderr)


def _images(paths: Iterable[str]) -> Iterator[str]:
    """The paths, with those that standard input holds, one a line, in place of "-"."""
    for path in paths:
        if path != "-":
            yield path
            continue
        if sys.stdin is None:
            raise ValueError("standard input is closed: no path is there")
        lines = sys.stdin.buffer.read().split(b"\n")
        if any(b"\0" in line for line in lines):
            raise ValueError("standard input has a zero byte, which no path has: give one path a line")
        yield from (os.fsdecode(line.rstrip(b"\r")) for line in lines if line.strip())


def _answers(
    learner: ClassIncrementalLearner, images: list[str], table: Kept | None, how: dict[str, Any], named: bool
) -> Iterator[list[Prediction]]:
    """The answers, a batch of images for each reading process at once; an image that is named twice has one.

    Which images are answered together may change the last bits of a probability. So a call that goes on answers again
    for all of a batch that was begun, and gives those of its answers that are missing. A table has them by `named`.
    """
    from dulbe_peft.data.unlabelled import unlabelled_images

    every = unlabelled_images(images)
    places: dict[str, int] = {}
    for index in range(len(every)):
        places.setdefault(every.item_name(index), index)
    shown = Counter(map(printable, places))
    if named and len(shown) < len(places):
        name = max(shown, key=shown.__getitem__)
        raise ValueError(f"--csv would call two images {name!r}, for it writes some characters as others: rename one")
    done = set() if table is None else {name for name in places if _is_done(name, table)}
    names, most = list(places), learner.args.eval_batch_size * max(1, learner.args.num_workers)
    size = -(-len(names) // -(-len(names) // most))  # all about alike: a last one of a few images would not be stored
    for batch in (names[start : start + size] for start in range(0, len(names), size)):
        if not done.issuperset(batch):
            rows = learner.predictions(every.at([places[name] for name in batch]), **how)
            yield [row for row in rows if row.image not in done]


def _is_done(image: str, table: Kept) -> bool:
    """Whether an earlier call answered for an image; raises where it is another one by now."""
    if image not in table.done:
        return False
    with suppress(FileNotFoundError):
        facts = os.stat(image)
        if max(facts.st_mtime, facts.st_ctime) > table.since:
            raise ValueError(f"{image} has changed since {table.path} was written: begin anew with --overwrite")
    return True


def _line(row: Prediction) -> str:
    names = [f"{printable(name)} {100 * p:.2f} %" for name, p in zip(row.classes, row.probabilities, strict=True)]
    if not row.known:
        names = [f"{NONE} (best: {names[0]})"]
    return "\t".join([printable(row.image), *names])


def _lines(row: Prediction) -> list[list[Any]]:
    """The rows of a table for one image: one for each class, and for an unknown image one without a class."""
    if row.error is not None:
        return []
    answers = list(zip(row.classes, row.probabilities, strict=True)) if row.known else [("", row.probabilities[0])]
    end = float(f"{row.novelty:.6g}")
    return [[printable(row.image), printable(name), f"{probability:.6f}", end] for name, probability in answers]


def _as_json(row: Prediction) -> dict[str, Any]:
    if row.error is not None:
        return {"path": row.image, "error": row.error}
    answers = [{"class": n, "probability": p} for n, p in zip(row.classes, row.probabilities, strict=True)]
    return {"path": row.image, "known": row.known, "classes": answers, "novelty": row.novelty}
