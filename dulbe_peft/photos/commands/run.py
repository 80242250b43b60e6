"""example:
  dulbe-peft run --model openai/clip-vit-base-patch16 --data photos --output out

photos holds train/CLASS/*.jpg and test/CLASS/*.jpg, or only CLASS/*.jpg, with --test-fraction 0.2.
By default, nothing is trained and all classes form one task; --strategy and --increment change that.
Repeating the command continues a run that was stopped, or learns classes that were added.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dulbe_peft.arguments import AdapterSettings
from dulbe_peft.photos.commands.advice import next_command, print_next_command
from dulbe_peft.photos.commands.flags import LABELS, OVERWRITE, File
from dulbe_peft.photos.commands.options import command, run_settings
from dulbe_peft.photos.commands.paths import FOLDER, check_given, claim
from dulbe_peft.photos.runs.run_settings import RunSettings, given_settings
from dulbe_peft.photos.runs.setup import data_or_labels
from dulbe_peft.streams.orders import NAMED_ORDERS
from dulbe_peft.utils.settings import field_types, setting
from dulbe_peft.utils.terminal import announce, counted, printable

if TYPE_CHECKING:  # torch is imported when the run is set up
    from dulbe_peft.data.images import LabelledImages
    from dulbe_peft.learner import ClassIncrementalLearner
    from dulbe_peft.metrics.results import Results
    from dulbe_peft.photos.runs.setup import Setup
    from dulbe_peft.strategies.base import Strategy

# The settings that `--help` shows; `--help-all` shows all.
ESSENTIAL = (
    *("model", "data", "output", "strategy", "classifiers", "increment", "test_fraction", "class_order", "dry_run"),
    *("strict", "epochs", "learning_rate", "prompt_template", "seed", "device"),
)


@command("--model MODEL --data DATA --output OUT [OPTIONS]", "finished tasks are kept", run_settings(ESSENTIAL))
def run(
    config: File | None = setting(None, "YAML file with settings of run"),
    labels: str | None = LABELS,
    overwrite: bool = OVERWRITE,
    **flags: Any,
) -> None:
    settings = given_settings(config, flags)
    if labels is not None:
        settings["data"] = data_or_labels(flags["data"], labels)
    _use_model_of_table(settings)
    given = source, model, stream, _, args = RunSettings.of(settings)
    if source.data:  # report a missing folder first, even if flags are missing
        check_given(vocabulary=source.vocabulary)
        source.absolute().check()
    for name in ("model",) if settings.get("dry_run") else ("model", "data", "output"):
        if not settings.get(name):
            raise ValueError(f"--{name} is required")
    if model.revision and Path(str(model.model)).is_dir():
        raise ValueError(f"--revision is {model.revision!r}, but {model.model} is a folder, not a Hub id: omit it")
    order = None if stream.class_order in NAMED_ORDERS else stream.class_order
    files = {"class_names": source.class_names, "class_texts": stream.class_texts, "class_order": order}
    check_given(None, None if model.revision else model.model, **files)
    output, reads = ("--output", stream.output, FOLDER), [model.model, config]
    if not stream.dry_run:
        claim(output, reads=reads, apart=[source.data])
    if args.progress:
        announce(f"reading {source.data or model.model}")
    _ = model.methods  # raises if a strategy or classifier does not exist, before an existing output is renamed
    if overwrite and not stream.dry_run:
        claim(output, reads=reads, apart=[source.data], overwrite=True)
    from dulbe_peft.photos.runs.setup import set_up

    setup = set_up(*given)
    trains = {"epochs", "batch_size", "learning_rate", "update_share", "planning_images"}
    trains = (trains | {*field_types(AdapterSettings)}) & set(settings)
    if trains and not setup.learner.strategy.adapts:
        unused = ", ".join("--" + name.replace("_", "-") for name in sorted(trains))
        print(f"{unused} has no effect, because nothing is trained: --strategy dulbe trains", file=sys.stderr)
    if stream.dry_run:
        describe(setup)
        return
    results, tests, learned = setup.run(), [task.test for task in setup.tasks], [task.train for task in setup.tasks]
    close_run(setup.learner, stream.output, results, tests, learned, setup.left_out)


def _use_model_of_table(settings: dict[str, object]) -> None:
    """If the data is a table of features, use the model that made it and its `whole_images`, unless they are given."""
    path = Path(str(settings.get("data") or ""))
    if not path.name or not path.exists():
        return
    from dulbe_peft.data.feature_tables import encoder_note

    note = encoder_note(path)
    if note is None:
        return
    settings.setdefault("whole_images", "jpeg_side" not in note.facts)
    if not settings.get("model"):
        settings |= {"model": note.model} | ({} if note.revision is None else {"revision": note.revision})


def close_run(
    learner: ClassIncrementalLearner,
    output: str,
    results: Results,
    tests: list[LabelledImages | None],
    learned: list[LabelledImages],
    notes: list[str],
) -> None:
    """Write the pictures of a run and print its results in the first process; then all processes leave the group."""
    from dulbe_peft.photos.report.pictures import write_pictures
    from dulbe_peft.utils.processes import leave, world

    if world()[0] == 0:
        write_pictures(output, tests, results, notes, learner, learned)
        print_results(output, results)
    leave()


def print_results(output: str, results: Results | None = None) -> None:
    """Print the results of a run, the estimate from left-out training images, and the next command.

    Another classifier than the one that predicts by default is recommended if it is clearly better.
    """
    from dulbe_peft.photos.report import format_summary
    from dulbe_peft.photos.report.advice import chosen, estimated
    from dulbe_peft.photos.report.run_folder import read_run

    run = read_run(output, results)
    if run.tested:
        print(format_summary(run.results))
    print(f"written: {Path(output) / 'results.json'}")
    if (estimate := estimated(run.results)) is not None:
        print(f"{estimate.words} {', '.join(f'{name} {share}' for name, share in estimate.rows)}")
    known = sum(map(len, run.results.class_names))
    for remark in run.results.estimates.remarks(known):
        print(printable(remark))
    best, words = chosen(run)
    if words:
        print(words)
    if best != run.first:
        print(f"to predict with it: {next_command('predict', output, 'PHOTOS', classifier=best)}")
    print_next_command("report", output)


def describe(setup: Setup) -> None:
    """Print what a run would do and keep, without running it."""
    for number, task in enumerate(setup.tasks, 1):
        tests = "no test images" if task.test is None else counted(len(task.test), "test image")
        names = ", ".join(task.class_names[:5]) + (", ..." if len(task.class_names) > 5 else "")
        classes, images = counted(len(task.class_names), "class"), counted(len(task.train), "training image")
        print(f"task {number}: {classes}, {images}, {tests}: {printable(names)}")
    if setup.learner.strategy.adapts:
        _describe_model(setup.learner.model, setup.learner.strategy)
    else:
        print("nothing is trained, and no layer is adapted")
    if not setup.tasks:
        return
    total = sum(len(task.class_names) for task in setup.tasks)
    for name, classifier in setup.learner.classifiers.items():
        print(f"classifier {name}: {classifier.state.nbytes(total) / 2**20:.2f} MiB with {counted(total, 'class')}")


def _describe_model(model: Any, strategy: Strategy) -> None:
    """Print a line per kind of adapted layer, the trainable parameters, and the memory of the input statistics."""
    from dulbe_peft.photos.cost import statistics_bytes, trainable_parameters

    config, layers = model.active_peft_config, model.dual_mode_layers()
    # This encodes an image, and raises an error if a layer is not used: better now than after the first task.
    statistics = statistics_bytes(model)
    kinds = Counter((n.rpartition(".")[2], layer.in_features, layer.out_features) for n, layer in layers.items())
    for (kind, width, height), count in kinds.items():
        support = min(config.support_rank, width - config.residual_rank)
        ranks = f"shared {config.shared_rank}  residual {config.residual_rank}  support <= {support}"
        print(f"{kind}  {width} -> {height}  {counted(count, 'layer')}  {ranks}")
    trained = trainable_parameters(model, strategy)
    total, other = trained["total"], trained["other"]
    print(f"adapted visual layers: {len(layers)}")
    if strategy.trains_adapter or total:
        print(f"trainable parameters: {total:,} ({total - other:,} visual, {other:,} other)")
    else:
        print(
            f"trainable parameters: those of {strategy.name}, which are made with the first task; the adapter stays 0"
        )
    if strategy.remembers_inputs:
        print(f"statistics: {statistics / 2**20:.2f} MiB")
