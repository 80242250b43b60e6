"""examples:
  dulbe-peft predict out photo.jpg
  dulbe-peft predict out holidays --top-k 3 --csv holidays.csv
  dulbe-peft predict out holidays --sort-into sorted
  find . -name '*.jpg' | dulbe-peft predict out -

Folders are read recursively. An unreadable file is reported and skipped. Predictions are printed as
they come; files are written at the end. If the command is stopped, repeat it: the feature store has
the images encoded so far. With --reject 0.05, an image is "none of these" if its novelty, how unlike
all learned images it is, exceeds that of 95 % of the training images. With --coverage 0.95, each image
gets a set of classes, which contains the correct one for 95 of 100 images of known classes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from csv import writer
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dulbe_peft.arguments import Query
from dulbe_peft.data.names import NONE
from dulbe_peft.photos.commands.options import (
    ONLY,
    OVERWRITE,
    SUM_UP,
    File,
    Folder,
    Load,
    answers_of,
    command,
    learner_options,
    settings_of,
)
from dulbe_peft.photos.commands.paths import FOLDER, check_given, check_images, claim, print_next_command
from dulbe_peft.utils.files import is_stream, output_file, write_csv
from dulbe_peft.utils.settings import setting
from dulbe_peft.utils.terminal import counted, printable

if TYPE_CHECKING:  # torch is imported by the commands that need it
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.metrics.prediction import Prediction

HEADER = ["path", "predicted", "probability", "novelty"]
MEASURED = "when each of your classes was left out in turn, {:.0f} of 100 of its images were recognised as unknown"
SINGLE = (
    "{} of {} classes have one image or group, which cannot be left out: more of their images are rejected than "
    "--reject says, and fewer images are recognised as unknown"
)
UNRELIABLE = (
    "--reject is not reliable here: when each class was left out in turn, its images were more novel than images of "
    "known classes in {:.0f} of 100 pairs; chance would give 50"
)


@command(settings=settings_of(Query, ("top_k", "reject", "coverage")))
@learner_options(choose=True)
def predict(
    learner: str,
    load: Load,
    paths: tuple[str, ...] = setting(..., "images or folders; -: paths on standard input", place=True),
    csv: File | None = setting(None, "write path, predicted, probability, novelty; - is standard output"),
    json_file: File | None = setting(None, "write the same as JSON; - is standard output", flag="--json"),
    exiftool: File | None = setting(None, "write keywords below `dulbe` for `exiftool -csv+=FILE`"),
    camtrap_dp: File | None = setting(
        None, "write observations of the Camtrap DP package in PATHS", metavar="FILE.csv"
    ),
    sort_into: Folder | None = setting(None, "copy each image into a folder of its class; replaces no file"),
    only: File | None = ONLY,
    sum_up: File | None = SUM_UP,
    overwrite: bool = OVERWRITE,
    **asked: Any,
) -> int:
    given = {name: value for name, value in asked.items() if value is not None}
    query = Query(**given, novelty=bool(csv or json_file))
    check_given(only=only, sum_up=sum_up)
    files = [("--csv", csv, ".csv"), ("--json", json_file, ".json"), ("--exiftool", exiftool, ".csv")]
    files.append(("--camtrap-dp", camtrap_dp, ".csv"))
    package = _package(paths) if camtrap_dp else None
    claim(*files, overwrite=overwrite)
    claim(("--sort-into", sort_into, FOLDER), apart=paths)
    images = list(_images(paths))
    if not images:
        raise ValueError("standard input is empty, expected one path per line")
    check_images(images)
    loaded = load()
    query = replace(query, **answers_of(only, sum_up, loaded.class_names))
    from dulbe_peft.classifiers.calibration import HARDLY
    from dulbe_peft.classifiers.novelty import found
    from dulbe_peft.data.unlabelled import unlabelled_images
    from dulbe_peft.photos.data.inventory import Inventory
    from dulbe_peft.photos.output_files import only_writer, sorted_folder

    if doubt := loaded.state.doubt or loaded.state.estimates.doubt:
        print(doubt, file=sys.stderr)
    area = None if query.reject is None else loaded.classifier.roc_area
    if area is not None and query.reject is not None:
        share = found(loaded.classifier.novelty_tasks, query.reject)
        if area < HARDLY:
            print(UNRELIABLE.format(100 * area), file=sys.stderr)
        if share is not None:
            print(f"--reject {query.reject:g}: {MEASURED.format(100 * share)}", file=sys.stderr)
        known = loaded.state.known
        items = [len({known.groups.get(content, content) for content in of}) for of in known.learned.values()]
        if single := items.count(1):
            print(SINGLE.format(single, len(items)), file=sys.stderr)
    rows: list[Prediction] = []
    photographs = unlabelled_images(images)
    with ExitStack() as opened:
        copy = opened.enter_context(sorted_folder(sort_into)) if sort_into else None
        if csv and not is_stream(csv):
            opened.enter_context(only_writer(csv))
        for row in _predictions(loaded, photographs, query):
            rows.append(row)
            if row.error is not None:
                print(f"dulbe-peft: {printable(row.image)} cannot be read: {row.error}", file=sys.stderr)
                continue
            if not (csv or json_file or exiftool or camtrap_dp):
                print(_line(row), flush=True)
            if copy is not None:
                copy(Path(row.image), row.classes[0] if row.known else NONE)
        _write(rows, csv, json_file, exiftool)
        if camtrap_dp and package:
            _write_observations(rows, Path(camtrap_dp), package, loaded.classifier.name)
    for line in Inventory({}, left_out=[*photographs.left_out]).problems():
        print(line, file=sys.stderr)
    written = [file for file in (csv, json_file, exiftool, camtrap_dp, sort_into) if file not in (None, "-")]
    if (
        csv
        or json_file
        or exiftool
        or camtrap_dp
        or sort_into
        or query.reject is not None
        or any(row.error is not None for row in rows)
    ):
        _print_summary(rows, query.reject is not None, written)
    if csv and not is_stream(csv):
        print_next_command("report", csv, to=sys.stderr)
    elif written and sort_into is None and "-" not in paths:
        which = {"classifier": loaded.classifier.name, "reject": query.reject, "sort_into": "sorted"}
        print_next_command("predict", learner, *paths, **which, to=sys.stderr)
    if all(row.error is not None for row in rows):
        return 2
    missing = [path for path in images if not os.path.lexists(path)]
    if missing:
        print(f"{counted(len(missing), 'file')} missing, such as {printable(missing[0])}", file=sys.stderr)
    return 1 if missing else 0


def _images(paths: Iterable[str]) -> Iterator[str]:
    """Yield the paths, with "-" replaced by those on standard input, one per line."""
    for path in paths:
        if path != "-":
            yield path
            continue
        if sys.stdin is None:
            raise ValueError("standard input is closed, expected one path per line")
        lines = sys.stdin.buffer.read().split(b"\n")
        if any(b"\0" in line for line in lines):
            raise ValueError("standard input has a zero byte, which paths cannot have: give one path per line")
        yield from (os.fsdecode(line.rstrip(b"\r")) for line in lines if line.strip())


def _predictions(learner: ClassIncrementalLearner, images: LabelledImages, query: Query) -> Iterator[Prediction]:
    """Yield one prediction per image, even if an image is given twice.

    The learner gets a batch of images per reading thread or process at once.
    """
    from dulbe_peft.encoders.pixels import reading_threads

    index_of = {images.item_name(index): index for index in range(len(images))}
    readers = (
        reading_threads(learner.encoder.device) if learner.args.num_workers == "auto" else learner.args.num_workers
    )
    names, most = list(index_of), learner.args.eval_batch_size * max(1, readers)
    # The parts have about the same size, because the features of a last part of a few images would not be stored.
    size = -(-len(names) // -(-len(names) // most))
    for start in range(0, len(names), size):
        yield from learner.predictions(images.at([index_of[name] for name in names[start : start + size]]), query)


def _print_summary(rows: list[Prediction], rejects: bool, files: list[Any]) -> None:
    unreadable = sum(row.error is not None for row in rows)
    parts = [counted(len(rows) - unreadable, "image")]
    parts += [f"{sum(not row.known for row in rows)} of them {NONE}"] * rejects
    parts += [f"{unreadable} could not be read"] * bool(unreadable)
    print(", ".join(parts) + (f"; written: {' and '.join(map(str, files))}" if files else ""), file=sys.stderr)


def _line(row: Prediction) -> str:
    names = [f"{printable(name)} {100 * p:.2f} %" for name, p in zip(row.classes, row.probabilities, strict=True)]
    if not row.known:
        names = [f"{NONE} (best: {names[0]})"]
    return "\t".join([printable(row.image), *names])


def _write(rows: list[Prediction], csv: str | None, json_file: str | None, exiftool: str | None) -> None:
    """Write all predictions to the given files. A table has a row for each image, without a class if it is unknown."""
    readable = [row for row in rows if row.error is None]
    if csv:
        most = max((len(row.classes) for row in readable if row.known), default=1)
        header = [*HEADER, *(f"{name}_{place}" for place in range(2, most + 1) for name in HEADER[1:3])]
        lines = []
        for row in readable:
            names = row.classes if row.known else [""]
            cells = [cell for name, p in zip(names, row.probabilities) for cell in (name, f"{p:.6f}")]
            line = [row.image, *cells[:2], float(f"{row.novelty:.6g}"), *cells[2:]]
            lines.append(line + [""] * (len(header) - len(line)))
        write_csv(csv, header, lines)
    if json_file:
        with output_file(json_file) as file:
            print(json.dumps([_as_json(row) for row in rows], indent=1, ensure_ascii=False), file=file)
    if exiftool:  # it needs the exact paths, so no apostrophe is added to guard against formulas
        from dulbe_peft.data.labels import ROOT
        from dulbe_peft.photos.output_files import exiftool_rows

        keywords = exiftool_rows([(row.image, row.classes[0]) for row in readable if row.known], ROOT)
        with output_file(exiftool) as file:
            writer(file).writerows(keywords)


def _package(paths: Sequence[str]) -> Path:
    """Return the folder of the Camtrap DP package among the paths."""
    from dulbe_peft.data.camtrap import MEDIA, table_in

    folder = next((Path(path) for path in paths if table_in(Path(path), MEDIA)), None)
    if folder is None:
        raise ValueError(f"--camtrap-dp needs the folder of a Camtrap DP package, with {MEDIA}.csv, got {paths[0]}")
    return folder


def _write_observations(rows: Sequence[Prediction], file: Path, package: Path, classifier: str) -> None:
    """Write a row of observations.csv for each readable image that the package's media.csv lists."""
    from dulbe_peft.data import camtrap

    media, header = camtrap.media_of(package), camtrap.header_of(package)
    lines, unlisted = [], []
    for row in rows:
        entry = media.get(os.path.relpath(row.image, package)) if row.error is None else None
        if entry is None:
            unlisted += [row.image] if row.error is None else []
        else:
            name = row.classes[0] if row.known else ""
            cells = camtrap.observation(entry, name, row.probabilities[0], f"dulbe_peft, {classifier}")
            lines.append([cells.get(column, "") for column in header])
    listing = f"{camtrap.MEDIA}.csv"
    if not lines:
        raise ValueError(f"no image is listed in {package / listing}: {file} is not written")
    if unlisted:
        what = f"{counted(len(unlisted), 'image')} without an observation, because {listing} does not list them"
        print(f"{what}, such as {printable(unlisted[0])}", file=sys.stderr)
    with output_file(file) as text:  # other programs read it, so no apostrophe guards against formulas
        writer(text, lineterminator="\n").writerows([header, *lines])


def _as_json(row: Prediction) -> dict[str, object]:
    if row.error is not None:
        return {"path": row.image, "error": row.error}
    answers = [{"class": n, "probability": p} for n, p in zip(row.classes, row.probabilities, strict=True)]
    return {"path": row.image, "known": row.known, "classes": answers, "novelty": row.novelty}
