"""A whole class-incremental stream: learn, test, commit a folder per task, resume, write `results.json`."""

import re
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from accelerate import Accelerator

from dulbe_peft.checkpoints import layout, saving
from dulbe_peft.checkpoints.layout import LEARNER_FILE, PROGRESS_FILE, RESULTS_FILE, TIMINGS_FILE
from dulbe_peft.classifiers.closing import ClosingPass
from dulbe_peft.data.names import check_class_texts
from dulbe_peft.data.store import FeatureStore
from dulbe_peft.encoders.loading import check_saved, has_text
from dulbe_peft.metrics.accuracy import percent
from dulbe_peft.metrics.evaluation import PREDICTIONS_FILE, Evaluation, write_predictions
from dulbe_peft.metrics.features import FEATURES_FOLDER, SUFFIX, TaskFeatures
from dulbe_peft.streams import progress, resume
from dulbe_peft.streams.falls import Before, fall_line
from dulbe_peft.streams.learning import StreamLearner
from dulbe_peft.streams.progress import SOURCES_FILE, FinishedTask, Row
from dulbe_peft.streams.results import stream_results
from dulbe_peft.streams.tasks import Task
from dulbe_peft.training.trainer import TaskRecord
from dulbe_peft.utils import folders
from dulbe_peft.utils.files import replacing, write_json
from dulbe_peft.utils.processes import on_main_process
from dulbe_peft.utils.profiling import forget_peak_memory, peak_memory
from dulbe_peft.utils.records import write_record
from dulbe_peft.utils.terminal import print_once

LOCK_FILE = ".dulbe_peft.lock"


@dataclass(frozen=True)
class RunOptions:
    """How a stream is run.

    Attributes:
        resume: go on in a folder that holds tasks.
        past: what is known of the tasks that the learner had learned before the run; None: what their run measured.
        known_tests: test data, or None, of each of these tasks.
        source: where the data of the tasks came from, for `sources.json`.
        keep_features: write all features to `features/task-001.safetensors` and so on, from which
            `metrics.features.learn_from_features` teaches other classifiers without training again.
        class_texts: texts of any of the classes, as in `learn_task`.
    """

    resume: bool = True
    past: Sequence[FinishedTask] | None = None
    known_tests: Sequence[Any] | None = None
    source: dict[str, Any] | None = None
    keep_features: bool = False
    class_texts: Mapping[str, Sequence[str]] | None = None


def run_stream(
    learner: StreamLearner, tasks: Iterable[Task], output_dir: str | Path, options: RunOptions
) -> dict[str, Any]:
    """Learn `tasks` one after the other; see `ClassIncrementalLearner.run`."""
    stream, output = list(tasks), Path(output_dir)
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
        raise ValueError(f"task {untested[0]} has no test data, others have: give it to all tasks or to none")
    try:
        with ExitStack() as held:
            on_main_process(partial(_lock_folder, output, held))
            if learner.args.log_with:  # a tracker, such as TensorBoard
                device = {"cpu": learner.device.type == "cpu"}
                accelerator = Accelerator(**device, log_with=learner.args.log_with, project_dir=str(output))
                accelerator.init_trackers("dulbe_peft")
                learner.log = accelerator.log
                held.callback(setattr, learner, "log", None)
                held.callback(accelerator.end_training)
            # A model that is not trained encodes an image once, also without the user's store.
            store = learner.encoder.store
            held.callback(learner.use_store, store)
            learner.use_store(store or FeatureStore())
            return _open(learner, stream, output, options).finish()
    except ChildProcessError as error:
        raise ChildProcessError(f"{error}; finished tasks are kept in {output}, run again to go on") from error


