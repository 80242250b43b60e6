"""Run a class-incremental stream: learn, test, commit a folder per task, resume, and write `results.json`."""

import re
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import cast

from accelerate import Accelerator

from dulbe_peft.checkpoints import layout, saving
from dulbe_peft.checkpoints.layout import LEARNER_FILE, PROGRESS_FILE, RESULTS_FILE, TIMINGS_FILE
from dulbe_peft.classifiers.teaching import ClosingPass
from dulbe_peft.data.names import check_class_texts
from dulbe_peft.data.store import FeatureStore
from dulbe_peft.encoders.loading import check_saved, has_text
from dulbe_peft.learner import ClassIncrementalLearner
from dulbe_peft.metrics.accuracy import percent
from dulbe_peft.metrics.evaluation import PREDICTIONS_FILE, Evaluation, write_predictions
from dulbe_peft.metrics.results import Kept, Results
from dulbe_peft.metrics.task_features import FEATURES_FOLDER, SUFFIX, TaskFeatures
from dulbe_peft.streams import progress
from dulbe_peft.streams import resume as resuming
from dulbe_peft.streams.progress import SOURCES_FILE, FinishedTask, Row
from dulbe_peft.streams.tasks import Task
from dulbe_peft.streams.training_cost import Before, fall_line
from dulbe_peft.training.task_trainer import TaskRecord
from dulbe_peft.utils import folders
from dulbe_peft.utils.files import replacing, write_json
from dulbe_peft.utils.processes import on_main_process
from dulbe_peft.utils.profiling import forget_peak_memory, peak_memory
from dulbe_peft.utils.records import write_record
from dulbe_peft.utils.terminal import print_once

LOCK_FILE = ".dulbe_peft.lock"


def run_stream(
    learner: ClassIncrementalLearner,
    tasks: Iterable[Task],
    output_dir: str | Path,
    resume: bool = True,
    *,
    known_tests: Sequence[object] | None = None,
    class_texts: Mapping[str, Sequence[str]] | None = None,
    keep_features: bool = False,
    past: Sequence[FinishedTask] | None = None,
    source: dict[str, object] | None = None,
) -> Results:
    """Learn a stream, test after every task, and write a folder for each: `task-001`, `task-002` and so on.

    Tasks that were learned before come first in the results, and the numbers of the folders continue after them.
    If there is no new task, the learner is tested and written as it is.

    Args:
        learner: The learner, which is changed.
        tasks: Stream of tasks; tasks without test data are learned but not tested.
        output_dir: Folder for the task folders, `results.json`, `timings.json` and `predictions.csv`.
        resume: Whether to continue after the newest valid task folder. Its finished tasks must be the first ones
            of `tasks`, with the same data; later tasks may have changed.
        known_tests: Test data, or None, for each task that the learner had learned before the run.
        class_texts: Texts of any of the classes, as in `learn_task`.
        keep_features: Whether to write all features to `features/task-001.safetensors` and so on, from which
            `metrics.task_features.learn_from_features` trains other classifiers without training the model again.
        past: Records of the tasks that the learner had learned before; None takes what their run measured.
        source: Where the data of the tasks came from, for `sources.json`.

    Returns:
        The measures, settings, seed and versions. `contents()` is what `results.json` holds.

    Raises:
        ValueError: If the folder belongs to a run with other settings, another start or other finished tasks, or
            has task folders although `resume` is off.

    Example:
        >>> results = run_stream(learner, digit_tasks(increment=5), "out")  # doctest: +SKIP
        >>> results.classifiers["bayes"].last_accuracy  # doctest: +SKIP
        0.94
    """
    stream, output = list(tasks), Path(output_dir)
    _check(learner, stream, output)
    try:
        with _held(learner, output):
            texts = check_class_texts(class_texts or {}, {name for task in stream for name in task.class_names})
            before = on_main_process(partial(progress.known_tasks, learner)) if past is None else list(past)
            find = partial(resuming.newest_of_run, learner, stream, output, texts)
            newest = on_main_process(find) if resume else None
            if newest is None:
                resuming.check_new(learner, stream, output, resume)
                identity, finished = resuming.identity_of(learner.state), before
            else:
                identity, finished = newest[1], resuming.continue_run(learner, *newest, before)
            learner.use_state(replace(learner.state, class_texts=learner.state.class_texts | texts))
            known = len(identity.start.tasks)
            tests = [None] * known if known_tests is None else list(known_tests)
            if len(tests) != known:
                raise ValueError(
                    f"known_tests has {len(tests)} entries, but the learner had learned {known} tasks before the "
                    "run: give test data or None for each of them"
                )
            every = [*zip(tests, learner.tasks), *((task.test, task.class_names) for task in stream)]
            _plan(learner, len(every))
            new = newest is None
            return Run(learner, stream, output, identity, finished, every, known, new, keep_features, source).finish()
    except ChildProcessError as error:
        raise ChildProcessError(f"{error}; finished tasks are kept in {output}: run again to continue") from error


