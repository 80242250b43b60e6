"""What `predict` writes: tables, keywords, observations, answers of items, and folders of classes.

Folders of classes are locked while they are written to. The answer for an item or event is the mean of its
photographs' log-probabilities.
"""

import csv
import filecmp
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

from dulbe_peft.data import camtrap
from dulbe_peft.data.columns import FILE, clock
from dulbe_peft.data.labels import BETWEEN, ROOT
from dulbe_peft.metrics.prediction import Prediction
from dulbe_peft.utils import files
from dulbe_peft.utils.folders import LOCK_SUFFIX, clear_leftovers, exclusive
from dulbe_peft.utils.terminal import counted, printable

HEADER = ["path", "predicted", "probability", "novelty"]
ITEM_HEADER = ("group", "predicted", "probability", "images", "agreeing", "first", "last", "site")
LEAST = 1e-30  # the smallest probability whose logarithm counts, so that no photograph excludes a class
_UNFIT = re.compile(r'[/\\:*?"<>|%\x00-\x1f]|^\.|[. ]$')  # not allowed in the name of a folder on some system


@contextmanager
def only_writer(path: str) -> Iterator[None]:
    """Lock a path while the block runs, so that another process that uses this function raises an error."""
    target = Path(path).resolve()
    with exclusive(target.with_name(f".{target.name}{LOCK_SUFFIX}"), path):
        yield


@contextmanager
def sorted_folder(path: str) -> Iterator[Callable[[Path, str], None]]:
    """Lock a folder and yield a function that copies a file into the subfolder of a class."""
    folder = Path(path).resolve()
    with only_writer(path):
        for subfolder in folder.iterdir() if folder.exists() else ():
            if subfolder.is_dir():
                clear_leftovers(subfolder, ".+")
        yield partial(_copy_into, folder)


def _copy_into(folder: Path, file: Path, class_name: str) -> None:
    """Copy a file under a free name, unless the folder of the class already holds a file with the same content."""
    class_folder = folder / _UNFIT.sub(lambda match: f"%{ord(match[0]):02X}", class_name)
    class_folder.mkdir(parents=True, exist_ok=True)
    names = itertools.chain([file.name], (f"{file.stem}-{number}{file.suffix}" for number in itertools.count(2)))
    for target in map(class_folder.joinpath, names):
        if not os.path.lexists(target):
            with file.open("rb") as source, files.replacing(target) as copy, copy.open("wb") as opened:
                shutil.copyfileobj(source, opened)
                opened.flush()
                shutil.copystat(file, copy)
            return
        if target.is_file() and filecmp.cmp(target, file, shallow=False):
            return


def exiftool_rows(answers: Iterable[tuple[str, str]], root: str) -> list[list[str]]:
    """Return a table for `exiftool -csv+=FILE -sep ', '` with each photograph's class as a keyword below `root`.

    Existing sidecars, IMG.jpg.xmp and IMG.xmp, get a row as well: exiftool ignores rows of files it was not given.
    """
    rows, stems = [[FILE, "HierarchicalSubject"]], dict[str, str]()
    for image, name in answers:
        if "|" in name or BETWEEN in name:
            raise ValueError(
                f"the class {name!r} contains '|' or {BETWEEN!r}, which separate keywords: rename it first"
            )
        for file in (image, f"{image}.xmp", f"{os.path.splitext(image)[0]}.xmp"):
            if file != image and not os.path.isfile(file):
                continue
            if stems.setdefault(file, image) != image:
                raise ValueError(
                    f"{file} is the sidecar of {stems[file]} and of {image}: rename one of the photographs"
                )
            rows.append([file, f"{root}|{name}"])
    return rows


def write_table(rows: Sequence[Prediction], file: str) -> None:
    """Write a row for each readable image, without a class if it is unknown."""
    readable = [row for row in rows if row.error is None]
    most = max((len(row.classes) for row in readable if row.known), default=1)
    header = [*HEADER, *(f"{name}_{place}" for place in range(2, most + 1) for name in HEADER[1:3])]
    grouped = any(row.group is not None for row in readable)
    lines = []
    for row in readable:
        names = row.classes if row.known else [""]
        cells = [cell for name, p in zip(names, row.probabilities) for cell in (name, f"{p:.6f}")]
        line = [row.image, *cells[:2], float(f"{row.novelty:.6g}"), *cells[2:]]
        lines.append([*line, *[""] * (len(header) - len(line)), *[printable(row.group or "")] * grouped])
    files.write_csv(file, [*header, *["group"] * grouped], lines)


def write_json(rows: Sequence[Prediction], file: str) -> None:
    """Write an entry for each image, also for those that cannot be read."""
    with files.output_file(file) as text:
        print(json.dumps([_as_json(row) for row in rows], indent=1, ensure_ascii=False), file=text)


def _as_json(row: Prediction) -> dict[str, object]:
    if row.error is not None:
        return {"path": row.image, "error": row.error}
    answers = [{"class": n, "probability": p} for n, p in zip(row.classes, row.probabilities, strict=True)]
    group = {} if row.group is None else {"group": row.group}
    return {"path": row.image, "known": row.known, "classes": answers, "novelty": row.novelty, **group}


def write_keywords(rows: Sequence[Prediction], file: str) -> None:
    """Write the table of `exiftool_rows` for the images of known classes."""
    known = [(row.image, row.classes[0]) for row in rows if row.error is None and row.known]
    keywords = exiftool_rows(known, ROOT)
    with files.output_file(file) as text:  # it needs the exact paths, so no apostrophe guards against formulas
        csv.writer(text).writerows(keywords)


