"""What a run's folder holds, in the form that a report needs: also of an unfinished run, and of one of version 0.1."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dulbe_peft.metrics.evaluation import PREDICTIONS_FILE, ImageResult, read_predictions
from dulbe_peft.runs.progress import read_progress
from dulbe_peft.runs.results import stream_results
from dulbe_peft.utils.files import read_json
from dulbe_peft.utils.folders import LEARNER_FILE, RESULTS_FILE, TIMINGS_FILE, CheckpointError, newest_task

PICTURES_FOLDER = "pictures"
PICTURES_INDEX = "index.json"
_ADAPTER_FILE = "adapter_config.json"
_MOST_FOLDERS = 3  # that a sentence names


@dataclass(frozen=True)
class Run:
    """A run as its folder tells it.

    Attributes:
        folder: where it is.
        name: what the report calls it; the folder's name.
        results: what `results.json` holds, of the finished tasks alone.
        learned: the classes of every finished task.
        finished: whether the run has written its results.
        settings: strategy, adapter, arguments and classifiers, nested.
        fingerprints: what tells the base model and the data from others; None where the task folders are gone.
        base_model: name or folder of the model that learned; None where it is not known.
        predictions: what was predicted for every test image after the last finished task; empty where not recorded.
        timings: seconds and memory of every finished task, None where not known.
        examples: "mistakes" and "hits" -> what each picture shows, with its JPEG bytes under "jpeg".
        updates: what the learner took in or lost without training, see `LearnerState`; empty where nobody noted it.
    """

    folder: Path
    name: str
    results: dict[str, Any]
    learned: list[list[str]]
    finished: bool
    settings: dict[str, Any]
    fingerprints: dict[str, Any] | None
    base_model: str | None
    predictions: list[ImageResult]
    timings: list[dict[str, Any] | None]
    examples: dict[str, list[dict[str, Any]]]
    updates: list[dict[str, Any]]

    @property
    def tested(self) -> bool:
        """Whether the stream had test data."""
        return bool(self.results.get("classifiers"))

    @property
    def first(self) -> str:
        """The classifier that `predict` uses."""
        return next(iter(self.results["classifiers"]))

    @property
    def records(self) -> list[dict[str, Any]]:
        """What learning each finished task showed; empty where that was not recorded."""
        found = self.results.get("tasks") or []
        return [found[t] if t < len(found) and found[t] else {} for t in range(len(self.learned))]


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Read what `run` wrote into a folder.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: the folder holds no finished task, or a file in it is not as a run writes it.
    """
    path = Path(folder)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder; a report is made of a folder that run has written")
    with as_written(path):
        return _read(path)


@contextmanager
def as_written(folder: Path) -> Iterator[None]:
    """Turn what a file of a run can make go wrong into a ValueError that names the run's folder."""
    try:
        yield
    except (LookupError, TypeError, AttributeError, ArithmeticError, ValueError, CheckpointError) as error:
        if isinstance(error, ValueError) and str(folder) in str(error):
            raise
        raise ValueError(f"{folder} holds a file that is not as a run writes it: {error!r}") from error


def _read(path: Path) -> Run:
    newest, manifest = newest_task(path, lambda _: None) or (None, None)
    results = _read_json(path / RESULTS_FILE)
    state = {} if newest is None else _read_json(newest / LEARNER_FILE)
    settings: dict[str, Any] = {}
    finished = True
    if newest is None and results is None:
        raise ValueError(f"{path} holds neither {RESULTS_FILE} nor the folder of a finished task: nothing to report")
    if newest is None or manifest is None:
        learned = results["class_names"]
        settings = {"strategy": results.get("strategy"), **results["configuration"]}
    else:
        identity = {"strategy": {"name": "dulbe"}, **manifest.notes["identity"]}
        identity.setdefault("classifiers", {"bridge": identity.get("head", {})})  # version 0.1 had no other
        learned = manifest.notes["tasks"]
        settings = {name: identity[name] for name in ("strategy", "adapter", "arguments", "classifiers")}
        if results is None or results["class_names"] != learned:
            names = state.get("classifiers", ["bridge"])
            results = stream_results(read_progress(newest), identity, names, manifest.versions)
            finished = False
    results = {**results, "class_names": learned}
    if results.get("classifiers"):  # JSON sorts them; the learner's own order is the one that counts
        names = [name for name in state.get("classifiers", ["bridge"]) if name in results["classifiers"]]
        order = [*names, *(name for name in results["classifiers"] if name not in names)]
        results["classifiers"] = {name: results["classifiers"][name] for name in order}
    table = path / PREDICTIONS_FILE if newest is None else newest / PREDICTIONS_FILE
    timings = (_read_json(path / TIMINGS_FILE) or {}).get("tasks", [])
    return Run(
        folder=path,
        name=path.resolve().name,
        results=results,
        learned=learned,
        finished=finished,
        settings=settings,
        fingerprints=None if newest is None else {name: identity.get(name) for name in ("base_model", "data")},
        base_model=None if newest is None else _base_model(newest, state),
        predictions=read_predictions(table) if table.is_file() else [],
        timings=[timings[t] if t < len(timings) else None for t in range(len(learned))],
        examples=_examples(path / PICTURES_FOLDER),
        updates=(state or {}).get("updates", []),
    )