def _check(learner: ClassIncrementalLearner, stream: Sequence[Task], output: Path) -> None:
    """Raise the errors of `run_stream` that need no look into the folder."""
    if not stream and not learner.state.tasks:
        raise ValueError("tasks is empty: a stream needs at least one task")
    for index, task in enumerate(stream):
        if not isinstance(task, Task):
            raise TypeError(f"tasks[{index}] must be a Task(train, test, class_names), got a {type(task).__name__}")
    if output.exists() and not output.is_dir():
        raise ValueError(f"output_dir {str(output)!r} is a file, expected a folder")
    folders.check_outside_saved(output, "write a run")
    check_saved(learner.state.processor, learner.state.base)
    untested = [index + 1 for index, task in enumerate(stream) if task.test is None]
    if 0 < len(untested) < len(stream):
        raise ValueError(f"task {untested[0]} has no test data but others do: give test data to all tasks or to none")


@contextmanager
def _held(learner: ClassIncrementalLearner, output: Path) -> Iterator[None]:
    """Lock the folder, and give the learner a tracker if its settings name one, and a feature store."""
    with ExitStack() as held:
        on_main_process(partial(_lock_folder, output, held))
        if learner.args.log_with:  # a tracker, such as TensorBoard
            device = {"cpu": learner.device.type == "cpu"}
            accelerator = Accelerator(**device, log_with=learner.args.log_with, project_dir=str(output))
            accelerator.init_trackers("dulbe_peft")
            learner.log = accelerator.log
            held.callback(setattr, learner, "log", None)
            held.callback(accelerator.end_training)
        # Without the user's store, a temporary one ensures that an untrained model encodes each image only once.
        store = learner.encoder.store
        held.callback(learner.use_store, store)
        learner.use_store(store or FeatureStore())
        held.callback(_plan, learner, None)
        yield


def _plan(learner: ClassIncrementalLearner, tasks: int | None) -> None:
    """Tell the strategy how many tasks the stream has."""
    learner.use_state(replace(learner.state, planned=tasks))


def _lock_folder(output: Path, held: ExitStack) -> None:
    """Lock the folder against other runs, and remove temporary files that killed runs have left."""
    held.enter_context(folders.exclusive(output / LOCK_FILE, f"output_dir {str(output)!r}"))
    folders.clear_leftovers(output, "|".join([layout.TASK_FOLDER, *map(re.escape, resuming.FILES)]))