def _open(learner: StreamLearner, own: list[Task], output: Path, options: RunOptions) -> "Run":
    """The run in a folder where it was left, or a new one; the learner's state is that of its newest task."""
    texts = check_class_texts(options.class_texts or {}, {name for task in own for name in task.class_names})
    past = on_main_process(partial(progress.known_tasks, learner)) if options.past is None else list(options.past)
    find = partial(resume.newest_of_run, learner, own, output, texts)
    found = on_main_process(find) if options.resume else None
    if found is None:
        resume.check_new(learner, own, output, options.resume)
        identity, finished = resume.identity_of(learner.state), past
    else:
        identity, finished = found[1], resume.go_on(learner, *found, past)
    learner.use_state(replace(learner.state, class_texts=learner.state.class_texts | texts))
    known = len(identity.start.tasks)
    known_tests = [None] * known if options.known_tests is None else list(options.known_tests)
    if len(known_tests) != known:
        raise ValueError(
            f"known_tests has {len(known_tests)} entries, the learner had learned {known} tasks before the run: give "
            "test data or None for each of them"
        )
    tests = [*zip(known_tests, learner.tasks), *((task.test, task.class_names) for task in own)]
    return Run(learner, own, output, options, identity, finished, tests, known, new=found is None)


def _lock_folder(output: Path, held: ExitStack) -> None:
    """Keep other runs out of the folder, and remove what killed ones left in it."""
    held.enter_context(folders.exclusive(output / LOCK_FILE, f"output_dir {str(output)!r}"))
    folders.clear_leftovers(output, "|".join([layout.TASK_FOLDER, *map(re.escape, resume.FILES)]))


