"""Read the folder of a run, finished or not, for a report."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from dulbe_peft.checkpoints import learner_file
from dulbe_peft.checkpoints.layout import LEARNER_FILE, RESULTS_FILE, TIMINGS_FILE, newest_task, task_folders
from dulbe_peft.checkpoints.restoring import read_known
from dulbe_peft.data.known import KnownImages
from dulbe_peft.metrics.evaluation import PREDICTIONS_FILE, ImageResult, read_predictions
from dulbe_peft.metrics.results import Results, TaskFacts
from dulbe_peft.streams.progress import SOURCES_FILE, Sources, Timing, Timings, read_finished, stream_results
from dulbe_peft.training.state import Update
from dulbe_peft.utils.folders import CheckpointError, put_back, read_manifest
from dulbe_peft.utils.records import Fraction, Record, read_record
from dulbe_peft.utils.terminal import printable_lines

R = TypeVar("R", bound=Record)
PICTURES_FOLDER = "pictures"
PICTURES_INDEX = "index.json"
NO_TESTS = "The stream has no test images."


class Photograph(Record):
    """A small picture in the run's folder, with the name and the class of the image that it shows."""

    # The name contains no folder, so that the index cannot lead to a file elsewhere.
    file: Annotated[str, Field(pattern=r"^[\w-]+\.jpg$")]
    image: str
    true: str = Field(alias="class")


class Example(Photograph):
    """A test image and its predicted class; a mistake may also have the `nearest` training image.

    If the image is one of several `photographs` of an item, `mistaken` counts those that are mistakes, and `views`
    shows some of the others.
    """

    predicted: str
    probability: Fraction
    nearest: Photograph | None = None
    views: list[Photograph] = []
    photographs: int = 1
    mistaken: int = 1


class Copy(Record):
    """A test image that was also learned: its task and position, how it matches, and the class that was learned."""

    task: int
    position: int
    how: str
    of: str


class Pictures(Record):
    """The content of `pictures/index.json`: examples, files that were left out, copies, and names of tasks."""

    mistakes: list[Example] = []
    classes: list[Example] = []
    left_out: list[str] = []
    copies: list[Copy] = []
    task_names: list[str] = []


@dataclass(frozen=True)
class RunFolder:
    """The finished tasks of a run, as its folder describes them. Unknown values are None or empty."""

    folder: Path
    name: str
    results: Results
    learned: list[list[str]]
    records: list[TaskFacts]  # how each task was trained
    settings: dict[str, Any]
    predictions: list[ImageResult]
    timings: list[Timing | None]
    pictures: Pictures
    damaged: list[str] = field(default_factory=list)  # what is wrong with each task folder that is damaged
    finished: bool = True
    base_model: str | None = None
    updates: list[Update] = field(default_factory=list)
    first: str = ""  # the classifier that `predict` uses
    learner: Path | None = None  # the folder of the learner after the newest task
    known: KnownImages = field(default_factory=KnownImages)  # the images that it has learned and was tested on
    source: dict[str, Any] | None = None  # the data of the newest task whose data is known

    @property
    def tested_before(self) -> bool:
        """Return whether the learner was ever tested, even if it has been changed since."""
        return any(self.known.tested.values())

    @property
    def tested(self) -> bool:
        return bool(self.results.classifiers)

    @property
    def strategy(self) -> str:
        return str(self.settings["strategy"]["name"])

    @property
    def task_names(self) -> list[str]:
        """Return the name of each task, such as a month, or its number if it has no name."""
        names = self.pictures.task_names
        return [names[n] if n < len(names) else f"Task {n + 1}" for n in range(len(self.learned))]

    @property
    def untested(self) -> str:
        """Return a sentence that says why a run has no accuracies."""
        last = self.updates[-1] if self.updates else None
        if last is None or not (self.tested_before or self.predictions):
            changed = last is not None
            return "The learner has not been tested since it was changed." if changed else NO_TESTS
        corrected = last.forgotten or last.renamed or min(last.images.values(), default=0) < 0
        return f"The learner has not been tested since {'the correction' if corrected else 'it was changed'}."

    @property
    def trained(self) -> bool:
        """Return whether any task trained the model itself."""
        return self.results.trained

    @property
    def captured(self) -> bool:
        """Return whether any task measured the share of its gradient that the modes capture."""
        return any(record.shared_capture is not None for record in self.records)