@dataclass
class Run:
    """A run in progress. Its tasks are those that the learner had learned before, and then those of the stream."""

    learner: ClassIncrementalLearner
    stream: list[Task]
    output: Path
    identity: resuming.Identity
    finished: list[FinishedTask]
    tests: list[tuple[object, tuple[str, ...]]]  # for every task, test data or None, and class names
    known: int  # number of tasks that were learned before the run
    new: bool  # whether the folder has no task of the run yet
    keep_features: bool
    source: dict[str, object] | None
    evaluations: dict[int, Evaluation] = field(default_factory=dict)  # by number of a task: the latest predictions

    def finish(self) -> Results:
        """Learn the remaining tasks and write the results."""
        if len(self.finished) < len(self.tests) or self.new:
            if self.stream:
                self.learner.encoder.calibrate(self.learner.encoder.images(self.stream[0].train))
            zero_shot = self.zero_shot()
            for task, value in zip(self.finished, zero_shot, strict=False):
                task.zero_shot = value
            if not self.stream:  # without new tasks, the learner is tested again and committed as it is
                self.learner.estimate()
                row = self.measure(len(self.finished))
                if row.classifiers or any(update.after == len(self.finished) for update in self.learner.state.updates):
                    self.finished[-1].row = row
                self.commit()
            for index in range(len(self.finished), len(self.tests)):
                with self.learner.transaction():
                    self.learn(index, zero_shot[index])
        self.write_entries()
        made_by = self.identity.model_dump(), list(self.learner.classifiers), folders.library_versions()
        results = progress.stream_results(self.finished, *made_by, self.learner.state.estimates, self.known)
        kept = [Kept(after=u.after, share=u.kept) for u in self.learner.state.updates if u.kept is not None]
        results = results.model_copy(update={"kept": kept}) if kept else results
        on_main_process(partial(self.write_results, results))
        self.learner.folder = self.newest.resolve()
        return results

    def zero_shot(self) -> list[float | None]:
        """Return A_t of the pristine model for every task; finished tasks keep their recorded values."""
        if not has_text(self.learner.state.base) or all(test is None for test, _ in self.tests):
            return [None] * len(self.tests)
        measured = self.learner.zero_shot(self.tests)
        if measured[-1] is not None:
            print_once(f"zero-shot over all classes, before any training: {percent(measured[-1], 2)} %")
        recorded = [task.zero_shot for task in self.finished]
        return [new if old is None else old for old, new in zip_longest(recorded, measured)]

    def learn(self, index: int, zero_shot: float | None) -> None:
        """Learn, test and commit the task with this index among all tasks."""
        started, cpu = time.perf_counter(), time.process_time()
        learner, task = self.learner, self.stream[index - self.known]
        forget_peak_memory(learner.device)
        before = self.before(index, task) if index and learner.state.strategy.adapts else None
        learner.learn_task(task.train, task.class_names)
        share = cast(TaskRecord, learner.record).update_share
        if share is not None and learner.args.update_share == "auto":
            print_once(f"keeping {percent(share)} % of what this task changed; --update-share sets another share")
        names, profile = list(task.class_names), learner.encoder.profile
        if task.test is not None:
            learner.use_state(replace(learner.state, known=learner.state.known.add_tested(task.test)))
        with profile.phase("test"):
            row = self.measure(index + 1)
            row = row if before is None else self.with_costs(row, before)
        done = FinishedTask(
            class_names=names, row=row, zero_shot=zero_shot, details=asdict(cast(TaskRecord, learner.record))
        )
        self.finished.append(done)
        with profile.phase("save"):
            if self.keep_features:
                self.write_features()
            self.commit()
        seconds = time.perf_counter() - started
        done.timing = progress.Timing(
            seconds=seconds,
            cpu_seconds=time.process_time() - cpu,
            phases=dict(profile.seconds),
            peak_memory=peak_memory(learner.device),
            finished=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        )
        self.write_entries()
        if learner.log is not None and row.classifiers:
            shares = {f"accuracy/{name}": score.accuracy for name, score in row.classifiers.items()}
            learner.log(shares, max(learner.state.step, index + 1))  # without training, there are no steps
        line = progress.progress_line(row, index + 1, len(self.tests), len(learner.class_names))
        print_once(f"{line}, {seconds:.1f} s")
        if warning := fall_line(row.costs, row.changed):
            print_once(warning)
        if learner.args.profile:
            print_once(profile.table())

    def measure(self, count: int) -> Row:
        """Test the learner on the first `count` tasks, as far as they have test data, and return the row."""
        tests = dict(enumerate(self.tests[:count], 1))
        tested = [number for number, (test, names) in tests.items() if test is not None and names]
        evaluations = self.learner.evaluations([tests[number] for number in tested])
        self.evaluations = dict(zip(tested, evaluations, strict=True))
        return progress.measured_row([self.evaluations.get(number) for number in tests])

    def before(self, index: int, task: Task) -> Before:
        """Return the learner before a task that trains the model; after a resume, old tasks are tested again first."""
        if not self.evaluations:
            self.measure(index)
        return Before.of(self.learner, tuple(task.class_names), dict(self.evaluations))

    def with_costs(self, row: Row, before: Before) -> Row:
        """Return the row with what training the task cost the old classes."""
        learner, closing = self.learner, cast(ClosingPass, self.learner.closing)
        costs = before.costs(closing, self.evaluations, learner.args.seed)
        changed = None
        if before.hardly_tested:
            changed = before.changed(closing, learner.state.classifier, learner.args.seed)
        return row.model_copy(update={"costs": costs, "changed": changed})

    @property
    def newest(self) -> Path:
        return self.output / f"task-{len(self.learner.tasks):03d}"

    def commit(self) -> None:
        """Write the folder of the newest task; the first one of a run also records the tasks before the run."""
        state = self.learner.state

        def write(temporary: Path) -> None:
            saving.write(state, temporary)
            since = len(self.finished) - 1 if len(self.finished) > self.known + 1 else 0
            write_record(temporary / PROGRESS_FILE, progress.Progress(tasks=self.finished[since:]))
            if self.evaluations:
                write_predictions(temporary / PREDICTIONS_FILE, self.evaluations)

        notes = {"identity": self.identity.model_dump(), "tasks": [list(names) for names in state.tasks]}
        ours = any((self.newest / name).exists() for name in (folders.MANIFEST, LEARNER_FILE))  # may be damaged
        on_main_process(
            partial(folders.commit_folder, self.newest, "task of a run", write, notes, lock=False, overwrite=ours)
        )

    def write_features(self) -> None:
        """Write the newest task's features. This happens before the commit, so that every finished task has them."""
        learner, closing = self.learner, cast(ClosingPass, self.learner.closing)
        if closing.texts is None and learner.state.has_names:
            each = learner.encoder.each_text_embeds(closing.class_names, learner.state.class_texts)
            closing = replace(closing, texts=learner.text_embeds(learner.class_names), each_text=each)
        tests = {number: (test.features, test.truth) for number, test in self.evaluations.items()}
        file = self.output / FEATURES_FOLDER / f"{self.newest.name}{SUFFIX}"
        file.parent.mkdir(parents=True, exist_ok=True)
        on_main_process(partial(TaskFeatures(closing, tests).write, file))

    def write_entries(self) -> None:
        """Write the files that have an entry for each task: times and sources of the data."""
        for task in self.finished[self.known :]:
            task.source = task.source or self.source
        times = progress.Timings(tasks=[task.timing for task in self.finished])
        sources = progress.Sources(tasks=[task.source for task in self.finished])
        for file, record in ((TIMINGS_FILE, times), (SOURCES_FILE, sources)):
            if any(record.tasks):
                on_main_process(partial(write_record, self.output / file, record))

    def write_results(self, results: Results) -> None:
        write_json(self.output / RESULTS_FILE, results.contents())
        if (self.newest / PREDICTIONS_FILE).is_file():
            with replacing(self.output / PREDICTIONS_FILE) as temporary:
                shutil.copyfile(self.newest / PREDICTIONS_FILE, temporary)