def _read_json(path: Path) -> Any:
    """A file's content; None where there is no such file, or it is no JSON."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return None


def _base_model(newest: Path, state: dict[str, Any]) -> str | None:
    name = (state.get("base_model") or {}).get("name")
    return name or (_read_json(newest / _ADAPTER_FILE) or {}).get("base_model_name_or_path")


def _examples(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The pictures of a finished run, with their bytes."""
    index = _read_json(folder / PICTURES_INDEX) or {}
    return {
        kind: [
            {**entry, "jpeg": (folder / entry["file"]).read_bytes()}
            for entry in entries
            # A link could lead to any picture of whoever makes the page.
            if re.fullmatch(r"[\w-]+\.jpg", entry["file"])
            and (folder / entry["file"]).is_file()
            and not (folder / entry["file"]).is_symlink()
        ]
        for kind, entries in index.items()
    }


# ---------------------------------------------------------------------- what the predictions amount to


def data_name(predictions: list[ImageResult]) -> str | None:
    """The folders or files that the test images are in; None where nobody knows, or there are many.

    A long path is told by its last two parts.

    >>> images = ("june/test/cat/1.jpg", "june/test/dog/1.jpg", "july/test/owl/1.jpg")
    >>> data_name([ImageResult(image, image.split("/")[2], "cat", 1.0, 1, 0, {}) for image in images])
    'june/test and july/test'
    """
    found = list(dict.fromkeys(map(_place, predictions)))
    if len(found) > _MOST_FOLDERS:  # the folders of renamed classes
        found = list(dict.fromkeys(os.path.dirname(place) for place in found))
    if len(found) > _MOST_FOLDERS or any(os.path.dirname(place) == place for place in found):
        return None
    parts = [Path(place).parts for place in found]
    return " and ".join(dict.fromkeys("/".join(p[-2:]) if len(p) > 3 else str(Path(*p)) for p in parts)) or None


def _place(row: ImageResult) -> str:
    """The file that holds an image among others, or the folder around the folder of its class; "" where unknown."""
    packed = re.fullmatch(r"(.+)\[\d+\]", row.image)
    if packed:
        return packed[1]
    folder = os.path.dirname(row.image.replace(os.sep, "/"))
    around, found, _ = f"{folder}/".rpartition(f"/{row.true}/")
    return around if found else folder


def class_table(predictions: list[ImageResult], forgetting: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each class, the worst known first: how many of its images are named right, and what others become.

    Args:
        predictions: of all test images.
        forgetting: class -> what its accuracy has lost since it was best.

    Returns:
        Rows with "name", "images", "accuracy" in [0, 1], "forgetting" or None, and "taken_for", a list of class and
        count, the most frequent first.
    """
    groups: dict[str, list[ImageResult]] = {}
    for row in predictions:
        groups.setdefault(row.true, []).append(row)
    table = [
        {
            "name": name,
            "images": len(rows),
            "accuracy": sum(row.right for row in rows) / len(rows),
            "forgetting": forgetting.get(name),
            "taken_for": Counter(row.predicted for row in rows if not row.right).most_common(),
        }
        for name, rows in groups.items()
    ]
    return sorted(table, key=lambda entry: entry["accuracy"])


def confusion(predictions: list[ImageResult], classes: list[str]) -> tuple[list[str], list[list[int]]]:
    """Of which class how many images are taken for which, among some classes.

    Args:
        predictions: of all test images.
        classes: the true classes to show, one row each.

    Returns:
        The columns, which are `classes` and then the others that their images are taken for most, at most as many
        again; and the counts, one row a class, one entry a column.
    """
    pairs = Counter((row.true, row.predicted) for row in predictions)
    others: Counter[str] = Counter()
    for (true, predicted), count in pairs.items():
        if true in classes and predicted not in classes:
            others[predicted] += count
    columns = [*classes, *(name for name, _ in others.most_common(len(classes)))]
    return columns, [[pairs[name, column] for column in columns] for name in classes]