def write_timelapse(rows: Sequence[Prediction], file: str, root: str) -> None:
    """Write the table that Timelapse imports: the class of each photograph below `root` in the column Species.

    Unknown images have no row, because Timelapse would replace what a person wrote by an empty cell. There is no
    column of times for the same reason, and no further column, because Timelapse then imports nothing.
    """
    lines = []
    for row in rows:
        if row.error is None and row.known:
            folder, name = os.path.split(_below(row.image, root))
            lines.append([folder.replace("/", "\\"), name, row.classes[0]])
    with files.output_file(file) as text:  # it needs the exact names, so no apostrophe guards against formulas
        csv.writer(text).writerows([["RelativePath", "File", "Species"], *lines])


def write_tasks(rows: Sequence[Prediction], file: str, root: str, classifier: str) -> None:
    """Write the tasks that Label Studio imports: each photograph below `root`, with the prediction for a known class.

    They fit its template for image classification, whose names are "image" and "choice".
    """
    tasks: list[dict[str, object]] = []
    for row in rows:
        if row.error is None:
            address = f"/data/local-files/?d={quote(os.fsencode(_below(row.image, root)))}"
            choice = {"from_name": "choice", "to_name": "image", "type": "choices"}
            answer = {
                "model_version": f"dulbe_peft, {classifier}",
                "score": row.probabilities[0],
                "result": [choice | {"value": {"choices": [row.classes[0]]}}],
            }
            tasks.append({"data": {"image": address}, "predictions": [answer] * row.known})
    with files.output_file(file) as text:
        print(json.dumps(tasks, indent=1, ensure_ascii=False), file=text)


def _below(image: str, root: str) -> str:
    """Return the path of an image from the folder `root`, in which it must lie."""
    if (inside := files.below(image, root)) is None:
        raise ValueError(f"{image} does not lie in {root}: predict the photographs of one folder at a time")
    return Path(inside).as_posix()


def write_observations(rows: Sequence[Prediction], file: str, package: Path, classifier: str) -> None:
    """Write a row of observations.csv for each readable image that the package's media.csv lists."""
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
    with files.output_file(file) as text:  # other programs read it, so no apostrophe guards against formulas
        csv.writer(text, lineterminator="\n").writerows([header, *lines])


class ItemAnswers:
    """The answers of items, which are collected photograph by photograph.

    Args:
        item_of: Name of an image -> the name of its group.
        taken: Name of an image -> when it was taken, in seconds of the camera's clock since 1970, or None.
        sites: Name of an image -> where it was taken.
        top_k: How many classes an answer has.
    """

    def __init__(
        self, item_of: Mapping[str, str], taken: Mapping[str, float | None], sites: Mapping[str, str], top_k: int
    ) -> None:
        self._item_of, self._taken, self._sites, self._top_k = item_of, taken, sites, top_k
        self._logs: dict[str, defaultdict[str, float]] = {}
        self._rows: dict[str, list[tuple[str, str, bool]]] = {}  # image, its best class, and whether it is known
        self._counted = set[tuple[str, str]]()  # item and file: a photograph that is given by two paths counts once

    def add(self, row: Prediction) -> Prediction:
        """Add a prediction with the probabilities of all classes, and return it with only its group."""
        item = self._item_of[row.image]
        if (key := (item, os.path.realpath(row.image))) not in self._counted:
            self._counted.add(key)
            sums = self._logs.setdefault(item, defaultdict(float))
            for name, probability in zip(row.classes, row.probabilities, strict=True):
                sums[name] += math.log(max(probability, LEAST))
            self._rows.setdefault(item, []).append((row.image, row.classes[0], row.known))
        return replace(row, classes=(), probabilities=(), group=item)

    def answers(self) -> dict[str, Prediction]:
        """Return the answer of each item; it is unknown if most of its photographs are."""
        return {item: self._answer(item) for item in self._rows}

    def _answer(self, item: str) -> Prediction:
        rows = self._rows[item]
        means = {name: total / len(rows) for name, total in self._logs[item].items()}
        highest = max(means.values())
        total = sum(math.exp(mean - highest) for mean in means.values())
        best = sorted(means, key=lambda name: -means[name])[: self._top_k]
        shares = tuple(math.exp(means[name] - highest) / total for name in best)
        known = 2 * sum(known for *_, known in rows) >= len(rows)
        return Prediction(item, tuple(best), shares, known, group=item)

    def answered(self, rows: Sequence[Prediction]) -> list[Prediction]:
        """Return the photographs' predictions with the answers of their items."""
        answers, answered = self.answers(), list[Prediction]()
        for row in rows:
            if row.group is not None:
                best = answers[row.group]
                row = replace(row, classes=best.classes, probabilities=best.probabilities, known=best.known)
            answered.append(row)
        return answered

    def write(self, file: str) -> None:
        """Write a row for each item, without a class if it is unknown.

        `agreeing` counts the photographs whose own answer is that of the item.
        """
        files.write_csv(file, ITEM_HEADER, [self._line(item, answer) for item, answer in self.answers().items()])

    def _line(self, item: str, answer: Prediction) -> list[object]:
        rows, name = self._rows[item], answer.classes[0] if answer.known else ""
        agreeing = sum((best if known else "") == name for _, best, known in rows)
        times = [time for image, *_ in rows if (time := self._taken[image]) is not None]
        ends = [clock(end(times)) for end in (min, max)] if times else ["", ""]
        sites = {self._sites[image] for image, *_ in rows}
        site = sites.pop() if len(sites) == 1 else ""
        probability = f"{answer.probabilities[0]:.6f}"
        return [printable(item), printable(name), probability, len(rows), agreeing, *ends, printable(site)]
