"""examples:
  dulbe-peft predict out photo.jpg
  dulbe-peft predict out holidays --top-k 3 --csv holidays.csv
  dulbe-peft predict out holidays --sort-into sorted
  dulbe-peft predict out june --group-seconds 60 --by-group events.csv
  find . -name '*.jpg' | dulbe-peft predict out -

Folders are read recursively. Unreadable files are reported and skipped. After a stop, repeat the command:
the feature store has the images encoded so far. With --reject 0.05, an image is "none of these" if its
novelty exceeds that of 95 % of the training images. With --group or --group-seconds, as for run, all
photographs of an item or event get one answer, in every output: that of the mean of their
log-probabilities, or "none of these" if most of them are. In a folder with a Camtrap DP package, --group
can be eventID or deploymentID.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dulbe_peft.arguments import Query
from dulbe_peft.data.names import NONE
from dulbe_peft.photos.commands.advice import print_next_command
from dulbe_peft.photos.commands.flags import ONLY, OVERWRITE, SUM_UP, File, Folder
from dulbe_peft.photos.commands.options import Load, answers_of, command, learner_options, settings_of
from dulbe_peft.photos.commands.paths import FOLDER, check_given, check_images, claim
from dulbe_peft.photos.data.source import GROUPING, DataSource
from dulbe_peft.utils.files import is_stream
from dulbe_peft.utils.settings import setting
from dulbe_peft.utils.terminal import counted, printable

if TYPE_CHECKING:  # torch is imported by the commands that need it
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.metrics.prediction import Prediction
    from dulbe_peft.photos.output_files import ItemAnswers

    Writer = Callable[[Sequence[Prediction], str], None]

MEASURED = "when each of your classes was left out in turn, {:.0f} of 100 of its images were recognised as unknown"
SINGLE = (
    "{} of {} classes have one image or group, which cannot be left out: more of their images are rejected than "
    "--reject says, and fewer images are recognised as unknown"
)
SUFFIX = {"--json": ".json", "--label-studio": ".json"}  # of the others, ".csv"
ADVICE = {
    "--timelapse": "Timelapse: rename the column Species to your data label, whose list needs the classes",
    "--label-studio": "Label Studio: start it with LABEL_STUDIO_LOCAL_FILES_SERVING_ENABLED=true "
    "LABEL_STUDIO_LOCAL_FILES_DOCUMENT_ROOT={}, and add {} as local storage",
}
UNRELIABLE = (
    "--reject is not reliable here: when each class was left out in turn, its images were more novel than images of "
    "known classes in {:.0f} of 100 pairs{}; chance would give 50"
)


@command(settings=[*settings_of(Query, ("top_k", "reject", "coverage")), *settings_of(DataSource, GROUPING)])
@learner_options(choose=True)
def predict(
    learner: str,
    load: Load,
    paths: tuple[str, ...] = setting(..., "images or folders; -: paths on standard input", place=True),
    csv: File | None = setting(None, "write a table; -: standard output"),
    json_file: File | None = setting(None, "write the same as JSON; - is standard output", flag="--json"),
    exiftool: File | None = setting(None, "write keywords below `dulbe` for exiftool -csv+=FILE"),
    camtrap_dp: File | None = setting(
        None, "write observations of the Camtrap DP package in PATHS", metavar="FILE.csv"
    ),
    timelapse: File | None = setting(None, "write classes for Timelapse, in a column Species"),
    label_studio: File | None = setting(None, "write predictions for Label Studio, as JSON"),
    by_group: File | None = setting(None, "write a row per group, with dates and site"),
    sort_into: Folder | None = setting(None, "copy images into folders of classes; replaces no file"),
    only: File | None = ONLY,
    sum_up: File | None = SUM_UP,
    overwrite: bool = OVERWRITE,
    group: str | None = None,
    group_seconds: float | None = None,
    **asked: Any,
) -> int:
    grouping = group is not None or group_seconds is not None
    if by_group and not grouping:
        raise ValueError("--by-group writes a row for each group: give --group or --group-seconds, too")
    if grouping and asked.get("coverage") is not None:
        raise ValueError("--group gives one answer for each group, and --coverage sets for images: leave one out")
    given = {name: value for name, value in asked.items() if value is not None}
    query = Query(**given, novelty=bool(csv or json_file))
    check_given(only=only, sum_up=sum_up)
    package = _package(paths) if camtrap_dp else None
    files = {"--csv": csv, "--json": json_file, "--exiftool": exiftool, "--timelapse": timelapse}
    files |= {"--label-studio": label_studio, "--camtrap-dp": camtrap_dp, "--by-group": by_group}
    outputs = {flag: path for flag, path in files.items() if path is not None}
    images = _images(paths)
    kinds = [(flag, path, SUFFIX.get(flag, ".csv")) for flag, path in outputs.items()]
    claim(*kinds, reads=images, overwrite=overwrite)
    claim(("--sort-into", sort_into, FOLDER), apart=images)
    check_images(images)
    photos = _folder(images) if timelapse or label_studio else ""
    loaded = load()
    query = replace(query, **answers_of(only, sum_up, loaded.class_names))
    from dulbe_peft.data.unlabelled import unlabelled_images
    from dulbe_peft.photos import output_files
    from dulbe_peft.photos.data.inventory import Inventory

    _warn(loaded, query.reject)
    rows: list[Prediction] = []
    name = loaded.classifier.name
    photographs = unlabelled_images(images)
    items = _items(photographs, group, group_seconds, query.top_k) if grouping else None
    writers = _writers(photos, package, name, items)
    wanted = [(outputs[flag], write) for flag, write in writers.items() if flag in outputs]
    with ExitStack() as opened:
        copy = opened.enter_context(output_files.sorted_folder(sort_into)) if sort_into else None
        if csv and not is_stream(csv):
            opened.enter_context(output_files.only_writer(csv))
        for row in _answers(loaded, photographs, query, items):
            rows.append(row)
            if row.error is None and items is None and not wanted:
                print(_line(row), flush=True)
            if row.error is None and copy is not None:
                copy(Path(row.image), row.classes[0] if row.known else NONE)
        if items is not None and not wanted:
            print(*map(_line, items.answers().values()), sep="\n")
        for path, write in wanted:
            write(rows, path)
    for line in Inventory({}, left_out=[*photographs.left_out]).problems():
        print(line, file=sys.stderr)
    written = [path for path in (*outputs.values(), sort_into) if path is not None and path != "-"]
    unread = [row.error is not None for row in rows]
    if outputs or items is not None or sort_into or query.reject is not None or any(unread):
        _print_summary(rows, query.reject is not None, written)
    for flag in filter(outputs.__contains__, ADVICE):
        print(ADVICE[flag].format(os.path.dirname(photos), photos), file=sys.stderr)
    if csv and not is_stream(csv):
        print_next_command("report", csv, to=sys.stderr)
    elif written and sort_into is None and "-" not in paths:
        print_next_command("predict", learner, *paths, classifier=name, sort_into="sorted", to=sys.stderr)
    return 2 if all(unread) else _missing(images)


def _writers(photos: str, package: Path | None, classifier: str, items: ItemAnswers | None) -> dict[str, Writer]:
    """Return the function that writes each output, by its flag.

    Timelapse and Label Studio see the photographs in the folder `photos`, and `package` is a Camtrap DP package.
    """
    from dulbe_peft.photos import output_files as files

    found: dict[str, Writer] = {} if items is None else {"--by-group": lambda _, file: items.write(file)}
    found |= {"--csv": files.write_table, "--json": files.write_json, "--exiftool": files.write_keywords}
    if photos:
        found["--timelapse"] = partial(files.write_timelapse, root=_timelapse_root(photos))
        # Label Studio wants the photographs in a folder below its root.
        found["--label-studio"] = partial(files.write_tasks, root=os.path.dirname(photos), classifier=classifier)
    if package is not None:
        found["--camtrap-dp"] = partial(files.write_observations, package=package, classifier=classifier)
    return found


def _items(images: LabelledImages, group: str | None, seconds: float | None, top_k: int) -> ItemAnswers:
    """Return the items of the images; an image without a group has its own name as group.

    Raises:
        ValueError: If that is the name of another group, whose answer it would get.
    """
    from dulbe_peft.photos.data.grouping import grouped_photographs
    from dulbe_peft.photos.data.looking import times_taken
    from dulbe_peft.photos.output_files import ItemAnswers

    found = grouped_photographs(images, group, seconds)
    print(*found.notes, sep="\n", file=sys.stderr)
    paths = [images.item_name(index) for index in range(len(images))]
    alone = {path for path, key in zip(paths, found.names, strict=True) if key is None}
    if both := alone.intersection(found.names):
        raise ValueError(
            f"{printable(min(both))} has no group, and a group of others has its name: change --group so that it "
            "has a group, or predict it alone"
        )
    names = {path: path if key is None else key for path, key in zip(paths, found.names, strict=True)}
    times = found.times or times_taken(images)
    return ItemAnswers(names, dict(zip(paths, times, strict=True)), dict(zip(paths, found.sites, strict=True)), top_k)


def _warn(learner: ClassIncrementalLearner, reject: float | None) -> None:
    """Print why probabilities cannot be relied on, and what --reject is worth."""
    from dulbe_peft.classifiers.calibration import HARDLY
    from dulbe_peft.classifiers.novelty import found

    if doubt := learner.state.doubt or learner.state.estimates.doubt:
        print(doubt, file=sys.stderr)
    area = None if reject is None else learner.classifier.roc_area
    if reject is None or area is None:
        return
    if area < HARDLY:
        ends = learner.classifier.roc_interval
        said = "" if ends is None else " (95 % interval {:.0f} to {:.0f})".format(*(100 * end for end in ends))
        print(UNRELIABLE.format(100 * area, said), file=sys.stderr)
    if (share := found(learner.classifier.novelty_tasks, reject)) is not None:
        print(f"--reject {reject:g}: {MEASURED.format(100 * share)}", file=sys.stderr)
    known = learner.state.known
    items = [len({known.groups.get(content, content) for content in of}) for of in known.learned.values()]
    if single := items.count(1):
        print(SINGLE.format(single, len(items)), file=sys.stderr)


def _images(paths: Iterable[str]) -> list[str]:
    """Return the paths, with "-" replaced by those on standard input, one per line."""
    images: list[str] = []
    for path in paths:
        if path != "-":
            images.append(path)
            continue
        if sys.stdin is None:
            raise ValueError("standard input is closed, expected one path per line")
        lines = sys.stdin.buffer.read().split(b"\n")
        if any(b"\0" in line for line in lines):
            raise ValueError("standard input has a zero byte, which paths cannot have: give one path per line")
        images += (os.fsdecode(line.rstrip(b"\r")) for line in lines if line.strip())
    if not images:
        raise ValueError("standard input is empty, expected one path per line")
    return images


def _missing(images: Iterable[str]) -> int:
    """Print how many of the files are missing, and return the exit status, 1 if any is missing and 0 otherwise."""
    missing = [path for path in images if not os.path.lexists(path)]
    if missing:
        print(f"{counted(len(missing), 'file')} missing, such as {printable(missing[0])}", file=sys.stderr)
    return 1 if missing else 0


def _answers(
    learner: ClassIncrementalLearner, images: LabelledImages, query: Query, items: ItemAnswers | None
) -> Iterator[Prediction]:
    """Yield the prediction of each image as soon as it is known: with items, only after the last image.

    Images that cannot be read are reported.
    """
    rows: list[Prediction] = []
    if items is not None:  # their means need all classes
        query = replace(query, top_k=len(learner.class_names))
    for row in _predictions(learner, images, query):
        if row.error is not None:
            print(f"dulbe-peft: {printable(row.image)} cannot be read: {row.error}", file=sys.stderr)
        if items is None:
            yield row
        else:
            rows.append(row if row.error is not None else items.add(row))
    if items is not None:
        yield from items.answered(rows)


def _predictions(learner: ClassIncrementalLearner, images: LabelledImages, query: Query) -> Iterator[Prediction]:
    """Yield one prediction per image, even if an image is given twice.

    The learner gets a batch of images per reading thread or process at once.
    """
    from dulbe_peft.encoders.pixels import reading_threads

    index_of = {images.item_name(index): index for index in range(len(images))}
    workers = learner.args.num_workers
    readers = reading_threads(learner.encoder.device) if workers == "auto" else workers
    names, most = list(index_of), learner.args.eval_batch_size * max(1, readers)
    # The parts have about the same size, because the features of a last part of a few images would not be stored.
    size = -(-len(names) // -(-len(names) // most))
    for start in range(0, len(names), size):
        yield from learner.predictions(images.at([index_of[name] for name in names[start : start + size]]), query)


def _print_summary(rows: list[Prediction], rejects: bool, files: list[str]) -> None:
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


def _folder(paths: Sequence[str]) -> str:
    """Return the only folder among the paths, from which other programs see the photographs."""
    if len(paths) > 1 or not os.path.isdir(paths[0]):
        what = f"{len(paths)} paths" if len(paths) > 1 else printable(paths[0])
        raise ValueError(f"--timelapse and --label-studio need one folder of photographs, got {what}")
    return os.path.abspath(paths[0])


def _timelapse_root(folder: str) -> str:
    """Return the folder with Timelapse's template or data: `folder`, or the nearest one above, or else `folder`."""
    for above in (Path(folder), *Path(folder).parents):
        with suppress(OSError):
            if any(file.suffix.lower() in (".tdb", ".ddb") for file in above.iterdir()):
                return str(above)
    return folder


def _package(paths: Sequence[str]) -> Path:
    """Return the folder of the Camtrap DP package among the paths."""
    from dulbe_peft.data.camtrap import MEDIA, table_in

    folder = next((Path(path) for path in paths if table_in(Path(path), MEDIA)), None)
    if folder is None:
        raise ValueError(f"--camtrap-dp needs the folder of a Camtrap DP package, with {MEDIA}.csv, got {paths[0]}")
    return folder
