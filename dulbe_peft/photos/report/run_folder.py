"""What a run's folder holds, finished or not, in the form that a report needs."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from dulbe_peft.checkpoints.layout import LEARNER_FILE, RESULTS_FILE, TIMINGS_FILE, newest_task
from dulbe_peft.checkpoints.learner_file import LearnerFile
from dulbe_peft.checkpoints.loading import read_known
from dulbe_peft.metrics.evaluation import PREDICTIONS_FILE, ImageResult, read_predictions
from dulbe_peft.streams.progress import SOURCES_FILE, Sources, Timings, read_finished
from dulbe_peft.streams.results import Results, stream_results
from dulbe_peft.training.state import Update
from dulbe_peft.utils.folders import CheckpointError, put_back, read_manifest
from dulbe_peft.utils.records import Fraction, Record, read_record

_OF_TASKS: dict[str, Any] = {TIMINGS_FILE: Timings, SOURCES_FILE: Sources}
PICTURES_FOLDER = "pictures"
PICTURES_INDEX = "index.json"


class Photograph(Record):
    """A small picture in the run's folder, and the image that it shows."""

    # A name without a folder: the index leads to no picture elsewhere.
    file: Annotated[str, Field(pattern=r"^[\w-]+\.jpg$")]
    image: str
    true: str = Field(alias="class")


class Example(Photograph):
    """A test image and its answer; `nearest` is the training image nearest to it, of a mistake."""

    predicted: str
    probability: Fraction
    nearest: Photograph | None = None


class Copy(Record):
    """A test image, the position-th of a task, that was learned, too: as it is or nearly, as the class `of`."""

    task: int
    position: int
    how: str
    of: str


class Pictures(Record):
    """`pictures/index.json`: the surest mistakes, a few images a class, what is left out, copies, names of tasks."""

    mistakes: list[Example] = []
    classes: list[Example] = []
    left_out: list[str] = []
    copies: list[Copy] = []
    task_names: list[str] = []


@dataclass(frozen=True)
class RunFolder:
    """A run as its folder tells it: everything is of the finished tasks; what is not known is None or empty."""

    folder: Path
    name: str
    results: dict[str, Any]
    learned: list[list[str]]
    records: list[dict[str, Any]]  # what learning each task showed
    settings: dict[str, Any]
    predictions: list[ImageResult]
    timings: list[dict[str, Any] | None]
    pictures: Pictures
    finished: bool = True
    base_model: str | None = None
    updates: list[Update] = field(default_factory=list)
    first: str = ""  # the classifier that `predict` uses
    learner: Path | None = None  # the folder of the learner after the newest task
    tested_before: bool = False  # it was tested once, whatever was changed since
    source: dict[str, Any] | None = None  # where the images of the newest task with a known source came from

    @property
    def tested(self) -> bool:
        return bool(self.results.get("classifiers"))

    @property
    def strategy(self) -> str:
        return str(self.settings["strategy"]["name"])

    @property
    def task_names(self) -> list[str]:
        """What to call each task, such as the month in which it came; the number where nobody named it."""
        names = self.pictures.task_names
        return [names[n] if n < len(names) else f"Task {n + 1}" for n in range(len(self.learned))]

    @property
    def untested(self) -> str:
        """Return a sentence that says why a run has no accuracies."""
        last = self.updates[-1] if self.updates else None
        if last is None or not (self.tested_before or self.predictions):
            return "The stream has no test images." if last is None else "It has not been tested since it was changed."
        corrected = last.forgotten or last.renamed or min(last.images.values(), default=0) < 0
        return f"It has not been tested since {'the correction' if corrected else 'it was changed'}."

    @property
    def trained(self) -> bool:
        """Whether the model itself was trained in some task."""
        return was_trained(self.records)

    @property
    def captured(self) -> bool:
        """Whether some task was asked which part of its gradient the modes capture."""
        return any(record.get("shared_capture") is not None for record in self.records)