def read_run(folder: str | os.PathLike[str], results: Results | None = None) -> RunFolder:
    """Read the folder of a run, finished or not, of one of its tasks, or of a saved learner.

    `results` are the run's results if they are known, so that they are not read again.

    Raises:
        FileNotFoundError: If there is no such folder.
        ValueError: If the folder holds no finished task, or a file of it is damaged.
    """
    path = Path(folder)
    put_back(path)
    if not path.is_dir():
        raise FileNotFoundError(f"{path} is not a folder: give a folder that run has written")
    results = results or _read(path / RESULTS_FILE, Results)
    is_task = (path / LEARNER_FILE).is_file()
    task = (path, read_manifest(path)) if is_task else newest_task(path, lambda _: None)
    broken = [] if is_task else _damaged_tasks(path)
    for damaged in broken:
        message = f"dulbe-peft: a task is damaged, so the report may lack something: {damaged}"
        print(printable_lines(message), file=sys.stderr)
    more: dict[str, Any] = {}
    if task is not None:
        newest, manifest = task
        learner = learner_file.read(newest)
        # A learner that `save_pretrained` wrote belongs to no run and records fewer settings.
        saved = {"strategy": learner.strategy, "adapter": None, "arguments": learner.arguments, "classifiers": {}}
        identity = manifest.notes.get("identity", saved)
        settings = {name: identity[name] for name in saved}
        finished = is_task or (results is not None and results.class_names == manifest.notes["tasks"])
        if results is None or not finished:
            try:
                tasks = read_finished(newest, learner.tasks)
                of_run = identity, learner.classifiers, manifest.versions
                results = stream_results(tasks, *of_run, learner.estimates)
            except (ValueError, KeyError, CheckpointError) as error:
                raise ValueError(f"{newest} is not a folder that a run has written: {error}") from error
        results = results.model_copy(update={"estimates": learner.estimates})
        order = learner.classifiers
        more = {"finished": finished, "base_model": learner.base_model.name, "updates": learner.updates}
        more["learner"] = newest
        names = [name for task in learner.tasks for name in task]
        more["known"] = read_known(newest, names, os.listdir(newest))
    elif results is not None:  # only the small files were kept
        newest, settings, order = path, {"strategy": results.strategy.model_dump(), **results.configuration}, []
    else:
        raise ValueError(f"{path} holds neither {RESULTS_FILE} nor a finished task's folder: give the folder of a run")
    order = order or list(results.classifiers)
    learned = results.class_names
    times, sources = _read(path / TIMINGS_FILE, Timings), _read(path / SOURCES_FILE, Sources)
    named = [] if sources is None else sources.tasks[: len(learned)]
    none = [None] * len(learned)
    return RunFolder(
        folder=path,
        name=path.resolve().name,
        results=results,
        learned=learned,
        records=[record or TaskFacts() for record in (*results.tasks, *none)][: len(learned)],
        settings=settings,
        predictions=read_predictions(newest / PREDICTIONS_FILE) if (newest / PREDICTIONS_FILE).is_file() else [],
        timings=[*([] if times is None else times.tasks), *none][: len(learned)],
        pictures=_pictures(path / PICTURES_FOLDER),
        damaged=broken,
        first=next(iter(order), ""),
        source=next((source for source in reversed(named) if source is not None), None),
        **more,
    )


def _damaged_tasks(run: Path) -> list[str]:
    """Return what is wrong with each task folder of a run that is not as it was written."""
    wrong = []
    for folder in reversed(task_folders(run)):
        try:
            read_manifest(folder)
        except CheckpointError as error:
            wrong.append(str(error))
    return wrong


def _read(path: Path, kind: type[R]) -> R | None:
    """Read and validate a file; return None if it does not exist."""
    return read_record(path, kind) if path.is_file() else None


def _pictures(folder: Path) -> Pictures:
    """Read the index of the pictures; leave out pictures whose files are missing or symbolic links."""
    path = folder / PICTURES_INDEX
    pictures = read_record(path, Pictures) if path.is_file() else Pictures()

    def exists(shown: Photograph) -> bool:  # a link could put any file of the user into the page
        return (folder / shown.file).is_file() and not (folder / shown.file).is_symlink()

    def checked(example: Example) -> Example:
        near = example.nearest if example.nearest and exists(example.nearest) else None
        return example.model_copy(update={"nearest": near, "views": [*filter(exists, example.views)]})

    kinds = {kind: filter(exists, getattr(pictures, kind)) for kind in ("mistakes", "classes")}
    return pictures.model_copy(update={kind: list(map(checked, examples)) for kind, examples in kinds.items()})