@dataclass
class Run:
    """A run on its way: the tasks that its learner had learned before it, and its own."""

    learner: StreamLearner
    own: list[Task]
    output: Path
    options: RunOptions
    identity: resume.Identity
    finished: list[FinishedTask]
    tests: list[tuple[Any, tuple[str, ...]]]  # of every task, test data or None, and class names
    known: int  # tasks that were learned before it
    new: bool  # nothing of it is in the folder yet
    evaluations: dict[int, Evaluation] = field(default_factory=dict)  # task's number -> predictions after the newest

    def finish(self) -> dict[str, Any]:
        """Learn what is not learned yet, and write the results."""
        if len(self.finished) < len(self.tests) or self.new:
            if self.own:
                self.learner.encoder.calibrate(self.learner.encoder.images(self.own[0].train))
            zero_shot = self.zero_shot()
            for task, value in zip(self.finished, zero_shot, strict=False):
                task.zero_shot = value
            if not self.own:  # a learner that has nothing to learn is committed as it is, tested again
                self.learner.estimate()
                row = self.measure(len(self.finished))
                if row.classifiers or any(one.after == len(self.finished) for one in self.learner.state.updates):
                    self.finished[-1].row = row
                self.commit()
            for index in range(len(self.finished), len(self.tests)):
                with self.learner.transaction():
                    self.learn(index, zero_shot[index])
        self.write_entries()
        made_by = self.identity.model_dump(), list(self.learner.classifiers), folders.library_versions()
        results = stream_results(self.finished, *made_by, self.known)
        results["estimates"] = self.learner.state.estimates.model_dump(mode="json")
        on_main_process(partial(self.write_results, results))
        self.learner.folder = self.newest.resolve()
        return results

    def zero_shot(self) -> list[float | None]:
        """A_t of the pristine model for every task; of finished tasks the figures that are known already."""
        if not has_text(self.learner.state.base) or all(test is None for test, _ in self.tests):
            return [None] * len(self.tests)
        found = self.learner.zero_shot(self.tests)
        if found[-1] is not None:
            print_once(f"zero-shot over all classes, before any training: {percent(found[-1], 2)} %")
        before = [task.zero_shot for task in self.finished]
        return [new if old is None else old for old, new in zip_longest(before, found)]

    def learn(self, index: int, zero_shot: float | None) -> None:
        """Learn, test and commit the task at a place among all."""
        started, cpu = time.perf_counter(), time.process_time()
        learner, task = self.learner, self.own[index - self.known]
        forget_peak_memory(learner.device)
        before = self.before(index, task) if index and learner.state.strategy.adapts else None
        asked = learner.args.learning_rate
        learner.learn_task(task.train, task.class_names)
        if (rate := learner.args.learning_rate) != asked:
            print_once(f"learning rate {rate:g}, as the model and this task allow; --learning-rate sets another")
        names, profile = list(task.class_names), learner.encoder.profile
        if task.test is not None:
            learner.use_state(replace(learner.state, known=learner.state.known.with_tested(task.test)))
        with profile.phase("test"):
            row = self.measure(index + 1)
            row = row if before is None else self.with_costs(row, before)
        done = FinishedTask(
            class_names=names, row=row, zero_shot=zero_shot, details=asdict(cast(TaskRecord, learner.record))
        )
        self.finished.append(done)
        with profile.phase("save"):
            if self.options.keep_features:
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
        line = progress.progress_line(row, index + 1, len(self.tests), len(learner.class_names))
        print_once(f"{line}, {seconds:.1f} s")
        if said := fall_line(row.costs, row.changed):
            print_once(said)
        if learner.args.profile:
            print_once(profile.table())

    def measure(self, count: int) -> Row:
        """What is measured after the first `count` tasks, on those of them that have test data."""
        tests = dict(enumerate(self.tests[:count], 1))
        tested = [number for number, (test, names) in tests.items() if test is not None and names]
        found = self.learner.evaluations([tests[number] for number in tested])
        self.evaluations = dict(zip(tested, found, strict=True))
        return progress.measured_row([self.evaluations.get(number) for number in tests])

    def before(self, index: int, task: Task) -> Before:
        """The learner before a task that trains the model; old tests are read again where a run goes on."""
        if not self.evaluations:
            self.measure(index)
        return Before.of(self.learner, tuple(task.class_names), dict(self.evaluations))

    def with_costs(self, row: Row, before: Before) -> Row:
        """A row with what training the task cost the classes before it."""
        learner, closing = self.learner, cast(ClosingPass, self.learner.closing)
        costs = before.costs(closing, self.evaluations, learner.args.seed)
        changed = None if before.tests else before.changed(closing, learner.state.classifier, learner.args.seed)
        return row.model_copy(update={"costs": costs, "changed": changed})

    @property
    def newest(self) -> Path:
        return self.output / f"task-{len(self.learner.tasks):03d}"

    def commit(self) -> None:
        """Write the folder of the newest task; the run's first one says also what is known of those before it."""
        state = self.learner.state

        def write(temporary: Path) -> None:
            saving.write(state, temporary)
            since = len(self.finished) - 1 if len(self.finished) > self.known + 1 else 0
            write_record(temporary / PROGRESS_FILE, progress.Progress(tasks=self.finished[since:]))
            if self.evaluations:
                write_predictions(temporary / PREDICTIONS_FILE, self.evaluations)

        notes = {"identity": self.identity.model_dump(), "tasks": [list(names) for names in state.tasks]}
        ours = any((self.newest / name).exists() for name in (folders.MANIFEST, LEARNER_FILE))  # it may be damaged
        on_main_process(
            partial(folders.commit_folder, self.newest, "task of a run", write, notes, lock=False, overwrite=ours)
        )

    def write_features(self) -> None:
        """Write the newest task's features; before the commit, so that no finished task is without them."""
        learner, closing = self.learner, cast(ClosingPass, self.learner.closing)
        if closing.texts is None and has_text(learner.state.base):
            each = learner.encoder.each_text_embeds(closing.class_names, learner.state.class_texts)
            closing = replace(closing, texts=learner.text_embeds(learner.class_names), each_text=each)
        tests = {number: (found.features, found.truth) for number, found in self.evaluations.items()}
        file = self.output / FEATURES_FOLDER / f"{self.newest.name}{SUFFIX}"
        file.parent.mkdir(parents=True, exist_ok=True)
        on_main_process(partial(TaskFeatures(closing, tests).write, file))

    def write_entries(self) -> None:
        """Write the files with an entry for each task: times, and where its data came from."""
        for task in self.finished[self.known :]:
            task.source = task.source or self.options.source
        times = progress.Timings(tasks=[task.timing for task in self.finished])
        sources = progress.Sources(tasks=[task.source for task in self.finished])
        for file, record in ((TIMINGS_FILE, times), (SOURCES_FILE, sources)):
            if any(record.tasks):
                on_main_process(partial(write_record, self.output / file, record))

    def write_results(self, results: dict[str, Any]) -> None:
        write_json(self.output / RESULTS_FILE, results)
        if (self.newest / PREDICTIONS_FILE).is_file():
            with replacing(self.output / PREDICTIONS_FILE) as temporary:
                shutil.copyfile(self.newest / PREDICTIONS_FILE, temporary)