def was_trained(records: Sequence[Mapping[str, Any] | None]) -> bool:
    """Whether the model itself was trained in some task; `records` are the "tasks" of `results.json`."""
    return any(record and record.get("loss") for record in records)


def read_run(folder: str | os.PathLike[str]) -> RunFolder:
    """Read what `run` wrote into a folder, finished or not, or the folder of a saved learner."""
    path = Path(folder)
    put_back(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is no folder; a report is made of a folder that run has written")
    results = _read(path / RESULTS_FILE, Results)
    own = (path / LEARNER_FILE).is_file()
    task = (path, read_manifest(path)) if own else newest_task(path, lambda _: None)
    more: dict[str, Any] = {}
    if task is not None:
        newest, manifest = task
        learner = read_record(newest / LEARNER_FILE, LearnerFile)
        # A learner that `save_pretrained` wrote is of no run, and says less.
        saved = {"strategy": learner.strategy, "adapter": None, "arguments": learner.arguments, "classifiers": {}}
        identity = manifest.notes.get("identity", saved)
        settings = {name: identity[name] for name in saved}
        finished = own or (results is not None and results["class_names"] == manifest.notes["tasks"])
        if results is None or not finished:
            try:
                tasks = read_finished(newest, learner.tasks)
                found = stream_results(tasks, identity, learner.classifiers, manifest.versions)
                results = Results.model_validate(found).model_dump(exclude_unset=True)
            except (ValueError, KeyError, CheckpointError) as error:
                raise ValueError(f"{newest} is not as a run writes it: {error}") from error
        results["estimates"] = learner.estimates.model_dump()
        order = learner.classifiers
        more = {"finished": finished, "base_model": learner.base_model.name, "updates": learner.updates}
        more["learner"] = newest
        names = [name for task in learner.tasks for name in task]
        more["tested_before"] = any(read_known(newest, names, os.listdir(newest)).tested.values())
    elif results is not None:  # somebody kept the small files alone
        newest, settings, order = path, {"strategy": results["strategy"], **results["configuration"]}, []
    else:
        raise ValueError(f"{path} holds neither {RESULTS_FILE} nor a finished task's folder: nothing to report")
    order = order or list(results.get("classifiers", {}))
    learned = results["class_names"]
    timings, sources = ((_read(path / file, kind) or {"tasks": []})["tasks"] for file, kind in _OF_TASKS.items())
    none = [None] * len(learned)
    return RunFolder(
        folder=path,
        name=path.resolve().name,
        results=results,
        learned=learned,
        records=[record or {} for record in (*results["tasks"], *none)][: len(learned)],
        settings=settings,
        predictions=read_predictions(newest / PREDICTIONS_FILE) if (newest / PREDICTIONS_FILE).is_file() else [],
        timings=[*timings, *none][: len(learned)],
        pictures=_pictures(path / PICTURES_FOLDER),
        first=next(iter(order), ""),
        source=next((one for one in reversed(sources[: len(learned)]) if one is not None), None),
        **more,
    )


def _read(path: Path, kind: type[Record]) -> dict[str, Any] | None:
    """A file's content, checked; None where there is no such file."""
    return read_record(path, kind).model_dump(exclude_unset=True) if path.is_file() else None


def _pictures(folder: Path) -> Pictures:
    """The pictures of a finished run, but for those whose files are gone or links."""
    path = folder / PICTURES_INDEX
    found = read_record(path, Pictures) if path.is_file() else Pictures()

    def there(shown: Photograph) -> bool:  # a link could lead to any picture of whoever makes the page
        return (folder / shown.file).is_file() and not (folder / shown.file).is_symlink()

    def whole(example: Example) -> Example:
        near = example.nearest if example.nearest and there(example.nearest) else None
        return example.model_copy(update={"nearest": near})

    kinds = {kind: filter(there, getattr(found, kind)) for kind in ("mistakes", "classes")}
    return found.model_copy(update={kind: list(map(whole, examples)) for kind, examples in kinds.items()})
